"""From the detectors' findings over a log to episodes: what happened, from where to where.

A finding is about a step; an episode is about a stretch. One excursion of the loss may be found a hundred times and is
one episode; a gradient that explodes inside it is another beside it. What looks like trouble and is not (a deliberate
restart, the staircase of epochs, a loss scale finding its level) becomes a note, with its reason.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.core.types import Finding
from holdfast.diagnosis.table import Table

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


def find(table: Table) -> tuple[list[Episode], list[Note]]:
    """All episodes of a run in the order they begin, and the notes."""
    from holdfast.diagnosis import excursions, gradients, losses, quiet

    found, notes = gradients.find(table), list[Note]()
    if table.has("loss"):
        seen = losses.Losses(table)
        jumps, restarts = excursions.find(seen)
        found += jumps
        more, others = quiet.find(seen, found)
        found += more
        notes += [*restarts, *others]
    return sorted(found, key=lambda e: (e.first, e.last)), sorted(notes, key=lambda n: n.start)
