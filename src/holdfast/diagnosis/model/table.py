"""One shape for every log: a table of signals, with evaluations, events, and the limits of the log.

A value that was not logged is missing. A logged value that is not a number is NaN. `present` tells the two apart, so that
a dead run never passes for a run that ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

COLUMNS = {
    "loss": "training loss",
    "reward": "mean reward or return of an episode",
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
"""Column names that every importer maps to. Other columns of a log keep their names."""
MAX_EVENTS = 10_000


class Limit(NamedTuple):
    """Holds something this log cannot show. `code` is for programs, `text` for people."""

    code: str
    text: str


class Event(NamedTuple):
    """Holds a message of the log: an overflow, a restart, an error, a checkpoint."""

    step: int | None
    kind: str
    text: str


def cut_event_text(kind: str, text: str) -> str:
    """Return as much of a message as is kept. The sizes of a failed allocation are at its end."""
    return text[: 1000 if kind == "oom" else 300]


class Series(NamedTuple):
    """Holds values that are not in every record, such as evaluations."""

    step: NDArray[np.float64]
    value: NDArray[np.float64]


@dataclass
class Table:
    """Holds one run. Row i is one training record; `columns[name][i]` counts only if `present[name][i]`."""

    path: str
    format: str
    step: NDArray[np.float64]
    columns: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    present: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    evals: dict[str, Series] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """facts about the whole run: precision, world size, configuration, versions"""
    unit: str = "step"
    """what `step` counts: step, epoch, tick, or record if the log counts nothing"""
    dropped: int = 0
    """number of unreadable records; `limits` explains each kind of them"""

    def __len__(self) -> int:
        return len(self.step)

    def has(self, name: str) -> bool:
        return name in self.columns and bool(self.present[name].any())

    def series(self, name: str) -> Series:
        """Return the logged values of a column with their steps, non-finite values included."""
        if name not in self.columns:
            return Series(np.empty(0), np.empty(0))
        logged = self.present[name]
        return Series(self.step[logged], self.columns[name][logged])

    def step_interval(self) -> float:
        """Return the median distance between two records, in steps."""
        distances = np.diff(self.step)
        distances = distances[distances > 0]
        return float(np.median(distances)) if len(distances) else 1.0

    def has_limit(self, code: str) -> bool:
        return any(limit.code == code for limit in self.limits)

    def add_limit(self, code: str, text: str) -> None:
        """Record a limit, unless one with this code exists."""
        if not self.has_limit(code):
            self.limits.append(Limit(code, text))

    def add_event(self, step: float | None, kind: str, text: str) -> bool:
        """Record an event. Return False if the table is full and the event is dropped."""
        if len(self.events) >= MAX_EVENTS:
            return False
        self.events.append(Event(None if step is None else int(step), kind, cut_event_text(kind, text)))
        return True
