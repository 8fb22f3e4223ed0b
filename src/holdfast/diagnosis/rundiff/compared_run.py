"""One of the two compared runs, in one form for every kind of log."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.diagnosis.model.table import Series

Array = NDArray[np.float64]


class Recovery(NamedTuple):
    """Holds an action on the run: its first step, its last step, and a description."""

    action: str
    first: int
    last: int
    text: str
    factor: float = 1.0
    """factor on the LR at the first step; it returns to 1 linearly"""


@dataclass
class ComparedRun:
    """Holds a run. `columns[name][i]` belongs to `step[i]` and is NaN if not logged. Steps rise."""

    path: str
    format: str
    step: Array
    columns: dict[str, Array] = field(default_factory=dict)
    tokens: Array | None = None
    """tokens seen up to and including step[i]"""
    samples: Array | None = None
    known: dict[str, Any] = field(default_factory=dict)
    """facts with a known meaning: tokenizer, vocab_size, sources, ... as `holdfast.record` names them"""
    settings: dict[str, Any] = field(default_factory=dict)
    """all other facts, flattened: "optimizer.lr" -> 0.003"""
    evals: dict[str, list[tuple[int | None, float]]] = field(default_factory=dict)
    recoveries: list[Recovery] | None = None
    """None if this log does not record them"""
    nonfinite_since: float | None = None
    """the step from which on no loss is finite; None if the last one is"""
    restarts: dict[str, Any] = field(default_factory=dict)
    """settings that a restart changed, with their new values"""
    status: str | None = None
    limits: list[str] = field(default_factory=list)

    def axis(self, name: str) -> Array | None:
        return {"tokens": self.tokens, "samples": self.samples, "steps": self.step}[name]

    def column(self, name: str) -> Array | None:
        """Return a column that has at least one finite value, else None."""
        values = self.columns.get(name)
        return values if values is not None and bool(np.isfinite(values).any()) else None


def find_nonfinite_end(loss: Series) -> float | None:
    """Return the step from which on no logged loss is finite; None if the last one is, or none is logged."""
    order = np.argsort(loss.step, kind="stable")
    finite = np.flatnonzero(np.isfinite(loss.value[order]))
    first = int(finite[-1]) + 1 if len(finite) else 0
    return float(loss.step[order[first]]) if first < len(order) else None


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings: join names by dots, number the items of a list. Keep a list of plain values as it is."""
    if isinstance(value, Mapping) and value:
        inner = value.items()
    elif isinstance(value, list) and value and any(isinstance(v, Mapping | list) for v in value):
        inner = {str(i): v for i, v in enumerate(value)}.items()
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for name, part in inner:
        flat.update(flatten(part, f"{prefix}.{name}" if prefix else str(name)))
    return flat


def as_finite(value: Any) -> float | None:
    """Return a finite number as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
