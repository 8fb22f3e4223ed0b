"""Where snapshots are kept, on the host or on the device, and how many at once, within the ring's budget.

There are at most as many copies as the ring holds, one in progress, and one that is still being written to disk. If fewer
fit into memory, there are at most as many as fit. A snapshot that needs one more waits.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from holdfast.core.checkpoints.snapshot_rule import MIN_COPIES, SnapshotRoom
from holdfast.runtime.snapshots.copier import Copier
from holdfast.runtime.snapshots.copy import CopyStart, SnapshotCopy
from holdfast.runtime.snapshots.layout import SnapshotLayout
from holdfast.runtime.snapshots.ring import Ring
from holdfast.runtime.snapshots.shares import Shares
from holdfast.runtime.snapshots.snapshot import Snapshot
from holdfast.runtime.state.run_state import RunState

_DISK_TOO_SLOW = "training waits for the disk: checkpoints are written more slowly than snapshots are taken"
_DEVICE_FULL = "the device has no memory left for a snapshot: from now on snapshots are kept in host memory"


class Placement:
    """Allocates and reclaims the memory of snapshots. The notes it returns are for the user; each is returned once."""

    def __init__(
        self, state: RunState, copier: Copier, ring: Ring, place: str, devices: Collection[torch.device], shares: Shares
    ) -> None:
        self._state, self._copier, self._ring, self._shares = state, copier, ring, shares
        self._on_host = place == "host"
        self._leaving: list[Snapshot] = []
        """dropped from the ring, but still being inspected or written to disk"""
        self._budgeted: SnapshotLayout | None = None
        """the layout that the ring was budgeted for"""
        self._is_size_known = False
        """it was budgeted with the optimizer's state"""
        self.is_preallocated = not any(d.type == "cuda" for d in devices)
        self._noted: set[str] = set()

    def on_host(self, reason: str | None) -> bool:
        """Return whether a snapshot is kept on the host. One that is also written to disk always is."""
        return self._on_host or reason is not None

    def fit(
        self, tensors: dict[str, Tensor], *, at_start: bool = False, is_trained: bool = False
    ) -> tuple[SnapshotLayout, SnapshotRoom | None]:
        """Return the layout of a snapshot of these tensors and, if it is new, this rank's room for such snapshots.

        Before the first update there is no optimizer state. Then the room is estimated only `at_start`, as if for Adam's;
        if that would not do, for what there is. `is_trained`: an update has been made, so the size is known.
        """
        layout = self._copier.layout("update_tensors", self._kept(tensors), on_host=self._on_host)
        if (layout is self._budgeted and (self._is_size_known or not is_trained)) or not self._ring.enabled:
            return layout, None
        has_state = is_trained or any(name.startswith("optimizer.") for name in layout.names)
        if not (has_state or at_start):
            return layout, None
        self._budgeted, self._is_size_known = layout, has_state
        small, shared = self._state.snapshot_nbytes()
        shared = shared if self._on_host else 0
        whole, share = self._shares.sizes(tensors, layout)

        def room(times: int) -> SnapshotRoom:
            return self._ring.room(times * whole + small, shared, times * share + small if share else 0)

        fitting = room(1 if has_state else 3)
        if not has_state and max(fitting.copies, fitting.as_share().copies if share else 0) < MIN_COPIES:
            fitting = room(1)._replace(is_known=False)
        return layout, fitting

    def _kept(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that this rank keeps."""
        share = self._shares.of(tensors)
        return tensors if share is None else share.split(tensors)[0]

    def leave_device(self) -> bool:
        """Keep snapshots on the host from now on, and free the device memory that waits for them. Return whether it did."""
        if self._on_host:
            return False
        self._on_host = True
        for part in ("update_tensors", "small_state", "buffers"):
            self._copier.retire(part, on_host=False)
        return True

    def preallocate(self) -> None:
        """After the first step, when the size of a snapshot is known, allocate its memory ahead of time."""
        self.is_preallocated = True
        if self._ring.enabled and self._on_host:
            self._copier.layout("update_tensors", self._kept(self._state.update_tensors()))
            self._copier.preallocate(self._ring.max_snapshots())

    def copy(
        self, tensors: dict[str, Tensor], layout: SnapshotLayout, reason: str | None, begun: CopyStart | None = None
    ) -> tuple[SnapshotCopy, list[str | None]]:
        """Start a copy as soon as there is memory for it. If the device is full, keep snapshots on the host from now on."""
        on_host = self.on_host(reason)
        share = self._shares.of(tensors)
        tensors, others = (tensors, {}) if share is None else share.split(tensors)
        notes = [self._wait_for_memory(on_host)]
        try:
            fitting = layout if on_host == self._on_host else None
            copy = self._copier.start(tensors, live=True, on_host=on_host, layout=fitting, others=others, begun=begun)
        except torch.OutOfMemoryError:
            if on_host:
                raise
            notes.append(self._once(_DEVICE_FULL))
            self.leave_device()  # training needs the device memory that is free for later copies
            copy = self._copier.start(tensors, live=True, begun=begun)
        copy.share = share
        if self.is_preallocated:
            self._copier.preallocate(self._ring.max_snapshots())
        if copy.buffer is not None:
            notes.append(self._once(copy.buffer.warning))
        notes += map(self._once, self._copier.notes())
        return copy, notes

    def _wait_for_memory(self, on_host: bool) -> str | None:
        """If the limit on copies is reached, wait until a dropped snapshot is not used any more."""
        ring = self._ring
        limit = ring.max_snapshots() + (not ring.is_limited) if ring.enabled else 2
        self._reclaim()
        waited = False
        while self._leaving and not self._copier.has_ready("update_tensors", on_host=on_host):
            if self._copier.count("update_tensors", on_host=on_host) < limit:
                break
            waited = True
            self._leaving[0].wait_until_unused()
            self._reclaim()
        return self._once(_DISK_TOO_SLOW) if waited else None

    def _once(self, note: str | None) -> str | None:
        if note is None or note in self._noted:
            return None
        self._noted.add(note)
        return note

    def release(self, snapshot: Snapshot) -> None:
        """Reuse the memory of a dropped snapshot as soon as it is not used any more."""
        self._leaving.append(snapshot)
        self._reclaim()

    def _reclaim(self) -> None:
        for snapshot in [s for s in self._leaving if not s.in_use]:
            self._leaving.remove(snapshot)
            self._copier.reclaim("update_tensors", snapshot.copy)
            # A saved one keeps these: the run's state is compared with them later, to see if anything changed.
            if snapshot.reason is None:
                self._copier.reclaim("small_state", snapshot.small_state_copy)
                self._copier.reclaim("buffers", snapshot.buffers)
