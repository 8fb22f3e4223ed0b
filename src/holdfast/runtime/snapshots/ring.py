"""Which snapshots are kept: the last two multiples of every power of two of the cadence.

An onset `a` steps ago then always has a snapshot before it, at most about 4a back, while the count grows with the
logarithm of the reach. Under a memory budget the cadence grows and the reach stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator

import torch

from holdfast.core.base.config import SnapshotSection
from holdfast.core.base.types import Health
from holdfast.runtime.snapshots.memory import available_bytes, free_device_bytes
from holdfast.runtime.snapshots.snapshot import Snapshot


class Ring:
    """Holds the snapshots, oldest first. They are kept in the memory of `devices`, or of the host if there are none."""

    def __init__(
        self, config: SnapshotSection, ranks_per_host: int = 1, devices: Collection[torch.device] = ()
    ) -> None:
        self._config = config
        self.every_steps = config.every_steps
        self.enabled = config.enabled
        self.snapshots: list[Snapshot] = []
        on_cuda = [d for d in devices if d.type == "cuda"]
        self._where = "device" if on_cuda else "host"
        if on_cuda:
            free = min(map(free_device_bytes, on_cuda)) * len(on_cuda)
        else:
            free = available_bytes() // ranks_per_host
        self._budget = int(config.memory_gb * 1e9) if config.memory_gb > 0 else free // 4

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self.snapshots)

    def __len__(self) -> int:
        return len(self.snapshots)

    def due(self, step: int) -> bool:
        """Return whether a snapshot is taken after that step."""
        return self.enabled and step % self.every_steps == 0

    def levels(self) -> int:
        return max(1, math.ceil(math.log2(max(1.0, self._config.reach_steps / self.every_steps))) + 1)

    def max_snapshots(self) -> int:
        """Return the most snapshots at once: two at the finest cadence, one more at each coarser one, the last good one
        and the one in progress."""
        return self.levels() + 3

    def budget(self, nbytes: int, shared: int = 0) -> str | None:
        """Fit the ring into memory, given the bytes of one snapshot and those that all share. Returns a note if the
        cadence changed, or None."""
        before, left = self.every_steps, self._budget - shared
        while self.max_snapshots() * nbytes > left and self.every_steps < self._config.reach_steps:
            self.every_steps *= 2
        takes = f"a snapshot takes {nbytes / 1e9:.2f} GB"
        takes += f", frozen weights {shared / 1e9:.2f} GB," if shared else ""
        takes += f" and {self._budget / 1e9:.2f} GB of {self._where} memory are allowed"
        if self.max_snapshots() * nbytes > left:
            self.enabled = False
            return f"{takes}: snapshots are off and nothing can be rolled back; raise [snapshot] memory_gb" + (
                ', or set place = "host"' if self._where == "device" else ""
            )
        if self.every_steps != before:
            return f"{takes}: one every {self.every_steps} steps instead of every {before}"
        return None

    def add(self, snapshot: Snapshot) -> list[Snapshot]:
        """Keep one more. Returns the snapshots that are dropped for it."""
        self.snapshots.append(snapshot)
        wanted: set[int] = set()
        for level in range(self.levels()):
            spacing = self.every_steps * 2**level
            last = snapshot.step // spacing * spacing
            wanted |= {last, last - spacing}
        last_good = next((s for s in reversed(self.snapshots) if s.health is Health.GOOD), None)

        def is_kept(s: Snapshot) -> bool:
            if s.health is Health.BAD:
                return False
            # The initial snapshot replaces wanted steps before it.
            return s.step in wanted or s is last_good or (s.initial and min(wanted) <= s.step)

        return self._drop_if(lambda s: not is_kept(s))

    def good_at_or_before(self, step: int) -> list[Snapshot]:
        """Return the certified snapshots up to that step, newest first."""
        return [s for s in reversed(self.snapshots) if s.health is Health.GOOD and s.step <= step]

    def drop(self, snapshot: Snapshot) -> None:
        self._drop_if(lambda s: s is snapshot)

    def drop_after(self, step: int) -> list[Snapshot]:
        """Drop and return the snapshots of the branch that a rollback abandons."""
        return self._drop_if(lambda s: s.step > step)

    def _drop_if(self, condition: Callable[[Snapshot], bool]) -> list[Snapshot]:
        dropped = [s for s in self.snapshots if condition(s)]
        self.snapshots = [s for s in self.snapshots if s not in dropped]
        return dropped

    def oldest(self) -> Snapshot | None:
        return self.snapshots[0] if self.snapshots else None
