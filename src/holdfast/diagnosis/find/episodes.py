"""Finds the episodes of the curve: turns detector findings, each about a step, into ranges of the run.

One excursion of the loss can cause a hundred findings and is one episode. A gradient explosion inside it is a second
episode. Harmless patterns (a deliberate restart, epoch steps, a loss scale that settles) become notes.
"""

from __future__ import annotations

from holdfast.diagnosis.find import excursions, gradients, watch_only
from holdfast.diagnosis.find.losses import Losses
from holdfast.diagnosis.model.episode import Episode, Note
from holdfast.diagnosis.model.table import Table


def find(table: Table) -> tuple[list[Episode], list[Note]]:
    """Return all curve episodes of a run in the order of their first row, and the notes."""
    episodes, notes = gradients.find(table), list[Note]()
    if table.has("loss"):
        losses = Losses(table)
        loss_episodes, restarts = excursions.find(losses)
        episodes += loss_episodes
        watched, watch_notes = watch_only.find(losses, episodes)
        episodes += watched
        notes += [*restarts, *watch_notes]
    return sorted(episodes, key=lambda e: (e.first, e.last)), sorted(notes, key=lambda n: n.start)
