"""The sum of a run, read off its journal."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.record.tally import Summary, Tally


def tally(*events: dict[str, Any]) -> Summary:
    made = Tally()
    for event in events:
        made.feed(event)
    return made.summary(committed=100)


def opened(number: int = 1) -> dict[str, Any]:
    return {"event": "incident_opened", "incident": number, "kind": "loss_spike", "step": 40, "onset": 38}


def action(name: str, incident: int | None = 1, **more: Any) -> dict[str, Any]:
    return {"event": "action", "action": name, "incident": incident, **more}


def outcome(status: str, **more: Any) -> dict[str, Any]:
    return {"event": "outcome", "status": status, **more}


CLOSED = {"event": "incident_closed", "incident": 1}
STOP = action("stop", reason="budget spent")
RESTART = {"event": "restart"}
ACK = {"event": "ack"}


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([], "clean"),
        ([{"event": "run_begin"}, {"event": "progress"}, {"event": "plan"}, {"no": "name"}], "clean"),
        ([outcome("overflowed")], "clean"),
        ([RESTART], "clean"),
        ([opened()], "observed"),
        ([opened(), CLOSED], "observed"),
        ([opened(), action("skip"), CLOSED], "recovered"),
        ([action("skip", incident=None)], "recovered"),
        ([opened(), action("rollback"), STOP], "stopped"),
        ([opened(), STOP, ACK], "recovered"),
        ([opened(), STOP, ACK, RESTART], "recovered"),
        ([opened(), STOP, RESTART], "recovered"),
        ([opened(), STOP, RESTART, opened(2), STOP], "stopped"),
    ],
)
def test_status_of_a_run(events, status):
    assert tally(*events).status == status


def test_stop_that_did_not_latch_is_over_when_the_run_goes_on():
    """`nan_action = "raise"` ends a process and not the run."""
    assert tally(opened(), STOP).stopped == "budget spent"
    assert tally(opened(), STOP, RESTART).stopped is None


def test_outcomes_are_counted_and_their_cost_is_summed():
    summary = tally(
        outcome("skipped", seconds_lost=1.5),
        outcome("skipped", seconds_lost=0.5),
        outcome("replayed", seconds_lost=1.0),
        outcome("rolled_back", seconds_lost=20.0),
        outcome("overflowed"),
        outcome("discarded", seconds_lost=None),
        outcome("stopped", seconds_lost=1.0),
    )
    assert (summary.skipped, summary.replayed, summary.rollbacks, summary.overflowed) == (2, 1, 1, 1)
    assert summary.seconds_lost == 24.0
    assert summary.committed == 100


def test_quarantined_data_and_lr_cuts_are_counted():
    summary = tally(
        {"event": "quarantine", "batches": 200},
        {"event": "quarantine", "batches": 1},
        {"event": "quarantine", "samples": [3, 5, 8]},
        action("cut_lr"),
    )
    assert (summary.batches_skipped, summary.samples_quarantined, summary.lr_cuts) == (201, 3, 1)


def test_incidents_are_listed_by_number_with_what_was_done_and_how_they_ended():
    summary = tally(
        opened(2), opened(1), action("skip", 1), action("rollback", 1), CLOSED, action("stop", 2, reason="enough")
    )
    assert [(i.number, i.kind, i.step, i.onset, i.actions, i.state) for i in summary.incidents] == [
        (1, "loss_spike", 40, 38, ["skip", "rollback"], "closed"),
        (2, "loss_spike", 40, 38, ["stop"], "stopped"),
    ]


def test_acknowledgement_closes_the_incident_that_was_open_and_lets_a_stopped_one_be_stopped():
    summary = tally(opened(1), STOP, opened(2), action("skip", 2), ACK)
    assert [i.state for i in summary.incidents] == ["stopped", "closed"]


def test_lines_of_a_torn_journal_that_refer_to_lost_ones_are_counted_all_the_same():
    summary = tally(action("skip", 7), outcome("skipped"), {"event": "incident_closed", "incident": 7})
    assert (summary.status, summary.skipped, summary.incidents) == ("recovered", 1, [])


def test_summary_in_words():
    summary = tally(
        opened(),
        action("rollback"),
        action("cut_lr"),
        outcome("skipped", seconds_lost=1.25),
        outcome("rolled_back"),
        outcome("overflowed"),
        {"event": "quarantine", "batches": 4, "samples": [1]},
        STOP,
    )
    assert str(summary).splitlines() == [
        "stopped: 100 steps committed, 1 skipped, 1 rolled back, 1 overflowed (loss scale)",
        "data left out: 4 batches, 1 sample ids",
        "time lost: 1.2 s",
        "incident 1: loss_spike at step 40: rollback, cut_lr, stop; stopped",
        "stopped: budget spent",
    ]
    assert str(tally()) == "clean: 100 steps committed"
    assert "recorded only; open" in str(tally(opened()))
    assert "data left out: 0 batches, 2 sample ids" in str(tally({"event": "quarantine", "samples": [1, 2]}))


LOOP = {"event": "facts", "facts": {"loop": {"accumulate": 1, "batch_size": 16}}}


def cause(cause: str = "data", **more: Any) -> dict[str, Any]:
    return {"event": "cause", "incident": 1, "step": 50, "cause": cause, "text": "it came back with the data", **more}


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([LOOP, cause(data=[[0, 4976, 4992], [0, 4992, 5168]])], "data (batches 312 to 323)"),
        ([LOOP, cause(data=[[0, 160, 176]])], "data (batch 11)"),
        (
            [LOOP, cause(data=[[0, 160, 176], [2, 0, 32], [2, 64, 80]])],
            "data (batches 11, 1 to 2 of epoch 2, 5 of epoch 2)",
        ),
        ([LOOP, cause(data=[[1, 160, 170]])], "data (positions 160 to 169 of epoch 1)"),
        ([cause(data=[[0, 7, 8]])], "data (position 7)"),
        ([LOOP, cause(data=[[0, 0, 16]], samples=[3])], "data (batch 1, sample 3)"),
        ([cause(samples=[1, 2, 3, 4, 5, 6])], "data (samples 1, 2, 3, 4 and 2 more)"),
        ([cause()], "data"),
        ([cause(data=[[0, 0, 16]]), cause("transient")], "transient"),
        ([cause("not_established")], "not established"),
    ],
)
def test_line_of_an_incident_has_its_last_cause_and_the_data_at_fault(events, words):
    (incident,) = tally(opened(), action("rollback"), action("skip"), action("skip"), *events, CLOSED).incidents
    assert str(incident) == f"incident 1: loss_spike at step 40: rollback, skip x2; cause: {words}; closed"
    assert incident.text == "it came back with the data"


def test_samples_that_an_incident_quarantines_are_the_data_at_fault():
    quarantined = {"event": "quarantine", "samples": [7, 9], "incident": 1}
    (incident,) = tally(opened(), cause(data=[[0, 0, 16]]), quarantined, quarantined).incidents
    assert (incident.samples, incident.where) == ([7, 9], "positions 0 to 15, samples 7, 9")
    (innocent,) = tally(opened(), cause("transient"), quarantined).incidents
    assert innocent.samples == []


def test_every_batch_of_an_incident_that_was_at_fault_is_named():
    (incident,) = tally(opened(), LOOP, cause(data=[[0, 0, 16]]), cause(data=[[0, 64, 80]], samples=[70])).incidents
    assert incident.where == "batches 1, 5, sample 70"


def test_batches_that_are_served_again_are_not_left_out():
    quarantined = [{"event": "quarantine", "spans": [[0, n, n + 16]], "batches": 1} for n in (0, 16, 32)]
    released = {"event": "released", "spans": [[0, 0, 16], [0, 16, 32]]}
    assert tally(*quarantined, released).batches_skipped == 1
    assert tally(released).batches_skipped == 0


def test_cause_of_an_incident_that_is_not_on_record_is_ignored():
    assert tally(cause()).incidents == []
    assert tally(opened(), {"event": "cause", "cause": "lr"}).incidents[0].cause is None


def test_note_with_a_cause_is_kept_and_is_no_incident():
    made = Tally()
    evidence = {"cause": "data", "data": [[0, 160, 176]]}
    note = {"event": "finding", "severity": "note", "kind": "loss_spike", "step": 12, "onset": 11, "message": "back"}
    for event in (
        LOOP,
        {**note, "evidence": {"peak": 9.0}},
        {**note, "kind": "desync", "evidence": {"cause": "software"}},
        {**note, "kind": "own", "evidence": {"cause": ["data"]}},
        {**note, "kind": "own", "evidence": {"cause": "data", "data": "all of it"}},
        {**note, "evidence": evidence},
        {**note, "evidence": evidence},
    ):
        made.feed(event)
    (kept,) = made.notes.values()
    assert (kept.kind, kept.onset, kept.step, kept.cause, kept.text) == ("loss_spike", 11, 12, "data", "back")
    assert kept.where == "batch 11"
    assert made.summary(100).incidents == []


def test_summary_taken_early_does_not_change_when_the_run_goes_on():
    made = Tally()
    early = made.summary(1)
    made.feed(outcome("skipped"))
    made.feed(opened())
    assert (early.skipped, early.incidents, early.committed) == (0, [], 1)
