"""Goodput: the share of a run's wall time that trained steps which stayed, and where every other second went.

It follows from journal and metrics of all processes of the run. Each row has the time since the row before it, and each
process begins with an event, so every second from the first event to the last belongs to exactly one category.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from holdfast.core.record.journal import read, read_rows
from holdfast.core.record.rundir import RunDir

CATEGORIES = (
    "productive", "restart", "rollback", "experiment", "checkpoint", "straggler", "data_wait", "guard", "between_steps",
    "start", "unknown",
)  # fmt: skip
_PHASES = {
    "data": "data_wait",
    "checkpoint": "checkpoint",
    "guard": "guard",
    "between": "between_steps",
    "eval": "between_steps",
    "compile": "start",
}
"""phase of a row -> its category; the other phases are productive"""


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds of a run by category; `unknown` is time without rows, such as the end of a killed process."""

    wall_seconds: float
    seconds: dict[str, float]

    @property
    def share(self) -> float:
        """Return productive time over wall time; 0 for a run without time."""
        return self.seconds["productive"] / self.wall_seconds if self.wall_seconds > 0 else 0.0

    def __str__(self) -> str:
        lost = {name: s for name, s in self.seconds.items() if name != "productive" and s > 0}
        parts = [f"{name.replace('_', ' ')} {s:.1f} s" for name, s in sorted(lost.items(), key=lambda item: -item[1])]
        return f"goodput {100 * self.share:.1f}% of {self.wall_seconds:.1f} s; lost: {', '.join(parts) or 'nothing'}"


class _Interval(NamedTuple):
    began: float
    ended: float
    step: int
    is_committed: bool
    row: Mapping[str, Any]


def read_goodput(run: RunDir) -> Goodput:
    """Return the goodput of a run directory. OSError if its journal cannot be read."""
    rows: list[dict[str, Any]] = []
    with contextlib.suppress(FileNotFoundError):
        rows = read_rows(run.metrics).events
    return compute_goodput(read(run.journal).events, rows)


def compute_goodput(events: Iterable[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]) -> Goodput:
    """Return the goodput of a run from its journal and its rows, both in the order in which they were written."""
    timed = [event for event in events if _number(event.get("time")) is not None]
    intervals = [each for row in rows if (each := _interval(row)) is not None]
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    if not timed:
        return Goodput(wall_seconds=0.0, seconds=seconds)
    began = timed[0]["time"]
    ended = max([timed[-1]["time"], *(each.ended for each in intervals[-1:])])
    undone = _undone(timed, intervals)
    starts = [event["time"] for event in timed if event.get("event") in ("run_begin", "restart")]
    at = began
    for number, each in enumerate(intervals):
        start = max(at, each.began)
        if start > at:
            _add_gap(seconds, at, start, starts)
        _add_step(seconds, each, start, undone.get(number))
        at = max(at, each.ended)
    if ended > at:
        _add_gap(seconds, at, ended, starts)
    return Goodput(wall_seconds=ended - began, seconds={name: round(value, 3) for name, value in seconds.items()})


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _interval(row: Mapping[str, Any]) -> _Interval | None:
    """Return the time of a row. Its first row in a process has an end and no beginning: its time is part of the start."""
    ended, step = _number(row.get("time")), _number(row.get("step"))
    if ended is None or step is None:
        return None
    spent = _number(row.get("step_seconds")) or 0.0
    return _Interval(ended - max(0.0, spent), ended, int(step), row.get("status") == "committed", row)


def _undone(events: list[Mapping[str, Any]], intervals: list[_Interval]) -> dict[int, str]:
    """Return the rows whose steps were undone or never landed, by their place, and what undid them."""
    undone = {n: "rollback" for n, each in enumerate(intervals) if not each.is_committed}
    is_experiment = False
    for event in events:
        name = event.get("event")
        if name == "plan":
            is_experiment = bool(event.get("experiment"))
        to_step: Any = None
        if name == "action" and event.get("action") == "rollback":
            to_step, cause = event.get("to_step"), "experiment" if is_experiment else "rollback"
        elif name == "resumed":
            to_step, cause = event.get("step"), "restart"
        elif name == "started_over":
            to_step, cause = 0, "restart"
        if not isinstance(to_step, int):
            continue
        for place, each in enumerate(intervals):
            if each.ended > event["time"]:
                break
            if each.step > to_step and undone.get(place, "rollback") == "rollback":
                # What a skip or a replay had cost already stays a rollback's.
                undone[place] = cause if each.is_committed else undone.get(place, cause)
    return undone


def _add_gap(seconds: dict[str, float], began: float, ended: float, starts: list[float]) -> None:
    """Count time without rows. It belongs to the start of a process, if one began in it."""
    inside = [start for start in starts if began <= start <= ended]
    if not inside:
        seconds["unknown"] += ended - began
    elif inside[-1] == starts[0]:
        seconds["start"] += ended - began
    else:
        seconds["restart"] += ended - began


def _add_step(seconds: dict[str, float], each: _Interval, start: float, undone: str | None) -> None:
    left = max(0.0, each.ended - start)
    if undone is not None:
        seconds[undone] += left
        return
    phases = each.row.get("phases")
    for phase, category in _PHASES.items() if isinstance(phases, dict) else ():
        spent = min(left, max(0.0, _number(phases.get(phase)) or 0.0))  # type: ignore[union-attr]
        seconds[category] += spent
        left -= spent
    waited = min(left, max(0.0, _number(each.row.get("straggler_seconds")) or 0.0))
    seconds["straggler"] += waited
    seconds["productive"] += left - waited
