"""Which checkpoints are deleted, and why. By lineage and health, never by step number alone.

After a rollback the steps ahead belong to a branch that was left: the highest numbers are the worst states. So what
counts as new here is how far along the run's own lineage a state lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.core.base.types import Health
from holdfast.core.checkpoints.lineage import Lineage

_DOUBTED = (Health.BAD, Health.QUARANTINED)


class SavedCheckpoint(NamedTuple):
    """A checkpoint, as far as keeping it goes."""

    name: str
    step: int
    branch: int
    health: Health
    handover: bool = False


class RetentionRules(NamedTuple):
    """What is kept, beside the newest good one, which always is."""

    keep_last: int = 3
    """the newest good ones"""
    keep_every: int = 0
    """those at multiples of this step, for ever; 0: none"""
    powers: bool = True
    """good ones spaced in powers of two behind the newest, so that an old onset still has one before it"""
    keep_bad: int = 1
    """the newest bad or quarantined ones, to be looked at"""


def select_for_deletion(
    saved: Sequence[SavedCheckpoint], lineage: Lineage, rules: RetentionRules
) -> list[tuple[SavedCheckpoint, str]]:
    """What is to be deleted, and why: branches that were left first, then the lineage's own, each oldest first.

    - As long as no good one lies on the lineage, nothing is.
    - The newest good one on the lineage never is, nor anything newer than it there.
    - With a good one there, everything on a branch that was left is, whatever its health.
    - Bad and quarantined ones older than the newest good one are, but for the newest `keep_bad` of them.
    - Good ones are, unless a rule keeps them; so are candidates that a newer good one has overtaken: they are never
      restored. `keep_every` keeps these too, since the good one came through them.
    Deleting what is named leaves nothing more to delete.
    """
    places = {fork.branch: place for place, fork in enumerate(lineage.forks)}
    held = [s for s in saved if lineage.holds(s.branch, s.step)]
    held.sort(key=lambda s: (s.step, places[s.branch], s.name))  # a branch begins with the step the last one ended at
    good = [s for s in held if s.health is Health.GOOD]
    if not good:
        return []
    left = sorted((s for s in saved if not lineage.holds(s.branch, s.step)), key=lambda s: (s.step, s.branch, s.name))
    older = held[: held.index(good[-1])]
    kept = {s.name for s in _kept(older, good, rules)}
    found = [(s, _abandoned(s, lineage)) for s in left]
    return found + [(s, _superseded(s, good, rules)) for s in older if s.name not in kept]


def _kept(older: list[SavedCheckpoint], good: list[SavedCheckpoint], rules: RetentionRules) -> list[SavedCheckpoint]:
    """What of those older than the newest good one stays; both lists are oldest first."""
    doubted = [s for s in older if s.health in _DOUBTED]
    kept = [*good[-max(1, rules.keep_last) :], *doubted[max(0, len(doubted) - rules.keep_bad) :]]
    if rules.keep_every > 0:
        kept += [s for s in older if s.health not in _DOUBTED and s.step % rules.keep_every == 0]
    return kept + (_spaced(good) if rules.powers else [])


def _spaced(good: list[SavedCheckpoint]) -> list[SavedCheckpoint]:
    """For every power of two, the first good one in the last cell of that many steps before the newest one's cell.

    The cells lie at multiples of the power, so which one is first in its cell does not depend on what is newest: one
    that will be wanted at a larger power is the one wanted at each smaller power until then. Had one been saved every
    `c` steps, then for any age there is one of at least that age and at most four times that age plus `c`.
    """
    newest, found, cell = good[-1], [], 1
    while cell <= newest.step:
        before = [s for s in good if s.step // cell < newest.step // cell]
        if before:
            last = before[-1].step // cell
            found.append(next(s for s in before if s.step // cell == last))
        cell *= 2
    return found


def _abandoned(one: SavedCheckpoint, lineage: Lineage) -> str:
    went_back = next(
        (b.step for a, b in zip(lineage.forks, lineage.forks[1:], strict=False) if a.branch == one.branch), None
    )
    if went_back is not None and one.step > went_back:
        return f"the run went back to step {went_back} and left this branch there"
    return "on a branch that the run has left"


def _superseded(one: SavedCheckpoint, good: list[SavedCheckpoint], rules: RetentionRules) -> str:
    if one.health is Health.GOOD:
        return f"good, but older than the newest {max(1, rules.keep_last)} that are, and kept by no other rule"
    if one.health in _DOUBTED:
        return f"{one.health}, and {good[-1].name} after it is good"
    return f"never certified, and {good[-1].name} after it is good"
