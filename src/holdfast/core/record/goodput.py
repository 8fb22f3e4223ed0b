"""Goodput: the share of a run's wall time that trained steps which stayed, and where every other second went.

It follows from journal and metrics of all processes of the run. Each row has the time since the row before it, and each
process begins with an event, so every second from the first event to the last belongs to exactly one category.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from holdfast.core.base import durable
from holdfast.core.record.journal import MAX_BYTES, MAX_LINE_BYTES, read
from holdfast.core.record.rundir import RunDir

CATEGORIES = (
    "productive", "restart", "rollback", "experiment", "checkpoint", "straggler", "data_wait", "guard", "between_steps",
    "start", "unknown",
)  # fmt: skip


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds of a run by category; `unknown` is time without rows, such as the end of a killed process."""

    wall_seconds: float
    seconds: dict[str, float]

    @property
    def share(self) -> float:
        """Return productive time over wall time; 0 for a run without time."""
        return self.seconds["productive"] / self.wall_seconds if self.wall_seconds > 0 else 0.0

    @property
    def parts(self) -> dict[str, float]:
        """Return the seconds by category in words, the productive ones first, then the largest; none that is 0."""
        parts = sorted(self.seconds.items(), key=lambda part: (part[0] != "productive", -part[1]))
        return {name.replace("_", " "): seconds for name, seconds in parts if seconds > 0}

    def __str__(self) -> str:
        parts = [f"{name} {s:.1f} s" for name, s in self.parts.items() if name != "productive"]
        return f"goodput {100 * self.share:.1f}% of {self.wall_seconds:.1f} s; lost: {', '.join(parts) or 'nothing'}"


class LostPhases(msgspec.Struct, gc=False):
    """The phases of a row that are not productive."""

    data: float = 0.0
    checkpoint: float = 0.0
    guard: float = 0.0
    between: float = 0.0
    eval: float = 0.0
    compile: float = 0.0


class TimedRow(msgspec.Struct, gc=False):
    """The columns of metrics.jsonl that have to do with time."""

    step: int | None = None
    status: str = ""
    time: float | None = None
    step_seconds: float = 0.0
    """since the row before; 0 in the first row of a process, whose time is part of the start"""
    phases: LostPhases | None = None
    straggler_seconds: float = 0.0

    @property
    def is_committed(self) -> bool:
        return self.status == "committed"

    @property
    def began(self) -> float:
        assert self.time is not None
        return self.time - max(0.0, self.step_seconds)

    def add_to(self, totals: dict[str, float], seconds: float) -> None:
        """Add so many seconds of this row to the categories."""
        if (phases := self.phases) is not None:
            for category, spent in (
                ("data_wait", phases.data),
                ("checkpoint", phases.checkpoint),
                ("guard", phases.guard),
                ("between_steps", phases.between + phases.eval),
                ("start", phases.compile),
            ):
                if spent > 0.0:
                    spent = min(seconds, spent)
                    totals[category] += spent
                    seconds -= spent
        waited = min(seconds, max(0.0, self.straggler_seconds))
        totals["straggler"] += waited
        totals["productive"] += seconds - waited


_DECODER = msgspec.json.Decoder(TimedRow)


def read_goodput(run: RunDir, events: Iterable[Mapping[str, Any]] | None = None) -> Goodput:
    """Return the goodput of a run directory. events: its journal, if that is read already. OSError if it cannot be read."""
    rows: list[TimedRow] = []
    with contextlib.suppress(FileNotFoundError):
        for _, line in durable.read_lines(run.metrics, 4 * MAX_BYTES, MAX_LINE_BYTES):
            with contextlib.suppress(ValueError, RecursionError):  # torn or damaged
                rows.append(_decode(line))
    return compute_goodput(read(run.journal).events if events is None else events, rows)


def _decode(line: bytes) -> TimedRow:
    try:
        return _DECODER.decode(line)
    except msgspec.DecodeError:  # a loss that is NaN
        return msgspec.convert(json.loads(line), TimedRow)


def compute_goodput(events: Iterable[Mapping[str, Any]], rows: Iterable[TimedRow]) -> Goodput:
    """Return the goodput of a run from its journal and its rows, both in the order in which they were written."""
    timed = [event for event in events if _is_time(event.get("time"))]
    rows = [row for row in rows if row.step is not None and _is_time(row.time) and math.isfinite(row.step_seconds)]
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    if not timed:
        return Goodput(wall_seconds=0.0, seconds=seconds)
    at = began = timed[0]["time"]
    ended = max([timed[-1]["time"], *(row.time for row in rows[-1:])])
    undone = _undone(timed, rows)
    starts = [event["time"] for event in timed if event.get("event") in ("run_begin", "restart")]
    for row, cause in zip(rows, undone, strict=True):
        assert row.time is not None
        start = max(at, row.began)
        if start > at:
            seconds[_gap(at, start, starts)] += start - at
        spent = max(0.0, row.time - start)
        if cause is None:
            row.add_to(seconds, spent)
        else:
            seconds[cause] += spent
        at = max(at, row.time)
    if ended > at:
        seconds[_gap(at, ended, starts)] += ended - at
    return Goodput(wall_seconds=ended - began, seconds={name: round(value, 3) for name, value in seconds.items()})


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _undone(events: list[Mapping[str, Any]], rows: list[TimedRow]) -> list[str | None]:
    """Return for each row what undid its step: None if it stayed. An attempt that never landed is a rollback's."""
    undone: list[str | None] = [None if row.is_committed else "rollback" for row in rows]
    is_experiment, place = False, 0
    for event in events:
        name = event.get("event")
        if name == "plan":
            is_experiment = bool(event.get("experiment"))
        to_step: Any = None
        if name == "action" and event.get("action") == "rollback":
            to_step, cause = event.get("to_step"), "experiment" if is_experiment else "rollback"
        elif name in ("resumed", "started_over"):
            to_step, cause = event.get("step") if name == "resumed" else 0, "restart"
        if not isinstance(to_step, int):
            continue
        while place < len(rows) and (rows[place].time or 0.0) <= event["time"]:
            place += 1
        for n in range(place - 1, -1, -1):
            if undone[n] is not None:
                continue
            if (rows[n].step or 0) <= to_step:
                break
            undone[n] = cause
    return undone


def _gap(began: float, ended: float, starts: list[float]) -> str:
    """Return the category of time without rows. It belongs to the start of a process, if one began in it."""
    inside = [start for start in starts if began <= start <= ended]
    if not inside:
        return "unknown"
    return "start" if inside[-1] == starts[0] else "restart"
