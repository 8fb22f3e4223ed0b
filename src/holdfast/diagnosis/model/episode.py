"""The words: an episode is a stretch of a run in which something is wrong; a note is about what is not."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.core.base.types import Finding

KINDS = {
    "nan": "the loss is NaN or Inf",
    "grad_nonfinite": "the gradient is NaN or Inf while the loss is not",
    "spike_recovered": "the loss jumps and comes back",
    "spike": "the loss jumps and does not come back to its course",
    "divergence": "the loss leaves its course for good, fast",
    "silent_divergence": "the loss rises slowly, without a jump",
    "grad_explosion": "the gradient norm leaves its course by orders of magnitude",
    "scale_collapse": "the loss scale falls under 1, or overflows do not end",
    "dead_run": "the record is constant or all zero",
}
"""What an episode can be. Everything else a log shows is a note."""


class Episode(msgspec.Struct, kw_only=True):
    """A stretch of the run in which something is wrong. `first` and `last` are rows of the table."""

    kind: str
    start: float
    end: float
    first: int
    last: int
    confidence: float
    evidence: dict[str, Any] = {}
    findings: list[Finding] = []


class Note(msgspec.Struct, kw_only=True):
    """Something that looks like trouble and is not, or is worth knowing and no incident."""

    kind: str
    start: float
    end: float
    text: str
