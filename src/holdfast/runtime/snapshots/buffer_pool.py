"""The memory that snapshots are copied into: a pool of buffers, each reused for one snapshot after another."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import TypeAlias

import torch
from torch import Tensor

from holdfast.runtime.snapshots.layout import PackRow, SnapshotLayout
from holdfast.runtime.tensors.checksum import Checksums, copy_and_checksum
from holdfast.runtime.tensors.torch_private import foreach_copy_

ChecksumFunction: TypeAlias = Callable[[dict[str, Tensor]], Checksums]
PREALLOCATED = 1
"""free buffers kept ready if allocating one takes time"""


class SnapshotBuffer:
    """Memory for one layout, and views into it for every tensor. `warning` is a problem with the memory, or None."""

    def __init__(
        self, layout: SnapshotLayout, memory: Mapping[torch.device, Tensor], warning: str | None = None
    ) -> None:
        self.layout, self._memory, self.warning = layout, memory, warning
        self.views = layout.views(memory)
        self.tensors = {layout.names[i]: view for i, view in self.views.items()}
        host = layout.destination
        self.regions = [memory[host][p.start : p.start + p.nbytes] for p in layout.packs] if host is not None else []
        self.pieces: dict[int, list[tuple[int, int, Tensor]]] = {}
        """the large tensors that cross in more than one piece: first element, end, and the memory for it"""
        for i in layout.large:
            if len(ranges := layout.pieces(i)) > 1:
                self.pieces[i] = [(a, b, self.views[i].view(-1)[a:b]) for a, b in ranges]

    def row(self, device: torch.device, row: PackRow) -> Tensor:
        """Return all of a row as one tensor, gaps included."""
        return self._memory[device][row.start : row.start + row.nbytes].view(row.dtype)

    @torch.no_grad()
    def fill(self, sources: Sequence[Tensor], device: torch.device, but: Collection[int] = ()) -> None:
        """Enqueue copies of the `sources` on that device, in the order of the layout's names. Does not wait.

        Large tensors in `but` are left to `fill_large`.
        """
        layout = self.layout
        for number, pack in enumerate(layout.packs):
            if pack.device == device:
                staging = layout.staging(number)
                for row, views in zip(pack.rows, staging.rows, strict=True):
                    foreach_copy_(views, [sources[i] for i in row.members])
                self.regions[number].copy_(staging.flat, non_blocking=True)
        self.fill_large({i: sources[i] for i in layout.large if i not in but and sources[i].device == device})
        for batch in layout.batches:
            if sources[batch[0]].device == device:
                self.fill_batch(sources, batch)

    @torch.no_grad()
    def fill_large(self, sources: Mapping[int, Tensor]) -> None:
        """Enqueue copies of large tensors, given by their index in the layout."""
        for i, source in sources.items():
            if not source.is_contiguous() or source.is_conj():
                source = source.resolve_conj().contiguous()
            if i not in self.pieces:
                self.views[i].copy_(source, non_blocking=True)
                continue
            flat = source.view(-1)
            for a, b, view in self.pieces[i]:
                view.copy_(flat[a:b], non_blocking=True)

    def fill_batch(self, sources: Sequence[Tensor], batch: list[int]) -> None:
        """Copy one batch of the tensors that stay on their device."""
        _copy([self.views[i] for i in batch], [sources[i] for i in batch])

    @torch.no_grad()
    def copy_back(
        self, targets: Sequence[Tensor], concurrent_checksum: ChecksumFunction | None = None
    ) -> list[Checksums]:
        """Enqueue copies into tensors that the layout fits. Does not wait.

        Returns the checksums of those tensors whose checksums are enqueued with them: `concurrent_checksum` takes most of
        a device's tensors while its last ones are still crossing the bus.
        """
        layout, checksums = self.layout, []
        for number, pack in enumerate(layout.packs):
            staging = layout.staging(number)
            staging.flat.copy_(self.regions[number], non_blocking=True)
            for row, views in zip(pack.rows, staging.rows, strict=True):
                foreach_copy_([targets[i] for i in row.members], views)
        for i in layout.large:
            self._copy_back_large(i, targets[i])
            if concurrent_checksum is not None and i in layout.early:
                checksums.append(concurrent_checksum({layout.names[n]: targets[n] for n in layout.early[i]}))
        for device, members in layout.by_device.items():
            if layout.destination is None:
                live = {layout.names[i]: targets[i] for i in members}
                if (copied := copy_and_checksum(live, [self.views[i] for i in members])) is not None:
                    checksums.append(copied)
                    continue
            for batch in layout.batches:
                if layout.device(batch[0]) == device:
                    _copy([targets[i] for i in batch], [self.views[i] for i in batch])
        return checksums

    def _copy_back_large(self, i: int, target: Tensor) -> None:
        if i not in self.pieces:
            target.copy_(self.views[i], non_blocking=True)
            return
        dense = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
        flat = dense.detach().view(-1)
        for a, b, view in self.pieces[i]:
            flat[a:b].copy_(view, non_blocking=True)
        if dense is not target:
            target.copy_(dense)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    else:
        foreach_copy_(targets, sources)


class BufferPool:
    """Hands out buffers for one layout at a time, and takes them back."""

    def __init__(self, allocate: Callable[[SnapshotLayout], SnapshotBuffer]) -> None:
        self._allocate = allocate
        self._worker: Executor | None = None
        self._layout: SnapshotLayout | None = None
        self._free: list[SnapshotBuffer] = []
        self._pending: deque[Future[SnapshotBuffer]] = deque()
        self._alive: weakref.WeakSet[SnapshotBuffer] = weakref.WeakSet()

    @property
    def count(self) -> int:
        """The number of buffers, including pending ones and those of earlier layouts."""
        return len(self._alive) + len(self._pending)

    def set_layout(self, layout: SnapshotLayout, worker: Executor | None = None) -> None:
        """Hand out buffers for this layout from now on, and drop the free ones of the previous layout.

        `worker` allocates buffers ahead of time; without one they are allocated on demand.
        """
        dropped, self._free = self._free, []
        self.clear()
        if self._worker is not None and dropped:
            self._worker.submit(dropped.clear)  # freeing pinned memory takes as long as allocating it
        self._layout, self._worker = layout, worker

    def retire(self) -> None:
        """Free the free buffers now, and those in use when their snapshots are dropped."""
        self.clear()
        self._layout = self._worker = None

    def has_ready(self) -> bool:
        """Return whether `acquire` returns without allocating one more."""
        return bool(self._free or self._pending)

    def preallocate(self, limit: int) -> None:
        """Start allocating the next buffer if there is a worker and fewer than `limit` buffers exist."""
        if self._worker is None or self._layout is None:
            return
        while len(self._free) + len(self._pending) < PREALLOCATED and self.count < limit:
            self._pending.append(self._worker.submit(self._allocate, self._layout))

    def acquire(self) -> SnapshotBuffer:
        """Return a free buffer, or a new one."""
        assert self._layout is not None
        if self._free:
            return self._free.pop()
        if self._pending:
            buffer = self._pending.popleft().result()
        elif self._worker is not None:
            buffer = self._worker.submit(self._allocate, self._layout).result()
        else:
            buffer = self._allocate(self._layout)
        self._alive.add(buffer)
        return buffer

    def release(self, buffer: SnapshotBuffer) -> None:
        """Take back a buffer that is not read any more. A buffer of an earlier layout is freed."""
        if buffer.layout is self._layout:
            self._free.append(buffer)
        elif self._worker is not None:
            self._worker.submit([buffer].clear)

    def clear(self) -> None:
        """Free all free buffers and cancel pending ones."""
        for pending in self._pending:
            pending.cancel()
        self._pending.clear()
        self._free.clear()
