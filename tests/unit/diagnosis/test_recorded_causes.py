"""What the experiments of a run established is what every report about it says; the tree does not contradict it."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from holdfast.core.base.types import Severity, Span
from holdfast.core.record.journal import Journal
from holdfast.core.record.metrics import MetricsFile
from holdfast.core.record.quarantine import Quarantine
from holdfast.diagnosis.diagnose import DiagnosisReport, IncidentVerdict, diagnose
from holdfast.diagnosis.importers import read
from holdfast.diagnosis.postmortem import build
from holdfast.reports import markdown, terminal

STEPS, BATCH = 600, 16


class RecordedRun:
    """Writes a run directory of 600 committed steps, with the files that a Guard writes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.step = folder, 0
        self.journal = Journal(folder / "journal.jsonl", fsync=False)
        self.metrics = MetricsFile(folder / "metrics.jsonl", 10.0)
        self.quarantine = Quarantine(folder / "quarantine.json")
        self._random = np.random.default_rng(0)
        self.journal.write("run_begin", environment={"precision": "fp32"})
        self.journal.write("facts", facts={"loop": {"accumulate": 1, "batch_size": BATCH}})

    def train(self, until: int, rise: float = 0.0, grad_norm: float = 0.3, **changes: Any) -> None:
        """Commit steps up to `until`, with a loss this much higher."""
        while self.step < until:
            self.step += 1
            row = {"step": self.step, "loss": 2.0 + rise + self._random.normal(0, 0.02), "lr": 1e-3}
            row |= {"grad_norm": grad_norm + self._random.normal(0, 0.01), "status": "committed"}
            self.metrics.write(row | changes)

    def finding(self, kind: str, severity: Severity, message: str, step: int | None = None, **more: Any) -> None:
        step = step or self.step
        fields = {"onset": step, "detector": "test", "evidence": {}, **more}
        self.journal.write("finding", step=step, kind=kind, severity=severity.name.lower(), message=message, **fields)

    def open(self, kind: str = "loss_spike", onset: int | None = None, number: int = 1) -> None:
        onset = onset or self.step
        self.journal.write("incident_opened", incident=number, kind=kind, step=self.step, onset=onset)

    def roll_back(self, to: int, number: int = 1) -> None:
        steps = {"from_step": self.step, "to_step": to}
        self.journal.write("action", action="rollback", incident=number, step=self.step, reason="loss_spike", **steps)
        self.journal.write("outcome", status="rolled_back", incident=number, step=self.step, **steps)
        self.step = to

    def experiment(self, rung: str, result: str, text: str = "", number: int = 1) -> None:
        self.journal.write("experiment", incident=number, step=self.step, rung=rung, result=result, text=text)

    def cause(self, cause: str, text: str, number: int = 1, **more: Any) -> None:
        self.journal.write("cause", incident=number, step=self.step, cause=cause, text=text, **more)

    def spike(self, onset: int, number: int = 1, until: int = 5, **rows: Any) -> None:
        """Rise at `onset`, and return to ten steps before it."""
        self.train(onset - 1)
        self.train(onset + until, rise=6.0, grad_norm=20.0, **rows)
        self.finding("loss_spike", Severity.ROLLBACK, "several losses are far above the baseline: 8 against 2")
        self.open(onset=onset, number=number)
        self.roll_back(onset - 10, number)

    def close(self, number: int = 1) -> None:
        self.train(self.step + 60)
        self.journal.write("incident_closed", incident=number, step=self.step)

    def diagnose(self) -> DiagnosisReport:
        self.train(STEPS)
        self.journal.write("run_end", step=STEPS)
        self.journal.close()
        self.metrics.close()
        (table,) = read(self.folder)
        return diagnose(table)

    def postmortem(self) -> str:
        (table,) = read(self.folder)
        return markdown.render_postmortem(build(table, diagnose(table)))


@pytest.fixture
def run(tmp_path) -> RecordedRun:
    return RecordedRun(tmp_path)


def garbage_batches(run: RecordedRun) -> IncidentVerdict:
    """Batches 300 to 305 are garbage: the same data raises the loss again, other data does not."""
    spans = [Span(0, 299 * BATCH, 303 * BATCH), Span(0, 303 * BATCH, 305 * BATCH)]
    run.spike(300)
    run.experiment("same_data", "begun")
    run.train(299)
    run.train(303, rise=6.0, grad_norm=20.0)
    run.roll_back(290)
    run.experiment("leave_out_data", "begun", "it came back; batches whose own loss is off are left out")
    run.quarantine.add_spans(spans, "loss_spike")
    run.journal.write("quarantine", spans=spans, batches=6, reason="loss_spike", incident=1)
    run.train(320)
    run.experiment("leave_out_data", "gone")
    run.cause("data", "the loss rises with these batches and does not without them", data=spans)
    run.close()
    (verdict,) = run.diagnose().verdicts
    return verdict


def test_garbage_data_is_named_with_its_batches_and_what_became_of_them(run):
    verdict = garbage_batches(run)
    assert (verdict.kind, verdict.incident, verdict.state) == ("spike_recovered", 1, "closed")
    assert (verdict.leaf, verdict.status) == ("journal_data", "established")
    assert verdict.confidence == 0.95
    assert verdict.cause == "data (batches 300 to 305): the loss rises with these batches and does not without them"
    assert verdict.action.startswith("Inspect batches 300 to 305, positions 4784 to 4879: it is left out of this epoch")
    assert verdict.rivals == []
    assert not any("long-tail" in text for text in [verdict.cause, verdict.action, verdict.confirm, *verdict.evidence])


def test_evidence_is_the_experiments_that_were_run_and_what_came_of_each(run):
    evidence = garbage_batches(run).evidence
    assert [text for text in evidence if text.startswith("experiment")] == [
        "experiment at step 290, the same data again, nothing changed: it came back",
        "experiment at step 320, without the data at the onset: it did not come back",
    ]
    assert "online, step 305: several losses are far above the baseline: 8 against 2" in evidence
    assert any(text.startswith("the loss goes from 1.998") for text in evidence), "the tree adds what it measured"


def test_every_report_of_the_run_says_the_same_cause(run):
    verdict = garbage_batches(run)
    text = run.postmortem()
    assert f"root cause: {verdict.cause}; established by the experiments of the run" in text.replace("\\", "")
    assert "| 320 | cause | data: the loss rises with these batches" in text
    assert "| 320 | experiment | leave_out_data: gone" in text
    (table,) = read(run.folder)
    console = Console(width=200, record=True, file=io.StringIO())
    terminal.show(console, table, diagnose(table))
    assert verdict.cause in console.export_text()
    assert f"cause: {verdict.cause}" in diagnose(table).summary


def test_rows_of_a_repeated_experiment_are_shown_once(run):
    verdict = garbage_batches(run)
    assert (verdict.step_start, verdict.step_end) == (300, 305)
    records = [line for line in run.postmortem().split("## 16.")[1].splitlines() if line.startswith("| 30")]
    assert [line.split(" | ")[0] for line in records] == [f"| {step}" for step in range(300, 306)]


def test_transient_fault_needs_nothing_although_the_curve_looks_like_a_bad_batch(run):
    run.spike(300, until=0)
    run.experiment("same_data", "begun")
    run.train(310)
    run.experiment("same_data", "gone")
    run.cause("transient", "the same data gave a healthy loss")
    run.close()
    (verdict,) = run.diagnose().verdicts
    assert verdict.cause == "transient: the same data gave a healthy loss"
    assert "bit for bit as without it" in verdict.action and "check the hardware" in verdict.action
    assert (verdict.status, verdict.unchecked) == ("established", [])


def test_transient_fault_for_which_a_hook_left_data_out_is_not_called_exact(run):
    run.spike(300)
    run.journal.write("action", action="skip_data", incident=1, step=290, batches=2)
    run.cause("transient", "the same data gave a healthy loss")
    run.close()
    (verdict,) = run.diagnose().verdicts
    assert verdict.action == "Nothing to do. If it repeats, check the hardware of the host."


def jump_of_the_learning_rate(run: RecordedRun) -> None:
    run.train(299)
    message = "the learning rate went from 0.001 to 0.3 in one step, above any earlier rate"
    run.finding("lr_jump", Severity.NOTE, message, step=300, evidence={"lr": 0.3, "before": 1e-3})
    run.spike(301, lr=0.3)


def test_learning_rate_is_named_with_its_numbers(run):
    jump_of_the_learning_rate(run)
    run.experiment("same_data", "came_back", "at the same batch")
    run.journal.write("action", action="hold_lr", incident=1, step=291, max_lr=1e-3)
    run.journal.write("action", action="cut_lr", incident=1, step=291, lr_from=0.3, lr_to=1e-3)
    run.train(330)
    run.experiment("hold_lr", "gone")
    run.cause("lr", "the run is unstable at 0.3")
    run.close()
    (verdict,) = run.diagnose().verdicts
    assert verdict.cause == "lr: the run is unstable at 0.3"
    assert verdict.action.startswith("Lower the learning rate, or look at the code that set it: the learning rate went")
    assert "from 0.001 to 0.3" in verdict.action in verdict.action
    assert "held at 0.001 at step 291; cut from 0.3 to 0.001 at step 291" in verdict.action
    assert "experiment at step 291, the same data again, nothing changed: it came back (at the same batch)" in (
        verdict.evidence
    )
    assert (
        "experiment at step 330, with the learning rate held at a lower one: it did not come back" in verdict.evidence
    )


def test_jump_of_the_learning_rate_is_not_evidence_for_another_cause(run):
    jump_of_the_learning_rate(run)
    run.experiment("same_data", "gone")
    run.cause("transient", "it did not come back at the same rate")
    run.close()
    (verdict,) = run.diagnose().verdicts
    assert verdict.cause.startswith("transient")
    assert not any("learning rate" in text for text in verdict.evidence)
    assert "trigger" not in run.postmortem().split("## 8.")[1].split("##")[0].split("\n", 1)[1]


def test_accepted_objective_replaces_what_the_tree_says_of_the_same_rise(run):
    run.spike(300)
    for rung in ("same_data", "leave_out_data", "cut_lr"):
        run.experiment(rung, "came_back")
    run.train(299)
    run.train(330, rise=1.0)
    run.experiment("accept", "gone")
    run.cause("objective", "the loss has a new level and keeps falling")
    run.train(390, rise=1.0)
    run.journal.write("incident_closed", incident=1, step=390)
    run.train(STEPS, rise=1.0)
    (verdict,) = run.diagnose().verdicts
    assert (verdict.kind, verdict.cause) == ("spike", "objective: the loss has a new level and keeps falling")
    assert "guard.expect_shift" in verdict.action and "[detect] objective" in verdict.action


def test_cause_that_is_not_established_lists_what_is_missing(run):
    run.spike(300)
    run.experiment("same_data", "not_established", "the stream cannot be served again")
    run.experiment("leave_out_data", "begun")
    run.cause("not_established", "the loss is back, on new data")
    run.close()
    (verdict,) = run.diagnose().verdicts
    assert (verdict.cause, verdict.status, verdict.rivals) == ("not established", "unknown", [])
    assert verdict.evidence[0] == "the loss is back, on new data"
    experiments = [text for text in verdict.evidence if text.startswith("experiment")]
    assert experiments[0].endswith("nothing changed: not established (the stream cannot be served again)")
    assert experiments[1].endswith("without the data at the onset: no result on record")
    missing = ["the same data again, nothing changed", "without the data at the onset", "at a lower learning rate"]
    assert verdict.unchecked == [f"not tried, or without a result: {rung}" for rung in missing]
    assert verdict.action.endswith(f"try what is missing: {'; '.join(missing)}.")


def test_experiment_that_another_recovery_ended_has_no_result(run):
    run.spike(300)
    run.experiment("same_data", "begun")
    run.journal.write("experiment", incident=1, step=295, result="not_established", text="a hook took over")
    run.close()
    run.cause("not_established", "a hook took over")
    (verdict,) = run.diagnose().verdicts
    (experiment,) = [text for text in verdict.evidence if text.startswith("experiment")]
    assert experiment == "experiment at step 295, the same data again, nothing changed: not established"


def test_sentence_that_repeats_the_cause_is_shortened(run):
    run.spike(300)
    run.cause("transient", "a transient fault: the same data ran again, and it did not come back")
    run.close()
    (verdict,) = run.diagnose().verdicts
    assert verdict.cause == "transient: the same data ran again, and it did not come back"


def test_last_of_several_causes_holds(run):
    run.spike(300)
    run.cause("data", "it seems so", data=[Span(0, 0, 16)])
    run.cause("transient", "it was not the data")
    run.close()
    (verdict,) = run.diagnose().verdicts
    assert verdict.cause == "transient: it was not the data"
    assert "before, step 290: it seems so" in verdict.evidence


def test_incident_without_an_undone_row_has_its_cause_too(run):
    run.train(300)
    run.open("divergence")
    run.cause("objective", "accepted at once")
    run.close()
    (verdict,) = run.diagnose().verdicts
    assert (verdict.kind, verdict.cause, verdict.step_start) == ("divergence", "objective: accepted at once", 300)
    assert "## 16." in run.postmortem()


def test_incident_of_a_kind_that_the_tree_does_not_know_is_a_note_with_its_cause(run):
    run.train(300)
    run.open("silent_corruption")
    run.cause("transient", "rank 1 agreed with the others in the replay")
    run.close()
    report = run.diagnose()
    assert report.verdicts == []
    (note,) = [note for note in report.notes if note.kind == "incident_closed"]
    assert note.cause == "transient"
    assert note.text.endswith("closed; cause: transient: rank 1 agreed with the others in the replay")
    assert note.action.startswith("Nothing to do")


# Incidents without a cause: older runs, and incidents that are still open


@pytest.mark.parametrize("loss", [8.0, math.nan])
def test_broken_optimizer_state_is_named_as_that_and_not_as_a_nan_loss(run, loss):
    run.train(299)
    run.train(300, loss=loss)
    message = "optimizer.state.0.exp_avg_sq holds NaN or Inf"
    run.finding("nonfinite_state", Severity.ROLLBACK, message, evidence={"tensor": "optimizer.state.0.exp_avg_sq"})
    run.open("nonfinite_state")
    run.roll_back(290)
    run.close()
    (verdict,) = run.diagnose().verdicts
    assert (verdict.kind, verdict.leaf, verdict.status) == ("nonfinite_state", "journal_state", "supported")
    assert verdict.cause == f"{message}; what wrote it is not established"
    assert f"online, step 300: {message}" in verdict.evidence
    assert "the loss is NaN" not in run.postmortem()


def test_broken_state_whose_finding_is_lost_is_still_broken_state(run):
    run.train(300, rise=0.0)
    run.open("nonfinite_state")
    run.roll_back(290)
    run.close()
    (verdict,) = run.diagnose().verdicts
    assert verdict.cause == (
        "the weights, the optimizer state or a buffer hold NaN or Inf; what wrote it is not established"
    )


def test_state_that_no_update_could_have_made_is_named_with_its_tensor(run):
    run.train(300)
    message = "0.weight grew by a factor of 50 in one step"
    run.finding("state_jump", Severity.ROLLBACK, message)
    run.open("state_jump")
    run.roll_back(290)
    run.close()
    (verdict,) = run.diagnose().verdicts
    assert (verdict.kind, verdict.cause) == ("state_jump", f"{message}; what wrote it is not established")


def test_jump_of_the_learning_rate_before_an_incident_is_named(run):
    jump_of_the_learning_rate(run)
    (verdict,) = run.diagnose().verdicts
    assert (verdict.leaf, verdict.status, verdict.state) == ("journal_lr", "supported", "open")
    assert verdict.cause == "the learning rate went from 0.001 to 0.3 in one step, above any earlier rate"
    assert verdict.evidence[0] == f"online, step 300: {verdict.cause}"


def test_jump_long_before_an_incident_is_not_its_cause(run):
    run.finding("lr_jump", Severity.NOTE, "the learning rate went from 0.001 to 0.01 in one step", step=200)
    run.spike(300, until=0)
    run.close()
    (verdict,) = run.diagnose().verdicts
    assert verdict.leaf == "long_tail_batch"


# Notes with a cause


def test_spike_that_came_back_by_itself_is_a_note_with_its_cause_and_no_incident(run):
    run.train(299)
    run.train(300, rise=6.0, grad_norm=20.0)
    run.train(310)
    evidence = {"outcome": "recovered", "cause": "data", "data": [Span(0, 299 * BATCH, 300 * BATCH)]}
    message = "the loss is back at its baseline; its peak was 8"
    for _ in range(2):  # a rollback later may run the same steps again
        run.finding("loss_spike", Severity.NOTE, message, onset=300, new=False, evidence=evidence)
    report = run.diagnose()
    assert report.verdicts == []
    (note,) = [note for note in report.notes if note.kind == "loss_spike"]
    assert (note.cause, note.step_start, note.step_end) == ("data", 300, 310)
    assert note.text == f"not an incident; cause: data (batch 300): {message}"
    assert note.action == "Inspect batch 300, positions 4784 to 4799: it is not left out."
    assert "note: loss_spike" in run.postmortem()


def test_spike_elsewhere_in_the_curve_keeps_its_own_verdict(run):
    run.train(199)
    run.train(200, rise=6.0, grad_norm=20.0)
    run.spike(400)
    run.cause("transient", "it did not come back")
    run.close()
    first, second = run.diagnose().verdicts
    assert (first.step_start, first.incident, first.leaf) == (200, None, "long_tail_batch")
    assert second.leaf == "journal_transient"


# Damaged records


def _break_quarantine(run: RecordedRun) -> None:
    (run.folder / "quarantine.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda run: run.cause("data", "x", data=[[0, 1]]), "data: before"),
        (lambda run: run.cause("data", "x", data=[["a", "b", "c"]]), "data: before"),
        (lambda run: run.cause("data", "x", samples=7), "data: before"),
        (lambda run: run.cause("data", "x", number=9), "data: before"),
        (lambda run: run.journal.write("cause", incident=[1], cause="lr"), "data: before"),
        (lambda run: run.journal.write("cause", incident=1), "data: before"),
        (lambda run: run.journal.write("cause", cause="lr", text="of no incident"), "data: before"),
        (lambda run: run.cause("cosmic", "a cause of another version"), "cosmic: a cause of another version"),
        (lambda run: run.journal.write("experiment", incident=1, rung=["a"], result={}, step="x"), "data: before"),
        (lambda run: run.finding("lr_jump", Severity.NOTE, "", onset=None, evidence=[]), "data: before"),
        (lambda run: run.finding("loss_spike", Severity.NOTE, "", onset="x", evidence={"cause": 3}), "data: before"),
        (_break_quarantine, "data: before"),
    ],
)
def test_damaged_event_does_not_hide_the_others(run, damage: Callable[[RecordedRun], None], cause):
    run.spike(300)
    run.cause("data", "before")
    damage(run)
    run.close()
    (verdict,) = run.diagnose().verdicts
    assert verdict.cause == cause
    assert "## 16." in run.postmortem()
