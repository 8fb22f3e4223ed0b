"""Blocks of memory that snapshots are copied into: as many as there are snapshots at once, each used again and again."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import TypeAlias

import torch
from torch import Tensor

from holdfast.runtime.snapshots.layout import Layout, Row
from holdfast.runtime.tensors import checksum as bits

Beside: TypeAlias = Callable[[dict[str, Tensor]], bits.Checksums]
AHEAD = 1
"""blocks made before anybody asks for them, where making one takes time"""


class Block:
    """Memory for one layout, and its views."""

    def __init__(self, layout: Layout, memory: Mapping[torch.device, Tensor], note: str | None = None) -> None:
        self.layout, self._memory, self.note = layout, memory, note
        """`note`: what is wrong with the memory, or None"""
        self.views = layout.views(memory)
        self.tensors = {layout.names[i]: view for i, view in self.views.items()}
        home = layout.home
        self.regions = [memory[home][p.start : p.start + p.nbytes] for p in layout.packs] if home is not None else []
        cuts = {i: layout.cuts(i) for i in layout.alone}
        self.pieces = {
            i: [(a, b, self.views[i].view(-1)[a:b]) for a, b in found] for i, found in cuts.items() if len(found) > 1
        }
        """of the large tensors that cross in more than one piece: from, to, and the memory for it"""

    def row(self, home: torch.device, row: Row) -> Tensor:
        """All of a row as one tensor, gaps and all."""
        return self._memory[home][row.start : row.start + row.nbytes].view(row.dtype)

    @torch.no_grad()
    def fill(self, sources: Sequence[Tensor], device: torch.device, but: Collection[int] = ()) -> None:
        """Copy what of `sources`, in the order of the layout's names, lies on that device: enqueued, and not waited for.
        `but`: large ones that are left for later."""
        layout = self.layout
        for number, pack in enumerate(layout.packs):
            if pack.device == device:
                staging = layout.staging(number)
                for row, views in zip(pack.rows, staging.rows, strict=True):
                    torch._foreach_copy_(views, [sources[i] for i in row.members])
                self.regions[number].copy_(staging.flat, non_blocking=True)
        for i in layout.alone:
            if i not in but and sources[i].device == device:
                self._fill_alone(i, sources[i])
        for batch in layout.together:
            if sources[batch[0]].device == device:
                self.fill_batch(sources, batch)

    @torch.no_grad()
    def fill_later(self, sources: Mapping[int, Tensor]) -> None:
        """What was left, by its place in the layout."""
        for i, source in sources.items():
            self._fill_alone(i, source)

    def _fill_alone(self, i: int, source: Tensor) -> None:
        if not source.is_contiguous() or source.is_conj():
            source = source.resolve_conj().contiguous()
        pieces = self.pieces.get(i)
        if pieces is None:
            self.views[i].copy_(source, non_blocking=True)
            return
        flat = source.view(-1)
        for a, b, view in pieces:
            view.copy_(flat[a:b], non_blocking=True)

    def fill_batch(self, sources: Sequence[Tensor], batch: list[int]) -> None:
        """One list of those that stay on their device."""
        _copy([self.views[i] for i in batch], [sources[i] for i in batch])

    @torch.no_grad()
    def pour(self, targets: Sequence[Tensor], beside: Beside | None = None) -> list[bits.Checksums]:
        """The way back, into tensors that the layout fits: all of it is enqueued, and nothing waited for. Returns a look at
        those that were looked at on their way. `beside`: who may look at some while the last ones are under way."""
        layout, looked = self.layout, []
        for number, pack in enumerate(layout.packs):
            staging = layout.staging(number)
            staging.flat.copy_(self.regions[number], non_blocking=True)
            for row, views in zip(pack.rows, staging.rows, strict=True):
                torch._foreach_copy_([targets[i] for i in row.members], views)
        for i in layout.alone:
            self._pour_alone(i, targets[i])
            if beside is not None and i in layout.early:
                looked.append(beside({layout.names[n]: targets[n] for n in layout.early[i]}))
        for device, here in layout.on.items():
            if layout.home is None:
                live = {layout.names[i]: targets[i] for i in here}
                if (seen := bits.copy_and_checksum(live, [self.views[i] for i in here])) is not None:
                    looked.append(seen)
                    continue
            for batch in layout.together:
                if layout.device(batch[0]) == device:
                    _copy([targets[i] for i in batch], [self.views[i] for i in batch])
        return looked

    def _pour_alone(self, i: int, target: Tensor) -> None:
        pieces = self.pieces.get(i)
        if pieces is None:
            target.copy_(self.views[i], non_blocking=True)
            return
        there = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
        flat = there.detach().view(-1)
        for a, b, view in pieces:
            flat[a:b].copy_(view, non_blocking=True)
        if there is not target:
            target.copy_(there)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    else:
        torch._foreach_copy_(targets, sources)


class Blocks:
    """The blocks of one layout at a time."""

    def __init__(self, make: Callable[[Layout], Block]) -> None:
        self._make = make
        self._worker: Executor | None = None
        self._layout: Layout | None = None
        self._free: list[Block] = []
        self._coming: deque[Future[Block]] = deque()
        self._alive: weakref.WeakSet[Block] = weakref.WeakSet()

    @property
    def count(self) -> int:
        """How many there are, with those in the making; of older layouts too."""
        return len(self._alive) + len(self._coming)

    def adopt(self, layout: Layout, worker: Executor | None = None) -> None:
        """From here on blocks are for this layout; spare ones of another go. `worker`: who makes them, ahead of time; None:
        they are made when asked for."""
        gone, self._free = self._free, []
        for coming in self._coming:
            coming.cancel()
        self._coming.clear()
        if self._worker is not None and gone:
            self._worker.submit(gone.clear)  # to give it back takes as long as to make it
        self._layout, self._worker = layout, worker

    def retire(self) -> None:
        self.clear()
        self._layout = self._worker = None

    def ready(self) -> bool:
        """Whether one can be taken without making one more."""
        return bool(self._free or self._coming)

    def prepare(self, most: int) -> None:
        """See to it that the next ones are there when they are asked for, without there being more than `most`."""
        if self._worker is None or self._layout is None:
            return
        while len(self._free) + len(self._coming) < AHEAD and self.count < most:
            self._coming.append(self._worker.submit(self._make, self._layout))

    def take(self) -> Block:
        """One that nobody uses; made now where there is none."""
        assert self._layout is not None
        if self._free:
            return self._free.pop()
        if self._coming:
            block = self._coming.popleft().result()
        elif self._worker is not None:
            block = self._worker.submit(self._make, self._layout).result()
        else:
            block = self._make(self._layout)
        self._alive.add(block)
        return block

    def give(self, block: Block) -> None:
        """Nobody reads it any more."""
        if block.layout is self._layout:
            self._free.append(block)
        elif self._worker is not None:
            self._worker.submit([block].clear)

    def clear(self) -> None:
        for coming in self._coming:
            coming.cancel()
        self._coming.clear()
        self._free.clear()
