"""What a log says, in one shape: a table of signals, evaluations beside it, events, and what the log cannot show.

A value that was not logged is missing; one that was logged and is not a number is NaN. `present` tells them apart, so
that a dead run is never taken for one that merely ended.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.core.base.types import Signal

COLUMNS = {
    "loss": "training loss",
    "grad_norm": "gradient norm before clipping, or as logged",
    "lr": "learning rate",
    "loss_scale": "loss scale of a dynamic scaler",
    "update_rms": "root mean square of Adam's update relative to its second moment",
    "weight_norm": "norm of the parameters",
    "seconds": "wall time of one step",
    "tokens_per_second": "throughput (tokens, samples or frames, as logged)",
    "tokens": "tokens or samples seen so far",
    "memory_allocated": "device memory allocated, GB",
    "memory_reserved": "device memory reserved, GB",
    "memory_peak": "peak device memory, GB",
    "batch_size": "global batch size",
    "sequence_length": "sequence length",
    "epoch": "epoch, with its fraction",
    "skipped": "steps skipped so far or in this interval",
}
"""Names every importer maps to. Anything else a log holds is kept under its own name."""


class Limit(NamedTuple):
    """Something this log cannot show. `code` is for programs, `text` for people."""

    code: str
    text: str


class Event(NamedTuple):
    """Something the log says in words: an overflow, a restart, an error, a checkpoint."""

    step: int | None
    kind: str
    text: str


class Series(NamedTuple):
    """Values that are not logged with every record, such as evaluations."""

    step: NDArray[np.float64]
    value: NDArray[np.float64]


@dataclass
class Table:
    """One run. Row i is one training record; `columns[name][i]` is meaningful where `present[name][i]`."""

    path: str
    format: str
    step: NDArray[np.float64]
    columns: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    present: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    evals: dict[str, Series] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """what the log says of the run as a whole: precision, world size, configuration, versions"""
    dropped: int = 0
    """records that were there and could not be read; each kind of them is in `limits`"""

    def __len__(self) -> int:
        return len(self.step)

    def has(self, name: str) -> bool:
        return name in self.columns and bool(self.present[name].any())

    def series(self, name: str) -> Series:
        """The logged values of a column, non-finite ones included, with their steps."""
        if name not in self.columns:
            return Series(np.empty(0), np.empty(0))
        there = self.present[name]
        return Series(self.step[there], self.columns[name][there])

    def interval(self) -> float:
        """The usual distance between two records, in steps."""
        if len(self.step) < 2:
            return 1.0
        apart = np.diff(self.step)
        apart = apart[apart > 0]
        return float(np.median(apart)) if len(apart) else 1.0

    def limit(self, code: str) -> bool:
        return any(limit.code == code for limit in self.limits)

    def signals(self) -> Iterator[Signal]:
        """Row by row, as the detectors take them. A row without a loss has NaN only if the log says so."""
        names = [n for n in ("loss", "grad_norm", "lr", "loss_scale", "update_rms", "seconds") if n in self.columns]
        rows = [(n, self.columns[n].tolist(), self.present[n].tolist()) for n in names]
        for i, step in enumerate(self.step.tolist()):
            row = {n: values[i] for n, values, there in rows if there[i]}
            if "loss" in row:
                row = {n: v for n, v in row.items() if n in Signal.__struct_fields__}
                yield Signal(step=int(step), **row)


class Builder:
    """Collects records row by row; at most 8 bytes and a bit a value, whatever the log's size."""

    MOST_EVENTS = 10_000

    def __init__(self, path: str, format: str) -> None:
        self.table = Table(path, format, np.empty(0))
        self._step = array("d")
        self._columns: dict[str, array[float]] = {}
        self._missing: dict[str, array[int]] = {}
        self._evals: dict[str, tuple[array[float], array[float]]] = {}
        self.events_lost = 0

    def __len__(self) -> int:
        return len(self._step)

    @property
    def last_step(self) -> float | None:
        return self._step[-1] if self._step else None

    def row(self, step: float, values: Mapping[str, float | None]) -> None:
        """One training record. None: not logged. NaN: logged, and not a number."""
        at = len(self._step)
        self._step.append(step)
        for name, value in values.items():
            if value is None:
                continue
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = array("d")
                self._missing[name] = array("b")
            if len(column) < at:
                gap = at - len(column)
                column.extend([math.nan] * gap)
                self._missing[name].extend([1] * gap)
            column.append(value)
            self._missing[name].append(0)

    def evaluation(self, name: str, step: float, value: float) -> None:
        steps, values = self._evals.setdefault(name, (array("d"), array("d")))
        steps.append(step)
        values.append(value)

    def event(self, step: float | None, kind: str, text: str) -> None:
        if len(self.table.events) < self.MOST_EVENTS:
            self.table.events.append(Event(None if step is None else int(step), kind, text[:300]))
        else:
            self.events_lost += 1

    def limit(self, code: str, text: str) -> None:
        if not self.table.limit(code):
            self.table.limits.append(Limit(code, text))

    def build(self) -> Table:
        table, n = self.table, len(self._step)
        table.step = np.frombuffer(self._step, dtype=np.float64) if n else np.empty(0)
        for name, column in self._columns.items():
            gap = n - len(column)
            column.extend([math.nan] * gap)
            self._missing[name].extend([1] * gap)
            table.columns[name] = np.frombuffer(column, dtype=np.float64)
            table.present[name] = np.frombuffer(self._missing[name], dtype=np.int8) == 0
        for name, (steps, values) in self._evals.items():
            table.evals[name] = Series(np.frombuffer(steps), np.frombuffer(values))
        if self.events_lost:
            self.limit("events_lost", f"{self.events_lost} further events in words are not kept")
        return table
