"""From the detectors' findings over a log to episodes: what happened, from where to where.

A finding is about a step; an episode is about a stretch. One excursion of the loss may be found a hundred times and is
one episode; a gradient that explodes inside it is another beside it. What looks like trouble and is not (a deliberate
restart, the staircase of epochs, a loss scale finding its level) becomes a note, with its reason.
"""

from __future__ import annotations

from holdfast.diagnosis.find import excursions, gradients, losses, quiet
from holdfast.diagnosis.model.episode import KINDS, Episode, Note
from holdfast.diagnosis.model.table import Table

__all__ = ["KINDS", "Episode", "Note", "find"]


def find(table: Table) -> tuple[list[Episode], list[Note]]:
    """All episodes of a run in the order they begin, and the notes."""
    found, notes = gradients.find(table), list[Note]()
    if table.has("loss"):
        seen = losses.Losses(table)
        jumps, restarts = excursions.find(seen)
        found += jumps
        more, others = quiet.find(seen, found)
        found += more
        notes += [*restarts, *others]
    return sorted(found, key=lambda e: (e.first, e.last)), sorted(notes, key=lambda n: n.start)
