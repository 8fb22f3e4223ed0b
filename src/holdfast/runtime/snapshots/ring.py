"""Which snapshots are kept: the last two multiples of every power of two of the cadence.

An onset `a` snapshots old then always has one before it, at most about 4a back, while the count grows with the logarithm
of the reach. Under a memory budget the cadence grows and the reach stays.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import torch

from holdfast.core.base.config import SnapshotSection
from holdfast.core.base.types import Health
from holdfast.runtime.snapshots.memory import available_bytes, free_on
from holdfast.runtime.snapshots.snapshot import Snapshot


class Ring:
    """The snapshots there are, oldest first. `devices`: those whose memory they are kept in; none: the host's."""

    def __init__(self, config: SnapshotSection, neighbours: int = 1, devices: Collection[torch.device] = ()) -> None:
        self._config = config
        self.every_steps = config.every_steps
        self.enabled = config.enabled
        self._kept: list[Snapshot] = []
        on_cuda = [d for d in devices if d.type == "cuda"]
        self._where = "device" if on_cuda else "host"
        free = min(map(free_on, on_cuda)) * len(on_cuda) if on_cuda else available_bytes() // neighbours
        self._budget = int(config.memory_gb * 1e9) if config.memory_gb > 0 else free // 4

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def due(self, step: int) -> bool:
        return self.enabled and step % self.every_steps == 0

    def levels(self) -> int:
        return max(1, math.ceil(math.log2(max(1.0, self._config.reach_steps / self.every_steps))) + 1)

    def max_snapshots(self) -> int:
        """How many snapshots are alive at once at the most: two of the finest cadence and one more of every coarser one,
        the last good one and the one being made."""
        return self.levels() + 3

    def budget(self, nbytes: int, shared: int = 0) -> str | None:
        """Fit the ring into memory, given the size of one snapshot and of what all share; what had to give, or None."""
        before, room = self.every_steps, self._budget - shared
        while self.max_snapshots() * nbytes > room and self.every_steps < self._config.reach_steps:
            self.every_steps *= 2
        takes = f"a snapshot takes {nbytes / 1e9:.2f} GB"
        takes += f", what is frozen {shared / 1e9:.2f} GB," if shared else ""
        takes += f" and {self._budget / 1e9:.2f} GB of {self._where} memory are allowed"
        if self.max_snapshots() * nbytes > room:
            self.enabled = False
            return f"{takes}: snapshots are off and nothing can be rolled back; raise [snapshot] memory_gb" + (
                ', or set place = "host"' if self._where == "device" else ""
            )
        if self.every_steps != before:
            return f"{takes}: one every {self.every_steps} steps instead of every {before}"
        return None

    def add(self, snapshot: Snapshot) -> list[Snapshot]:
        """Keep one more; returns those that fell out."""
        self._kept.append(snapshot)
        return self._prune(snapshot.step)

    def _prune(self, newest: int) -> list[Snapshot]:
        wanted: set[int] = set()
        for level in range(self.levels()):
            spacing = self.every_steps * 2**level
            last = newest // spacing * spacing
            wanted |= {last, last - spacing}
        good = [s for s in self._kept if s.health is Health.GOOD]
        oldest = min(wanted)

        def stays(s: Snapshot) -> bool:
            if s.health is Health.BAD:
                return False
            # The initial one stands for whatever is wanted of the time before it.
            return s.step in wanted or (bool(good) and s is good[-1]) or (s.initial and oldest <= s.step)

        gone = [s for s in self._kept if not stays(s)]
        self._kept = [s for s in self._kept if stays(s)]
        return gone

    def good_at_or_before(self, step: int) -> list[Snapshot]:
        """Certified ones, newest first."""
        return [s for s in reversed(self._kept) if s.health is Health.GOOD and s.step <= step]

    def drop(self, snapshot: Snapshot) -> None:
        self._kept = [s for s in self._kept if s is not snapshot]

    def drop_after(self, step: int) -> list[Snapshot]:
        """Forget the branch a rollback abandoned."""
        gone = [s for s in self._kept if s.step > step]
        self._kept = [s for s in self._kept if s.step <= step]
        return gone

    def oldest(self) -> Snapshot | None:
        return self._kept[0] if self._kept else None
