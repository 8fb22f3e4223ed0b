"""Goodput: the share of a run's wall time that trained steps which stayed, and where every other second went.

It follows from journal and metrics of all processes of the run. Each row has the time since the row before it, and each
process begins with an event, so every second from the first event to the last belongs to exactly one category.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.core.base import durable
from holdfast.core.record.journal import MAX_BYTES, MAX_LINE_BYTES, read
from holdfast.core.record.rundir import RunDir

Values = NDArray[np.float64]

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


_DECODER = msgspec.json.Decoder(TimedRow)
_NOTHING_LOST = LostPhases()
_BLOCK = 4096
"""lines that are decoded at once"""


def read_goodput(run: RunDir, events: Iterable[Mapping[str, Any]] | None = None) -> Goodput:
    """Return the goodput of a run directory. events: its journal, if that is read already. OSError if it cannot be read."""
    rows: list[TimedRow] = []
    with contextlib.suppress(FileNotFoundError):
        lines = (line for _, line in durable.read_lines(run.metrics, 4 * MAX_BYTES, MAX_LINE_BYTES))
        while block := list(islice(lines, _BLOCK)):
            rows += _decode(block)
    return compute_goodput(read(run.journal).events if events is None else events, rows)


def _decode(lines: list[bytes]) -> list[TimedRow]:
    """Return the rows of these lines. Those that are torn or damaged are left out."""
    try:
        return _DECODER.decode_lines(b"".join(lines))
    except (ValueError, RecursionError):  # a loss that is NaN, or damage: line by line
        rows = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(msgspec.convert(json.loads(line), TimedRow))
    return rows


def compute_goodput(events: Iterable[Mapping[str, Any]], rows: Iterable[TimedRow]) -> Goodput:
    """Return the goodput of a run from its journal and its rows, both in the order in which they were written."""
    timed = [event for event in events if _is_time(event.get("time"))]
    is_number = math.isfinite
    rows = [r for r in rows if r.step is not None and r.time is not None and is_number(r.time + r.step_seconds)]
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    if not timed:
        return Goodput(wall_seconds=0.0, seconds=seconds)
    began, causes = timed[0]["time"], np.array([cause or "" for cause in _undone(timed, rows)], dtype="U16")
    times: Values = np.array([row.time for row in rows], dtype=np.float64)
    ended = max(timed[-1]["time"], float(times.max(initial=began)))
    at = np.maximum.accumulate(np.concatenate(([began], times)))
    """until when every second is counted, before each row and after the last"""
    starts = np.maximum(at[:-1], times - np.maximum(0.0, [row.step_seconds for row in rows]))
    spent = np.maximum(0.0, times - starts)
    is_kept = causes == ""
    _add(seconds, split_seconds([row for row, kept in zip(rows, is_kept, strict=True) if kept], spent[is_kept]))
    for cause in np.unique(causes[~is_kept]).tolist():
        seconds[cause] += float(spent[causes == cause].sum())
    births = [event["time"] for event in timed if event.get("event") in ("run_begin", "restart")]
    _add(seconds, _split_gaps(at, np.append(starts, max(at[-1], ended)), np.sort(births)))
    return Goodput(wall_seconds=ended - began, seconds={name: round(value, 3) for name, value in seconds.items()})


def split_seconds(rows: Sequence[TimedRow], spent: Values) -> dict[str, float]:
    """Return the seconds of these rows by category. spent: how many seconds of each row count."""
    lost, left, seconds = [row.phases or _NOTHING_LOST for row in rows], spent.copy(), {}
    columns = {
        "data_wait": [phases.data for phases in lost],
        "checkpoint": [phases.checkpoint for phases in lost],
        "guard": [phases.guard for phases in lost],
        "between_steps": [phases.between + phases.eval for phases in lost],
        "start": [phases.compile for phases in lost],
        "straggler": [row.straggler_seconds for row in rows],
    }
    for category, values in columns.items():
        part = np.clip(np.nan_to_num(np.array(values, dtype=np.float64)), 0.0, left)
        left -= part
        seconds[category] = float(part.sum())
    return {**seconds, "productive": float(left.sum())}


def _split_gaps(begins: Values, ends: Values, births: Values) -> dict[str, float]:
    """Return time without rows by category. It belongs to the start of a process, if one began in it."""
    gaps = np.maximum(0.0, ends - begins)
    if not len(births):
        return {"unknown": float(gaps.sum())}
    last = np.searchsorted(births, ends, side="right") - 1
    is_start = (gaps > 0) & (last >= 0) & (births[last] >= begins)
    is_first = is_start & (births[last] == births[0])
    parts = {"unknown": ~is_start, "start": is_first, "restart": is_start & ~is_first}
    return {category: float(gaps[chosen].sum()) for category, chosen in parts.items()}


def _add(totals: dict[str, float], seconds: Mapping[str, float]) -> None:
    for category, value in seconds.items():
        totals[category] += value


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
