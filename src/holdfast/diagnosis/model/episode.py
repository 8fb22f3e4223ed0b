"""Episodes, notes, and the kinds of incident: the vocabulary that all rooms of the diagnosis share."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.core.base.types import Finding
from holdfast.diagnosis.model.table import Table

CURVE_KINDS = {
    "nan": "the loss is NaN or Inf",
    "grad_nonfinite": "the gradient is NaN or Inf while the loss is finite",
    "nonfinite_state": "the weights, the optimizer state or a buffer hold NaN or Inf",
    "state_jump": "the weights or the optimizer state change by more than updates can",
    "spike_recovered": "the loss jumps and returns to its baseline",
    "spike": "the loss jumps and does not return to its baseline",
    "divergence": "the loss rises fast and stays high",
    "silent_divergence": "the loss rises slowly, without a jump",
    "grad_explosion": "the gradient norm rises by orders of magnitude",
    "scale_collapse": "the loss scale falls below 1, or overflows continue",
    "dead_run": "the logged values are constant or all zero",
}
MACHINE_KINDS = {
    "oom": "memory ran out",
    "memory_leak": "allocated memory rises and does not stop",
    "fragmentation": "the gap between reserved and allocated memory grows",
    "hang": "a rank or a collective hangs",
    "throughput_drop": "steps become much slower and stay slow",
    "straggler": "one rank is slower than the rest",
}
INCIDENT_KINDS = {**CURVE_KINDS, **MACHINE_KINDS}
"""Every kind that an episode can have. Anything else in a log becomes a note."""


class Episode(msgspec.Struct, kw_only=True):
    """Holds a range of the run in which something is wrong. `first` and `last` are rows of the table."""

    kind: str
    start: float
    end: float
    first: int
    last: int
    confidence: float
    evidence: dict[str, Any] = {}
    findings: list[Finding] = []

    @classmethod
    def at_rows(cls, table: Table, kind: str, first: int, last: int, confidence: float, **more: Any) -> Episode:
        start, end = float(table.step[first]), float(table.step[last])
        return cls(kind=kind, start=start, end=end, first=first, last=last, confidence=confidence, **more)


class Note(msgspec.Struct, kw_only=True):
    """Holds an observation that is not an incident: it looks like a fault, or it is worth knowing."""

    kind: str
    start: float
    end: float
    text: str
