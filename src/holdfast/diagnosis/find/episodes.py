"""Finds the episodes of the curve: turns detector findings, each about a step, into ranges of the run.

One excursion of the loss can cause a hundred findings and is one episode. A gradient explosion inside it is a second
episode. Harmless patterns (a deliberate restart, epoch steps, a loss scale that settles) become notes.
"""

from __future__ import annotations

from holdfast.diagnosis.find import excursions, fragments, gradients, other_columns, watch_only
from holdfast.diagnosis.find.losses import Losses
from holdfast.diagnosis.model.episode import Episode, Note
from holdfast.diagnosis.model.table import Table


def find(table: Table) -> tuple[list[Episode], list[Note]]:
    """Return all curve episodes of a run in the order of their first row, and the notes."""
    episodes, notes = gradients.find(table), gradients.find_skipped(table)
    if table.has("loss"):
        losses = Losses(table)
        if len(losses.loss) <= fragments.MAX_RECORDS:
            episodes = [*(e for e in episodes if e.kind != "grad_explosion"), *fragments.find(losses)]
        else:
            loss_episodes, loss_notes = excursions.find(losses)
            watched, watch_notes = watch_only.find(losses, [*episodes, *loss_episodes])
            episodes += [*loss_episodes, *watched]
            notes += [*loss_notes, *watch_notes]
            if losses.is_running_sum:
                text = "the log sums the loss up and begins again at 0; only the last record of each sum is judged"
                notes.append(Note(kind="running_sum", start=losses.step[0], end=losses.step[-1], text=text))
        episodes, unrewarded = other_columns.without_unrewarded(table, episodes)
        episodes, opposed = other_columns.without_adversaries(table, episodes)
        notes += [*unrewarded, *opposed]
    if not any(e.kind == "scale_collapse" for e in episodes):
        episodes += gradients.find_falling_scale(table)
    episodes += other_columns.find(table, episodes)
    notes += other_columns.how_it_ended(table)
    return sorted(episodes, key=lambda e: (e.first, e.last)), sorted(notes, key=lambda n: n.start)
