"""Which checkpoints the journal has as usable, and which of them the disk has not."""

from __future__ import annotations

from typing import Any

from holdfast.core.checkpoints.lost import lost_checkpoints, usable_by_journal


def event(status: str, step: int, **more: Any) -> dict[str, Any]:
    return {"event": "checkpoint", "status": status, "step": step, "name": f"step_{step:08d}", **more}


def test_good_ones_and_those_written_at_start_stop_and_end_are_usable():
    events = [
        event("saved", 0, reason="start"),
        event("saved", 10, reason="scheduled"),
        event("saved", 20, reason="scheduled"),
        event("good", 20),
        event("saved", 30, reason="end", handover=True),
        event("saved", 40, reason="stop"),
        event("saved", 50, reason="scheduled"),
        event("candidate", 50, why="the state an orderly end left"),
        event("failed", 60, reason="scheduled"),
        {"event": "note", "name": "step_00000070", "step": 70, "status": "good"},
    ]
    assert list(usable_by_journal(events).values()) == [0, 20, 30, 40, 50]


def test_those_that_were_pruned_quarantined_or_bad_are_not():
    events = [event("good", step) for step in (10, 20, 30, 40)]
    events += [event("pruned", 10), event("quarantined", 20), event("bad", 30)]
    assert usable_by_journal(events) == {"step_00000040": 40}


def test_only_those_newer_than_the_state_in_use_are_reported_newest_first():
    usable = {f"step_{step:08d}": step for step in (10, 20, 30, 40)}
    assert lost_checkpoints(usable, {"step_00000030"}, 10) == [("step_00000040", 40), ("step_00000020", 20)]
