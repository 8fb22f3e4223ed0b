"""The choice of checkpoints to delete: by lineage and health, never by step number alone.

After a rollback the higher steps belong to an abandoned branch: the highest numbers are the worst states. So the age of
a state is its position on the lineage of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.core.base.types import Health
from holdfast.core.checkpoints.lineage import Lineage

_DISTRUSTED = (Health.BAD, Health.QUARANTINED)


class SavedCheckpoint(NamedTuple):
    """The properties of a checkpoint that decide whether it is kept."""

    name: str
    step: int
    branch: int
    health: Health
    handover: bool = False


class RetentionRules(NamedTuple):
    """What to keep besides the newest good checkpoint, which is always kept."""

    keep_last: int = 3
    """the number of newest good ones"""
    keep_every: int = 0
    """those at multiples of this step, forever; 0: none"""
    powers: bool = True
    """good ones at ages that are powers of two, so that there is one before an old onset"""
    keep_bad: int = 1
    """the number of newest bad or quarantined ones, for inspection"""


def select_for_deletion(
    saved: Sequence[SavedCheckpoint], lineage: Lineage, rules: RetentionRules
) -> list[tuple[SavedCheckpoint, str]]:
    """Return the checkpoints to delete and why: abandoned branches first, then the lineage itself, each oldest first.

    - Without a good checkpoint on the lineage, nothing is deleted.
    - The newest good one on the lineage, and anything newer there, is never deleted.
    - Otherwise everything on an abandoned branch is deleted, whatever its health.
    - Bad and quarantined ones older than the newest good one are deleted, except for the newest `keep_bad`.
    - Good ones are deleted unless a rule keeps them. So are candidates older than the newest good one, which are never
      restored; `keep_every` keeps those too, since the good one descends from them.
    After these deletions there is nothing more to delete.
    """
    positions = {fork.branch: position for position, fork in enumerate(lineage.forks)}
    on_lineage = [s for s in saved if lineage.holds(s.branch, s.step)]
    on_lineage.sort(key=lambda s: (s.step, positions[s.branch], s.name))  # a branch begins at the last step of another
    good = [s for s in on_lineage if s.health is Health.GOOD]
    if not good:
        return []
    abandoned = sorted(
        (s for s in saved if not lineage.holds(s.branch, s.step)), key=lambda s: (s.step, s.branch, s.name)
    )
    older = on_lineage[: on_lineage.index(good[-1])]
    kept = {s.name for s in _kept(older, good, rules)}
    return [(s, _why_abandoned(s, lineage)) for s in abandoned] + [
        (s, _why_superseded(s, good, rules)) for s in older if s.name not in kept
    ]


def _kept(older: list[SavedCheckpoint], good: list[SavedCheckpoint], rules: RetentionRules) -> list[SavedCheckpoint]:
    """Return which of those older than the newest good one are kept; both lists are oldest first."""
    distrusted = [s for s in older if s.health in _DISTRUSTED]
    kept = [*good[-max(1, rules.keep_last) :], *distrusted[max(0, len(distrusted) - rules.keep_bad) :]]
    if rules.keep_every > 0:
        kept += [s for s in older if s.health not in _DISTRUSTED and s.step % rules.keep_every == 0]
    return kept + (_at_powers_of_two(good) if rules.powers else [])


def _at_powers_of_two(good: list[SavedCheckpoint]) -> list[SavedCheckpoint]:
    """Return, for each power of two, the first good one in the last cell of that many steps before the newest one's cell.

    Cells begin at multiples of the power, so the first in a cell does not depend on which is newest: one needed at a
    larger power is also needed at each smaller power until then. With a checkpoint every `c` steps, for any age there is
    one of at least that age and at most four times that age plus `c`.
    """
    newest, kept, cell = good[-1], [], 1
    while cell <= newest.step:
        before = [s for s in good if s.step // cell < newest.step // cell]
        if before:
            last = before[-1].step // cell
            kept.append(next(s for s in before if s.step // cell == last))
        cell *= 2
    return kept


def _why_abandoned(one: SavedCheckpoint, lineage: Lineage) -> str:
    went_back = next(
        (b.step for a, b in zip(lineage.forks, lineage.forks[1:], strict=False) if a.branch == one.branch), None
    )
    if went_back is not None and one.step > went_back:
        return f"the run went back to step {went_back} and left this branch there"
    return "on a branch that the run has abandoned"


def _why_superseded(one: SavedCheckpoint, good: list[SavedCheckpoint], rules: RetentionRules) -> str:
    if one.health is Health.GOOD:
        return f"good, but older than the newest {max(1, rules.keep_last)} that are, and kept by no other rule"
    if one.health in _DISTRUSTED:
        return f"{one.health}, and {good[-1].name} after it is good"
    return f"never certified, and {good[-1].name} after it is good"
