"""holdfast.open_run: typed access to what is in a run directory, or in the log of another tool."""

from __future__ import annotations

import json
import os

import pytest

import holdfast
from holdfast.core.base.errors import LogRefused, RunDirError
from shown_run import append, make_run, metrics_row


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return holdfast.open_run(make_run(tmp_path_factory.mktemp("runs") / "a"))


def test_metrics_are_arrays_by_name_with_columns_that_the_package_does_not_know(run):
    loss = run.metrics["loss"]
    assert loss.step.tolist() == [float(step) for step in range(1, 201)]
    assert loss.value[99] == 1.0 + 4.0 / 100
    assert run.metrics["mine"].value[9] == 20.0
    assert run.undone["loss"].value.max() == 40.0


def test_incident_has_findings_experiments_cause_and_files(run):
    (incident,) = [incident for incident in run.incidents if incident.number]
    assert (incident.kind, incident.onset, incident.state, incident.cause) == ("loss_spike", 100, "closed", "transient")
    assert incident.actions == ["rollback"]
    assert [finding["detector"] for finding in incident.findings] == ["loss_spike"]
    assert [(e["rung"], e["result"]) for e in incident.experiments] == [("same_data", "gone")]
    assert incident.files == {"replay.json": {"result": "the same"}}
    assert incident.verdict is not None


def test_checkpoints_quarantine_hangs_ranks_config_and_status(run):
    assert [(c.step, c.health) for c in run.checkpoints] == [(50, "good"), (150, "bad")]
    assert run.quarantine[0]["samples"] == [7]
    assert run.hangs[0]["summary"] == "rank 1"
    assert run.ranks[1][0]["event"] == "failed"
    assert run.config["train"]["lr"] == 1e-3
    assert (run.status, run.is_training, run.summary.rollbacks) == ("recovered", False, 1)
    assert run.events[0]["event"] == "run_begin"


def test_a_checkpoint_that_was_certified_when_it_was_saved_stays_good_after_pruning(tmp_path):
    def saved(step, reason):
        return {"event": "checkpoint", "status": "saved", "name": f"step_{step}", "step": step, "reason": reason}

    reasons = enumerate(("start", "stop", "signal", "scheduled", "end"))
    pruned = {"event": "checkpoint", "status": "pruned", "name": "step_0", "step": 0, "why": "old"}
    events = [{"event": "run_begin"}, *(saved(step, reason) for step, reason in reasons), pruned]
    append(tmp_path / "journal.jsonl", *({**event, "time": 1e9, "n": n} for n, event in enumerate(events, 1)))
    health = [c.health for c in holdfast.open_run(tmp_path).checkpoints]
    assert health == ["good", "good", "good", "candidate", "candidate"]


def test_goodput_is_the_share_of_the_wall_time_in_kept_steps(run):
    goodput = run.goodput
    assert goodput.wall_seconds == pytest.approx(120.0, rel=0.15)
    assert goodput.seconds["productive"] == pytest.approx(50.0)
    assert goodput.share == pytest.approx(50.0 / goodput.wall_seconds)
    assert goodput.seconds["rollback"] == pytest.approx(1.25)
    assert sum(goodput.seconds.values()) == pytest.approx(goodput.wall_seconds, abs=0.01)


def test_run_is_shown_in_a_notebook_without_markup_of_strangers(tmp_path):
    run = holdfast.open_run(make_run(tmp_path / "<img src=x onerror=alert(1)>"))
    shown = run._repr_html_()
    assert "<svg" in shown and "&lt;img" in shown and "<img" not in shown
    assert "recovered, 200 steps" in repr(run)


def test_run_without_an_end_is_training_while_it_is_written_and_ended_later(tmp_path):
    path = make_run(tmp_path / "a", ended=False)
    assert holdfast.open_run(path).status == "training"
    for file in ("metrics.jsonl", "journal.jsonl"):
        os.utime(path / file, (1e9, 1e9))
    assert holdfast.open_run(path).status == "ended"


def test_nested_numbers_become_columns_of_their_own(tmp_path):
    path = make_run(tmp_path / "a", spike=None)
    rows = (
        metrics_row(step, 1.0, phases={"forward": 0.1 * step, "data": 0.2, "note": "x"}) for step in range(201, 260)
    )
    append(path / "metrics.jsonl", *rows)
    run = holdfast.open_run(path)
    assert run.metrics["phases.forward"].step[0] == 201.0
    assert run.metrics["phases.data"].value.tolist() == [0.2] * 59
    assert "phases.note" not in run.metrics and "phases" not in run.metrics
    assert len(run.metrics["mine"].value) == 200


def test_column_with_text_big_numbers_and_nan_keeps_its_numbers(tmp_path):
    path = make_run(tmp_path / "a", spike=None)
    values = [float("nan"), float("inf"), "text", None, 10**400, True, 3]
    append(path / "metrics.jsonl", *(metrics_row(201 + n, 1.0, odd=value) for n, value in enumerate(values)))
    odd = holdfast.open_run(path).metrics["odd"]
    assert odd.step.tolist()[:2] == [201.0, 202.0] and odd.step[-1] == 207.0 and odd.value[-1] == 3.0


def test_column_whose_name_cannot_be_read_is_among_the_limits(tmp_path):
    path = make_run(tmp_path / "a", spike=None)
    append(path / "metrics.jsonl", metrics_row(201, 1.0, **{'top "1"': 3.0, "good": 2.0}))
    table = holdfast.open_run(path).table
    assert "good" in table.columns
    assert any("top" in limit.text for limit in table.limits if limit.code == "columns_left_out")


def test_log_of_another_tool_opens_too(tmp_path):
    log = tmp_path / "train.csv"
    log.write_text("step,loss\n" + "".join(f"{n},{5 / n:.4f}\n" for n in range(1, 80)))
    run = holdfast.open_run(log)
    assert (run.status, run.incidents, run.checkpoints, run.quarantine, run.ranks) == ("log", [], [], [], {})
    assert len(run.metrics["loss"].value) == 79


@pytest.mark.parametrize("name", ["none", "none/at/all", "a\0b"])
def test_missing_path_is_one_error_with_the_path(tmp_path, name):
    with pytest.raises(RunDirError, match="no such file"):
        holdfast.open_run(tmp_path / name)


def test_folder_of_runs_names_one_of_them_and_the_live_page(tmp_path):
    make_run(tmp_path / "a")
    with pytest.raises(RunDirError, match=r"holds 1 run and.*did you mean .*/a\?.*holdfast ui"):
        holdfast.open_run(tmp_path)


def test_file_that_is_no_log_is_refused(tmp_path):
    (tmp_path / "x").write_text("nothing here\n")
    with pytest.raises(LogRefused):
        holdfast.open_run(tmp_path / "x").table  # noqa: B018


def test_links_and_damage_in_a_run_directory_are_passed_over(tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps({"result": "secret"}))
    path = make_run(tmp_path / "a")
    (path / "incidents" / "0001" / "link.json").symlink_to(secret)
    (path / "incidents" / "0001" / "torn.json").write_text("{")
    (path / "quarantine.json").write_text("[")
    run = holdfast.open_run(path)
    assert list(run.incidents[-1].files) == ["replay.json"]
    assert run.quarantine == []
