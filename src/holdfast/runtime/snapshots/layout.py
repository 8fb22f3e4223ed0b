"""Where each tensor of a state lies in one block of memory, and how it gets there and back in few strokes.

Small tensors of one device lie side by side, by type, and cross to the host or back as one; large ones cross one by one, in
pieces. What stays on its device is copied in lists. A layout is worked out once and serves for as long as the state is made
of tensors of the same names, shapes, types and places; so do the views of a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter, eq, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.runtime.tensors.named_params import PLAIN_TYPES

SMALL = 256 << 10
PACKED = 64 << 20
"""at most so many bytes of small tensors go together: they pass through that much memory of the device"""
PIECE = 64 << 20
"""no copy between host and device crosses a multiple of this: others get their turn, and memory is registered in parts"""
_NEARLY_ALL = 15 / 16
LARGE = 8 << 20
"""on a device, a plain copy of so many bytes is faster than the kernel that takes lists"""
BATCH = 16 << 20
"""on the host, tensors of about so many bytes are copied by one call"""
COMMON = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
"""what kernels that take lists know; others are copied one by one"""
_ALIGNED, _ALIGNED_SMALL = 256, 16
_kind = attrgetter("shape", "dtype", "device")


class Row(NamedTuple):
    """Small tensors of one type, side by side."""

    dtype: torch.dtype
    start: int
    nbytes: int
    members: list[int]


class Pack(NamedTuple):
    """The small tensors of one device."""

    device: torch.device
    start: int
    nbytes: int
    rows: list[Row]


class Staging(NamedTuple):
    """Where a pack is put together on the device."""

    flat: Tensor
    rows: list[list[Tensor]]


class Layout:
    """Tensors are known by their place in `names`. `home`: where the copies lie; None: each where its tensor lies.
    `crossing`: whether tensors are treated as on the far side of a bus; None: those that are not at home."""

    def __init__(
        self, tensors: Mapping[str, Tensor], home: torch.device | None, *, crossing: bool | None = None
    ) -> None:
        values = list(tensors.values())
        self.names = list(tensors)
        self._kinds: list[Any] = list(map(_kind, values))
        self._types = list(map(type, values))
        self.home = home
        self.devices = list(dict.fromkeys(v.device for v in values))
        self.on: dict[torch.device, list[int]] = {}
        """those that lie on each device and have a place in a block"""
        self.odd = [i for i, v in enumerate(values) if not _lies_flat(v)]
        """sparse ones and such as are not plain memory: they have no place in a block"""
        odd = set(self.odd)
        self.offsets = [0] * len(values)
        self.sizes: dict[torch.device, int] = {}
        self.packs: list[Pack] = []
        self.rows: list[tuple[torch.device, Row]] = []
        """every row of small tensors, and where its copy lies; gaps in it are zeros"""
        self.alone: list[int] = []
        self.early: dict[int, list[int]] = {}
        """where there is much of it: by the one of `alone` with which nearly all of a device's is under way, what that is"""
        self.together: list[list[int]] = []
        self._staged: dict[int, Staging] = {}
        far = {d: home is not None and d != home if crossing is None else crossing for d in self.devices}
        for device in sorted(self.devices, key=lambda d: not far[d]):
            self.on[device] = [i for i, v in enumerate(values) if v.device == device and i not in odd]
            self._place(values, self.on[device], home or device, far[device])

    def _place(self, values: list[Tensor], here: list[int], home: torch.device, crosses: bool) -> None:
        small: list[int] = []
        room = PACKED
        few = [i for i in here if values[i].nbytes < SMALL and values[i].dtype in COMMON]
        for i in sorted(few, key=lambda i: values[i].nbytes):
            if (room := room - values[i].nbytes - _ALIGNED_SMALL) < 0:
                break
            small.append(i)
        if small:
            begin = _up(self.sizes.get(home, 0), PIECE if crosses else _ALIGNED)
            pack = self._pack(values, small, begin)
            self.sizes[home] = begin + pack.nbytes
            self.rows += [(home, row) for row in pack.rows]
            if crosses:
                self.packs.append(pack)
        packed = set(small)
        large = [i for i in here if i not in packed]
        at = self.sizes.get(home, 0)
        for i in large:
            self.offsets[i] = at = _up(at, _ALIGNED)
            at += values[i].nbytes
        self.sizes[home] = _up(at, _ALIGNED)
        if crosses:
            self.alone += large
            self._part_early(small, large, [values[i].nbytes for i in large])
        else:
            self.together += _batches(values, here)

    def _part_early(self, small: list[int], large: list[int], sizes: list[int]) -> None:
        """Up to the first border after which there is little left; at least before the last."""
        whole, done = sum(sizes), list(accumulate(sizes[:-1]))
        nearly = next((n for n, so_far in enumerate(done) if so_far >= _NEARLY_ALL * whole), len(done) - 1)
        if done and done[nearly] >= max(PIECE, whole // 2):
            self.early[large[nearly]] = [*small, *large[: nearly + 1]]

    def _pack(self, values: list[Tensor], small: list[int], begin: int) -> Pack:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i in sorted(small):
            by_dtype.setdefault(values[i].dtype, []).append(i)
        at, rows = begin, []
        for dtype, members in by_dtype.items():
            start = at
            for i in members:
                self.offsets[i] = at
                at = _up(at + values[i].nbytes, _ALIGNED_SMALL)
            rows.append(Row(dtype, start, at - start, members))
        return Pack(values[small[0]].device, begin, at - begin, rows)

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())

    def fits(self, tensors: Mapping[str, Tensor], home: torch.device | None) -> bool:
        """Whether it is the layout of these."""
        values = list(tensors.values())
        # One after another, and nothing kept: a hundred thousand new objects would set off the garbage collector.
        return (
            home == self.home
            and list(tensors) == self.names
            and all(map(is_, map(type, values), self._types))
            and all(map(eq, map(_kind, values), self._kinds))
        )

    def views(self, memory: Mapping[torch.device, Tensor]) -> dict[int, Tensor]:
        """One a name, in memory of `sizes`; none for what is odd."""
        odd = set(self.odd)
        typed: dict[Any, Tensor] = {}
        found: dict[int, Tensor] = {}
        for i, (shape, dtype, device) in enumerate(self._kinds):
            if i in odd:
                continue
            home = self.home or device
            flat = typed.get((home, dtype))
            if flat is None:
                flat = typed[home, dtype] = memory[home].view(dtype)
            found[i] = flat.as_strided(shape, _strides(shape), self.offsets[i] // dtype.itemsize)
        return found

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {dtype for _, dtype, _ in self._kinds}

    def device(self, number: int) -> torch.device:
        """Where the tensor of that number lies."""
        found: torch.device = self._kinds[number][2]
        return found

    def size(self, number: int) -> int:
        """Its bytes."""
        shape, dtype, _ = self._kinds[number]
        return int(shape.numel()) * int(dtype.itemsize)

    def view(self, number: int, memory: Tensor) -> Tensor:
        """So many bytes of memory as the tensor of that number."""
        shape, dtype, _ = self._kinds[number]
        return memory.view(dtype).view(shape)

    def staging(self, number: int) -> Staging:
        """Memory for the pack of that number, on its device; made once."""
        staging = self._staged.get(number)
        if staging is None:
            pack = self.packs[number]
            flat = torch.zeros(_up(pack.nbytes, _ALIGNED), dtype=torch.uint8, device=pack.device)
            rows = []
            for row in pack.rows:
                typed = flat.view(row.dtype)
                size = row.dtype.itemsize
                shapes = [self._kinds[i][0] for i in row.members]
                places = [(self.offsets[i] - pack.start) // size for i in row.members]
                rows.append([typed.as_strided(s, _strides(s), at) for s, at in zip(shapes, places, strict=True)])
            staging = self._staged[number] = Staging(flat[: pack.nbytes], rows)
        return staging

    def cuts(self, number: int) -> list[tuple[int, int]]:
        """The pieces of one large tensor, in elements of it."""
        at, size = self.offsets[number], self._kinds[number][1].itemsize
        end = at + self.size(number)
        inner = range(_up(at + 1, PIECE), end, PIECE)
        edges = [at, *inner, end]
        return [((a - at) // size, (b - at) // size) for a, b in pairwise(edges)]


def _batches(values: Sequence[Tensor], here: list[int]) -> list[list[int]]:
    """Lists for one call each. On a device by type, so that one kernel takes many; on the host of a bounded size."""
    batches: dict[Any, list[int]] = {}
    filled = count = 0
    for i in here:
        value = values[i]
        if value.device.type == "cpu":
            if filled >= BATCH:
                filled, count = 0, count + 1
            filled += value.nbytes
            batches.setdefault(count, []).append(i)
        elif value.is_contiguous() and value.dtype in COMMON and value.nbytes < LARGE:
            batches.setdefault(value.dtype, []).append(i)
        else:
            batches[-i - 1] = [i]
    return list(batches.values())


def _lies_flat(value: Tensor) -> bool:
    return type(value) in PLAIN_TYPES and value.layout is torch.strided and not value.is_quantized


def _strides(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


def _up(at: int, to: int) -> int:
    return (at + to - 1) // to * to
