"""Which snapshots are kept in memory, and how many copies of the state fit there.

With room for all of them: the last two multiples of every power of two of the cadence. An onset `a` steps ago then always
has a snapshot before it, at most about 4a back, while the count grows with the logarithm of the reach.

With less room, recency comes first. Two copies suffice: the newest good snapshot, and the one in the making. With more, the
two newest good ones stay at the cadence, and older ones are thinned out, so that their ages grow by about the same factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from holdfast.core.base.types import Health

MIN_COPIES = 2
"""one good snapshot, and one in the making"""
_MAX_TIMES = 2500
"""`ages` simulates a reach of at most so many times the cadence"""


class HeldSnapshot(Protocol):
    """What the rule reads of a snapshot. A good one `is_settled` when every rank knows whether another has rejected it."""

    step: int
    health: Health
    initial: bool
    is_settled: bool


Held = TypeVar("Held", bound=HeldSnapshot)


class SnapshotRule(NamedTuple):
    """Decides what is kept. `copies` is how many fit at once, the one in the making included; None: as many as wanted."""

    every: int
    reach: int
    copies: int | None = None

    def levels(self) -> int:
        return max(1, math.ceil(math.log2(max(1.0, self.reach / self.every))) + 1)

    def full_count(self) -> int:
        """Return the most snapshots at once if all fit: two at the finest cadence, one more at each coarser one, the last
        good one and the one in progress."""
        return self.levels() + 3

    @property
    def is_limited(self) -> bool:
        return self.copies is not None and self.copies < self.full_count()

    def unwanted(self, held: Sequence[Held]) -> list[Held]:
        """Return those of `held`, oldest first, that are dropped now that the last one was added, if all wanted ones fit."""
        wanted: set[int] = set()
        for level in range(self.levels()):
            spacing = self.every * 2**level
            last = held[-1].step // spacing * spacing
            wanted |= {last, last - spacing}
        last_good = next((s for s in reversed(held) if s.health is Health.GOOD), None)

        def is_kept(s: Held) -> bool:
            if s.health is Health.BAD:
                return False
            # The initial snapshot replaces wanted steps before it.
            return s.step in wanted or s is last_good or (s.initial and min(wanted) <= s.step)

        return [s for s in held if not is_kept(s)]

    def to_drop(self, held: Sequence[Held], step: int, *, is_forced: bool = False) -> list[Held] | None:
        """Return which of `held`, oldest first, to drop so that a snapshot of `step` can be taken; None if it must wait.

        The newest good one is never dropped. One that waits for its certification is dropped only if `is_forced`, the
        youngest first: otherwise none would ever be certified.
        """
        assert self.copies is not None and self.copies >= MIN_COPIES
        kept, dropped = list(held), []
        while len(kept) >= self.copies:
            good = [s for s in kept if s.health is Health.GOOD and s.is_settled]
            if len(good) > 1:
                one = self._most_dispensable(good, step)
            elif is_forced:
                one = next(s for s in reversed(kept) if s not in good)
            else:
                return None
            kept.remove(one)
            dropped.append(one)
        return dropped

    def _most_dispensable(self, good: Sequence[Held], step: int) -> Held:
        """Return the one to drop of two or more good ones: not the two newest, if there are others."""
        ages = [max(1, step - s.step) for s in good]
        if len(good) <= 3 or ages[0] > self.reach:
            return good[0]
        # Dropping one leaves a gap between its neighbours. The oldest stays until it is out of reach.
        return good[min(range(1, len(good) - 2), key=lambda i: ages[i - 1] / ages[i + 1])]


class SnapshotAges(NamedTuple):
    """How old the good snapshots are, in steps, in a run without faults."""

    newest: int
    """at most so long ago was the newest good one"""
    reach: tuple[int, int]
    """the age of the oldest good one: at least and at most"""
    good: tuple[int, int]
    """how many are good: at least and at most"""


@dataclass
class _Simulated:
    step: int
    health: Health = Health.CANDIDATE
    initial: bool = False
    is_settled: bool = False


def ages(rule: SnapshotRule, certify_after: int, *, ranks: int = 1) -> SnapshotAges:
    """Return the ages of the good snapshots, from a simulation of a run that is several times as long as the reach."""
    reach = min(rule.reach, _MAX_TIMES * rule.every)
    simulated = rule._replace(reach=reach)
    begin, end = 2 * reach + 2 * certify_after, 4 * (reach + certify_after + rule.every)
    held = [_Simulated(0, initial=True)]
    newest, oldest, count = [0], [10**18, 0], [10**18, 0]
    step, is_waiting = 0, False
    while step < end:
        # Nothing happens in between.
        pending = [s.step + (1 if s.initial else certify_after) for s in held if s.health is Health.CANDIDATE]
        unsettled = any(s.health is Health.GOOD and not s.is_settled for s in held)
        last, step = step, min([step // rule.every * rule.every + rule.every, *pending])
        step = min(step, last + 1) if unsettled or (is_waiting and not pending) else max(step, last + 1)
        good = [s.step for s in held if s.health is Health.GOOD]
        if last >= begin and good:
            newest.append(step - 1 - good[-1])
            oldest = [min(oldest[0], last - good[0]), max(oldest[1], step - 1 - good[0])]
            count = [min(count[0], len(good)), max(count[1], len(good))]
        for s in held:
            if s.health is Health.GOOD:
                s.is_settled = True
            elif step - s.step >= (1 if s.initial else certify_after):
                s.health, s.is_settled = Health.GOOD, ranks == 1
        if not (is_waiting or step % rule.every == 0):
            continue
        if not rule.is_limited:
            held.append(_Simulated(step))
            dropped = simulated.unwanted(held)
        elif (found := simulated.to_drop(held, step)) is None:
            is_waiting = True
            continue
        else:
            is_waiting, dropped = False, found
            held.append(_Simulated(step))
        held = [s for s in held if s not in dropped]
    most = rule.reach if rule.reach > reach and oldest[1] >= reach else oldest[1]
    return SnapshotAges(max(newest), (oldest[0], most), (count[0], count[1]))


class SnapshotRoom(NamedTuple):
    """The memory of one rank for snapshots, in bytes."""

    nbytes: int
    """of one snapshot"""
    shared: int
    """that all snapshots share: frozen weights"""
    allowed: int
    where: str = "host"
    is_known: bool = True
    """False: the optimizer has no state yet, so a snapshot may take more"""
    share: int = 0
    """of this rank's share of one snapshot, if ranks with equal tensors keep a share each; 0: they cannot"""
    whole: int = 0
    """if `nbytes` is that of a share: of one whole snapshot; else 0"""

    @property
    def copies(self) -> int:
        """How many snapshots fit at once."""
        return max(0, self.allowed - self.shared) // max(1, self.nbytes)

    def as_share(self) -> SnapshotRoom:
        """Return the room for shares of snapshots."""
        return self._replace(nbytes=self.share, whole=self.nbytes)


def should_share(rooms: Sequence[SnapshotRoom], wanted: int) -> bool:
    """Return whether ranks keep a share of each snapshot: not all whole ones fit on all ranks, and more shares do.

    Also if neither is enough: fewer bytes are missing then.
    """
    whole = min(room.copies for room in rooms)
    if whole >= wanted or not all(room.share for room in rooms):
        return False
    return whole < MIN_COPIES or min(room.as_share().copies for room in rooms) > whole


def describe_room(rooms: Sequence[SnapshotRoom], rule: SnapshotRule, certify_after: int, ranks: int = 0) -> str | None:
    """Return how many copies fit on the rank with the least room, what that means and what would give more.

    `ranks`: of the job, if `rooms` are not those of all ranks.

    `rule` is the rule for that room. Returns None if all wanted snapshots fit, or the size is not known yet.
    """
    rank, room = min(enumerate(rooms), key=lambda each: each[1].copies)
    full = rule.full_count()
    is_all = room.copies >= full
    if (is_all and not room.whole) or (room.copies >= MIN_COPIES and not room.is_known):
        return None
    text = f"rank {rank}: " if len(rooms) > 1 else ""
    text += f"a snapshot takes {format_gb(room.whole or room.nbytes)}"
    text += f", frozen weights {format_gb(room.shared)}," if room.shared else ""
    text += f" and {format_gb(room.allowed)} of {room.where} memory are allowed: "
    if room.whole:
        whole = room._replace(nbytes=room.whole, whole=0)
        text += f"{_fits(whole.copies)} whole, "
        if room.copies < MIN_COPIES:
            text += f"and if each rank keeps a share of {format_gb(room.nbytes)}, "
        else:
            text += f"so each rank keeps a share of {format_gb(room.nbytes)}, and a rollback gathers the shares; "
        if is_all:
            return text + f"all {full} snapshots fit; {_cure(whole, full)} for whole ones"
    if room.copies < MIN_COPIES:
        text += f"{_fits(room.copies)} and {MIN_COPIES} are needed, so snapshots are off and "
        text += f"nothing can be rolled back in memory; {_cure(room, MIN_COPIES)} for {MIN_COPIES}"
        return text
    found = ages(rule, certify_after, ranks=ranks or len(rooms))
    text += f"{room.copies} fit, one of them in the making; the newest good one is at most about {found.newest} steps "
    text += f"old, and a rollback in memory reaches {found.reach[0]} to {found.reach[1]} steps back; one further "
    return text + f"back needs a checkpoint; {_cure(room, full)} for all {full} snapshots"


def _fits(copies: int) -> str:
    return f"{copies} fit{'s' if copies == 1 else ''}"


def _cure(room: SnapshotRoom, copies: int) -> str:
    needed = math.ceil((room.shared + copies * room.nbytes) / 1e7) / 100
    if room.whole:
        return f"set [snapshot] memory_gb = {needed:g}, or run on more hosts,"
    if room.where == "device":
        return f'set [snapshot] memory_gb = {needed:g} or place = "host"'
    return f'set [snapshot] memory_gb = {needed:g}, run fewer ranks on a host, or set place = "device"'


def format_gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"
