"""Where snapshots are kept, and how many of them at once: on the host or on the device, within the ring's budget.

At most as many copies as the ring holds, one in the making and one that the disk still reads. Who needs one more waits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from holdfast.runtime.snapshots.copier import Copier
from holdfast.runtime.snapshots.copy import Copy
from holdfast.runtime.snapshots.layout import Layout
from holdfast.runtime.snapshots.ring import Ring
from holdfast.runtime.snapshots.snapshot import Snapshot
from holdfast.runtime.state.run_state import RunState

_WAITS = "training waits for the disk: checkpoints are written more slowly than snapshots are taken"
_MOVES = "the device has no memory left for a snapshot: from here on they are kept in host memory"


class Room:
    """What is said by the way is for the user, and said once."""

    def __init__(
        self, state: RunState, copier: Copier, ring: Ring, place: str, devices: Collection[torch.device]
    ) -> None:
        self._state, self._copier, self._ring = state, copier, ring
        self._on_host = place == "host"
        self._leaving: list[Snapshot] = []
        """out of the ring, and still being looked at or written to disk"""
        self._sized: Layout | None = None
        """for what the ring was made to fit into memory"""
        self._unprepared = any(d.type == "cuda" for d in devices)
        self._told: set[str] = set()

    def on_host(self, reason: str | None) -> bool:
        """Where one is kept: what is to go to disk as well, on the host."""
        return self._on_host or reason is not None

    # ---- how much

    def fit(self, tensors: dict[str, Tensor], *, at_first: bool = False) -> tuple[Layout, str | None]:
        """How a snapshot of these lies in memory. Where that is news, the ring is made to fit. Before the first update
        there is no optimizer state yet: `at_first` as much as Adam would hold is meant, later nothing is concluded."""
        layout = self._copier.layout("heavy", tensors, on_host=self._on_host)
        whole = layout is self._sized or _has_state(layout.names)
        if layout is self._sized or not self._ring.enabled or not (whole or at_first):
            return layout, None
        self._sized = layout
        light, shared = self._state.snapshot_nbytes()
        size = (1 if whole else 3) * layout.nbytes + light
        return layout, self._ring.budget(size, shared if self._on_host else 0)

    def prepare(self) -> None:
        """What a snapshot is made of is known after the first step: memory for it is made ready before it is asked for."""
        if self._unprepared:
            self._unprepared = False
            if self._ring.enabled and self._on_host:
                self._copier.layout("heavy", self._state.update_tensors())
                self._copier.prepare(self._ring.max_snapshots())

    # ---- in

    def copy(self, tensors: dict[str, Tensor], layout: Layout, reason: str | None) -> tuple[Copy, list[str | None]]:
        """Begin to copy, as soon as there is memory for it."""
        on_host = self.on_host(reason)
        said = [self._make(on_host)]
        known = layout if on_host == self._on_host else None
        try:
            copy = self._copier.start(tensors, live=True, on_host=on_host, layout=known)
        except torch.OutOfMemoryError:
            if on_host:
                raise
            said.append(self._once(_MOVES))
            self._on_host = True
            self._copier.retire("heavy", on_host=False)  # what lies there for later use would be missed elsewhere
            copy = self._copier.start(tensors, live=True)
        if not self._unprepared:
            self._copier.prepare(self._ring.max_snapshots())
        if copy.block is not None:
            said.append(self._once(copy.block.note))
        said += map(self._once, self._copier.notes())
        return copy, said

    def _make(self, on_host: bool) -> str | None:
        """Where there are as many copies as there may be, wait until one that has left the ring is read no more."""
        most = self._ring.max_snapshots() + 1 if self._ring.enabled else 2
        self.let_go()
        waited = False
        copier = self._copier
        while self._leaving and not copier.ready("heavy", on_host=on_host):
            if copier.count("heavy", on_host=on_host) < most:
                break
            waited = True
            self._leaving[0].wait_unread()
            self.let_go()
        return self._once(_WAITS) if waited else None

    def _once(self, message: str | None) -> str | None:
        if message is None or message in self._told:
            return None
        self._told.add(message)
        return message

    # ---- out

    def leave(self, snapshot: Snapshot) -> None:
        """Its memory serves the next one, as soon as nobody reads it any more."""
        self._leaving.append(snapshot)
        self.let_go()

    def let_go(self) -> None:
        for snapshot in [s for s in self._leaving if s.unread]:
            self._leaving.remove(snapshot)
            self._copier.reclaim("heavy", snapshot.copy)
            if snapshot.reason is None:  # of one that was saved, these say later whether anything has moved since
                self._copier.reclaim("light", snapshot.light_copy)
                self._copier.reclaim("buffers", snapshot.buffers)


def _has_state(names: Iterable[str]) -> bool:
    """Whether the optimizers have state."""
    return any(name.startswith("optimizer.") for name in names)
