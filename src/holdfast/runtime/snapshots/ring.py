"""The snapshots in memory. `core/checkpoints/snapshot_rule.py` decides which are kept, by how many copies fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from holdfast.core.base.config import SnapshotSection
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.snapshot_rule import MIN_COPIES, SnapshotRoom, SnapshotRule, describe_room, should_share
from holdfast.runtime.snapshots.memory import available_bytes, free_device_bytes
from holdfast.runtime.snapshots.snapshot import Snapshot


class Ring:
    """Holds the snapshots, oldest first. They are kept in the memory of `devices`, or of the host if there are none."""

    def __init__(
        self, config: SnapshotSection, ranks_per_host: int = 1, devices: Collection[torch.device] = ()
    ) -> None:
        self._config = config
        self._rule = SnapshotRule(config.every_steps, config.reach_steps)
        self.every_steps = config.every_steps
        self.enabled = config.enabled
        self.is_limited = False
        """fewer copies fit than the rule would keep: each snapshot needs room first"""
        self.is_waiting = False
        """a snapshot was due and there was no room for it: it is taken as soon as there is"""
        self.snapshots: list[Snapshot] = []
        on_cuda = [d for d in devices if d.type == "cuda"]
        self._noted = self.max_snapshots(), False
        """how many snapshots fit by the last note, and whether they are shared out"""
        self._where = "device" if on_cuda else "host"
        if on_cuda:
            free = min(map(free_device_bytes, on_cuda)) * len(on_cuda)
        else:
            free = available_bytes() // ranks_per_host
        self._allowed = int(config.memory_gb * 1e9) if config.memory_gb > 0 else free // 4

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self.snapshots)

    def __len__(self) -> int:
        return len(self.snapshots)

    def keeps(self, step: int) -> bool:
        """Return whether a snapshot of that step is kept. If few fit, one that was made for the disk serves too."""
        return self.enabled and (self.is_limited or step % self.every_steps == 0)

    def max_snapshots(self) -> int:
        """Return the most snapshots at once, the one in progress included."""
        copies, full = self._rule.copies, self._rule.full_count()
        return full if copies is None else min(copies, full)

    def room(self, nbytes: int, shared: int = 0, share: int = 0) -> SnapshotRoom:
        """Return this rank's room, given the bytes of one snapshot, those that all share, and this rank's share of one."""
        return SnapshotRoom(nbytes, shared, self._allowed, self._where, share=share)

    def usable_copies(self, room: SnapshotRoom) -> tuple[int, int]:
        """Return how many copies that fit into `room` the ring has a use for, whole and as shares."""
        shares = room.as_share().copies if room.share else 0
        return min(room.copies, self._rule.full_count()), min(shares, self._rule.full_count())

    def should_share(self, rooms: Sequence[SnapshotRoom]) -> bool:
        """Return whether each rank keeps a share of every snapshot."""
        return should_share(rooms, self._rule.full_count())

    def budget(self, rooms: Sequence[SnapshotRoom]) -> tuple[str | None, list[Snapshot]]:
        """Fit the ring into the room of every rank. Returns a note if the number of snapshots changed, and those dropped.

        The others leave room for one in progress.
        """
        self._rule = self._rule._replace(copies=min(room.copies for room in rooms))
        self.is_limited, self.is_waiting = self._rule.is_limited, False
        note = describe_room(rooms, self._rule, self._config.certify_after)
        if self.max_snapshots() < MIN_COPIES:
            self.enabled = False
            return note, self.drop_after(-1)
        noted = self.max_snapshots(), bool(rooms[0].whole)
        if noted == self._noted:
            note = None
        elif not self.is_limited and not rooms[0].whole:
            note = "all snapshots fit into memory now"
        if note is not None:
            self._noted = noted
        return note, self.make_room(self.snapshots[-1].step, is_forced=True) if self.snapshots else []

    def make_room(self, step: int, *, is_forced: bool = False) -> list[Snapshot]:
        """Drop and return snapshots so that one of `step` fits beside the others. Call it if `has_room`.

        If `is_forced`, snapshots that are not certified yet are dropped too: then there always is room.
        """
        dropped = self._rule.to_drop(self.snapshots, step, is_forced=is_forced) if self.is_limited else []
        assert dropped is not None
        self.is_waiting = False
        return self._drop_if(lambda s: s in dropped)

    def has_room(self, step: int) -> bool:
        """Return whether `make_room` finds room for a snapshot of that step. If not, it is taken later."""
        self.is_waiting = self._rule.to_drop(self.snapshots, step) is None
        return not self.is_waiting

    def add(self, snapshot: Snapshot) -> list[Snapshot]:
        """Keep one more. Returns the snapshots that are dropped for it."""
        self.snapshots.append(snapshot)
        unwanted = [] if self.is_limited else self._rule.unwanted(self.snapshots)
        return self._drop_if(lambda s: s in unwanted)

    def good_at_or_before(self, step: int) -> list[Snapshot]:
        """Return the certified snapshots up to that step, newest first."""
        return [s for s in reversed(self.snapshots) if s.health is Health.GOOD and s.step <= step]

    def drop(self, snapshot: Snapshot) -> None:
        self._drop_if(lambda s: s is snapshot)

    def drop_after(self, step: int) -> list[Snapshot]:
        """Drop and return the snapshots of the branch that a rollback abandons."""
        self.is_waiting = False
        return self._drop_if(lambda s: s.step > step)

    def _drop_if(self, condition: Callable[[Snapshot], bool]) -> list[Snapshot]:
        dropped = [s for s in self.snapshots if condition(s)]
        self.snapshots = [s for s in self.snapshots if s not in dropped]
        return dropped

    def oldest(self) -> Snapshot | None:
        return self.snapshots[0] if self.snapshots else None
