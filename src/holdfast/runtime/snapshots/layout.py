"""The place of each tensor of a state in one buffer, and how tensors are copied there and back in few calls.

Small tensors of one device are packed by dtype and cross the bus as one. Large ones cross one by one, in pieces. Tensors
that stay on their device are copied in batches. A layout is computed once, and is valid while the names, shapes, dtypes
and devices of the state's tensors stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter, eq, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.runtime.tensors.named_params import PLAIN_TYPES

SMALL_BYTES = 256 << 10
"""tensors below this size are packed"""
MAX_PACK_BYTES = 64 << 20
"""the largest pack: it is assembled in that much device memory"""
PIECE_BYTES = 64 << 20
"""no copy between host and device crosses a multiple of this: other copies get a turn, and pinned memory is registered
in such parts"""
LARGE_COPY_BYTES = 8 << 20
"""on a device, a plain copy of this size is faster than the foreach kernel"""
HOST_BATCH_BYTES = 16 << 20
"""on the host, one foreach call copies about this much"""
FOREACH_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
"""dtypes that foreach kernels support; tensors of other dtypes are copied one by one"""
_EARLY_FRACTION = 15 / 16
_ALIGNMENT, _PACK_ALIGNMENT = 256, 16
_spec = attrgetter("shape", "dtype", "device")


class PackRow(NamedTuple):
    """The tensors of one dtype in a pack, side by side."""

    dtype: torch.dtype
    start: int
    nbytes: int
    members: list[int]


class Pack(NamedTuple):
    """The small tensors of one device."""

    device: torch.device
    start: int
    nbytes: int
    rows: list[PackRow]


class PackStaging(NamedTuple):
    """Device memory in which a pack is assembled, and its views by row."""

    flat: Tensor
    rows: list[list[Tensor]]


class SnapshotLayout:
    """Holds the offset of every tensor, by its index in `names`.

    `destination` is the device of the copies; None keeps each copy on its tensor's device. `crosses_bus` overrides, for
    tests on one device, whether tensors count as being on another device than their copies.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], destination: torch.device | None, *, crosses_bus: bool | None = None
    ) -> None:
        values = list(tensors.values())
        self.names = list(tensors)
        self._specs: list[Any] = list(map(_spec, values))
        self._types = list(map(type, values))
        self.destination = destination
        self.devices = list(dict.fromkeys(v.device for v in values))
        self.by_device: dict[torch.device, list[int]] = {}
        """the tensors of each device that have a place in the buffer"""
        self.unpackable = [i for i, v in enumerate(values) if not _is_dense(v)]
        """sparse tensors, quantized ones and subclasses: they have no place in the buffer"""
        unpackable = set(self.unpackable)
        self.offsets = [0] * len(values)
        self.sizes: dict[torch.device, int] = {}
        self.packs: list[Pack] = []
        self.rows: list[tuple[torch.device, PackRow]] = []
        """every row of small tensors, with the device of its copy; the gaps in it are zeros"""
        self.large: list[int] = []
        """tensors that cross the bus one by one"""
        self.early: dict[int, list[int]] = {}
        """one of `large` -> the tensors copied by then, if that is nearly all of its device's"""
        self.batches: list[list[int]] = []
        """tensors that stay on their device, by foreach call"""
        self._staging: dict[int, PackStaging] = {}
        crosses = {
            d: destination is not None and d != destination if crosses_bus is None else crosses_bus
            for d in self.devices
        }
        for device in sorted(self.devices, key=lambda d: not crosses[d]):
            members = [i for i, v in enumerate(values) if v.device == device and i not in unpackable]
            self.by_device[device] = members
            self._place(values, members, destination or device, crosses[device])

    def _place(self, values: list[Tensor], members: list[int], destination: torch.device, crosses: bool) -> None:
        small: list[int] = []
        left = MAX_PACK_BYTES
        candidates = [i for i in members if values[i].nbytes < SMALL_BYTES and values[i].dtype in FOREACH_DTYPES]
        for i in sorted(candidates, key=lambda i: values[i].nbytes):
            if (left := left - values[i].nbytes - _PACK_ALIGNMENT) < 0:
                break
            small.append(i)
        if small:
            start = _round_up(self.sizes.get(destination, 0), PIECE_BYTES if crosses else _ALIGNMENT)
            pack = self._pack(values, small, start)
            self.sizes[destination] = start + pack.nbytes
            self.rows += [(destination, row) for row in pack.rows]
            if crosses:
                self.packs.append(pack)
        packed = set(small)
        large = [i for i in members if i not in packed]
        end = self.sizes.get(destination, 0)
        for i in large:
            self.offsets[i] = end = _round_up(end, _ALIGNMENT)
            end += values[i].nbytes
        self.sizes[destination] = _round_up(end, _ALIGNMENT)
        if crosses:
            self.large += large
            self._mark_early(small, large, [values[i].nbytes for i in large])
        else:
            self.batches += _batches(values, members)

    def _mark_early(self, small: list[int], large: list[int], sizes: list[int]) -> None:
        """Choose the large tensor after which little is left to copy; at least one is left."""
        total, copied = sum(sizes), list(accumulate(sizes[:-1]))
        last = next((n for n, so_far in enumerate(copied) if so_far >= _EARLY_FRACTION * total), len(copied) - 1)
        if copied and copied[last] >= max(PIECE_BYTES, total // 2):
            self.early[large[last]] = [*small, *large[: last + 1]]

    def _pack(self, values: list[Tensor], small: list[int], start: int) -> Pack:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i in sorted(small):
            by_dtype.setdefault(values[i].dtype, []).append(i)
        end, rows = start, []
        for dtype, members in by_dtype.items():
            row_start = end
            for i in members:
                self.offsets[i] = end
                end = _round_up(end + values[i].nbytes, _PACK_ALIGNMENT)
            rows.append(PackRow(dtype, row_start, end - row_start, members))
        return Pack(values[small[0]].device, start, end - start, rows)

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())

    def fits(self, tensors: Mapping[str, Tensor], destination: torch.device | None) -> bool:
        """Return whether this is the layout of these tensors."""
        values = list(tensors.values())
        # Compared lazily, without temporaries: a hundred thousand new objects would trigger the garbage collector.
        return (
            destination == self.destination
            and list(tensors) == self.names
            and all(map(is_, map(type, values), self._types))
            and all(map(eq, map(_spec, values), self._specs))
        )

    def views(self, memory: Mapping[torch.device, Tensor]) -> dict[int, Tensor]:
        """Return a view for each tensor, by index, into memory of `sizes`. Unpackable tensors have none."""
        unpackable = set(self.unpackable)
        typed: dict[Any, Tensor] = {}
        views: dict[int, Tensor] = {}
        for i, (shape, dtype, device) in enumerate(self._specs):
            if i in unpackable:
                continue
            destination = self.destination or device
            flat = typed.get((destination, dtype))
            if flat is None:
                flat = typed[destination, dtype] = memory[destination].view(dtype)
            views[i] = flat.as_strided(shape, _strides(shape), self.offsets[i] // dtype.itemsize)
        return views

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {dtype for _, dtype, _ in self._specs}

    def device(self, index: int) -> torch.device:
        """Return the device of the tensor itself."""
        device: torch.device = self._specs[index][2]
        return device

    def size(self, index: int) -> int:
        """Return the bytes of a tensor."""
        shape, dtype, _ = self._specs[index]
        return int(shape.numel()) * int(dtype.itemsize)

    def view(self, index: int, memory: Tensor) -> Tensor:
        """View bytes of memory as the tensor with that index."""
        shape, dtype, _ = self._specs[index]
        return memory.view(dtype).view(shape)

    def staging(self, index: int) -> PackStaging:
        """Return device memory to assemble pack number `index` in. It is allocated once."""
        staging = self._staging.get(index)
        if staging is None:
            pack = self.packs[index]
            flat = torch.zeros(_round_up(pack.nbytes, _ALIGNMENT), dtype=torch.uint8, device=pack.device)
            rows = []
            for row in pack.rows:
                typed = flat.view(row.dtype)
                shapes = [self._specs[i][0] for i in row.members]
                starts = [(self.offsets[i] - pack.start) // row.dtype.itemsize for i in row.members]
                rows.append([typed.as_strided(s, _strides(s), at) for s, at in zip(shapes, starts, strict=True)])
            staging = self._staging[index] = PackStaging(flat[: pack.nbytes], rows)
        return staging

    def pieces(self, index: int) -> list[tuple[int, int]]:
        """Return the pieces in which a large tensor crosses, as ranges of its elements."""
        start, itemsize = self.offsets[index], self._specs[index][1].itemsize
        end = start + self.size(index)
        edges = [start, *range(_round_up(start + 1, PIECE_BYTES), end, PIECE_BYTES), end]
        return [((a - start) // itemsize, (b - start) // itemsize) for a, b in pairwise(edges)]


def _batches(values: Sequence[Tensor], members: list[int]) -> list[list[int]]:
    """Group tensors for one copy call each: on a device by dtype, so that one kernel takes many; on the host by size."""
    batches: dict[Any, list[int]] = {}
    filled = count = 0
    for i in members:
        value = values[i]
        if value.device.type == "cpu":
            if filled >= HOST_BATCH_BYTES:
                filled, count = 0, count + 1
            filled += value.nbytes
            batches.setdefault(count, []).append(i)
        elif value.is_contiguous() and value.dtype in FOREACH_DTYPES and value.nbytes < LARGE_COPY_BYTES:
            batches.setdefault(value.dtype, []).append(i)
        else:
            batches[-i - 1] = [i]
    return list(batches.values())


def _is_dense(value: Tensor) -> bool:
    return type(value) in PLAIN_TYPES and value.layout is torch.strided and not value.is_quantized


def _strides(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


def _round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple
