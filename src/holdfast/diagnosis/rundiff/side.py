"""One of two runs, in the form they are compared in, wherever it came from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Recovery(NamedTuple):
    """Something that was done to the run: from which step, until which, and the words for it."""

    action: str
    first: int
    last: int
    text: str
    factor: float = 1.0
    """of the LR at the first step; it goes back to 1 linearly"""


@dataclass
class Side:
    """`columns[name][i]` belongs to `step[i]`, NaN where it was not logged or is not a number. Steps rise."""

    path: str
    format: str
    step: Array
    columns: dict[str, Array] = field(default_factory=dict)
    tokens: Array | None = None
    """seen up to and with step[i]"""
    samples: Array | None = None
    known: dict[str, Any] = field(default_factory=dict)
    """facts with a meaning: tokenizer, vocab_size, sources, ... as `holdfast.record` names them"""
    settings: dict[str, Any] = field(default_factory=dict)
    """everything else that is said of the run, flat: "optimizer.lr" -> 0.003"""
    evals: dict[str, list[tuple[int | None, float]]] = field(default_factory=dict)
    recoveries: list[Recovery] | None = None
    """None: this log does not tell"""
    restarts: dict[str, Any] = field(default_factory=dict)
    """settings that a later life was started with and the first was not"""
    status: str | None = None
    limits: list[str] = field(default_factory=list)

    def axis(self, name: str) -> Array | None:
        return {"tokens": self.tokens, "samples": self.samples, "steps": self.step}[name]

    def column(self, name: str) -> Array | None:
        values = self.columns.get(name)
        return values if values is not None and bool(np.isfinite(values).any()) else None


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level: names joined by dots, places in a list by number. Lists of plain values stay."""
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


def number(value: Any) -> float | None:
    """A finite number as such; None for anything else: records are written by others too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None
