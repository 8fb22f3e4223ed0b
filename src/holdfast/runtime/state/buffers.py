"""Buffers that forward changes (BatchNorm, routers, amax): kept from the start of a step, so it can be undone.

A vetoed step has still moved them. Copies are taken before every step, on the device, in stream order. Large buffers
that have not changed since the last copy share it; small ones are copied always, because a write through `.data` leaves
no trace in the version counter. Small ones that stay where they are, are copied together: one kernel for all of a kind.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor, nn

from holdfast.runtime.tensors.inspect import nbytes
from holdfast.runtime.tensors.sharded import is_sharded, local, shard_like

_SMALL = 64 * 1024
_STOOD = 4
"""captures in a row that found the same small buffer in a place: from then on it is copied together with others"""
_KINDS = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
"""what torch joins without a change to any bit"""


class Pack(NamedTuple):
    """Buffers of one kind, joined in one tensor: the place of each, and its shape."""

    places: list[int]
    shapes: list[torch.Size]


Packs = list[tuple[Pack, Tensor]]


class BufferCapture:
    """Copies of all buffers, as of one moment. Never changed afterwards."""

    def __init__(self, single: Sequence[Tensor | None], packs: Packs) -> None:
        self._single, self._packs = single, packs

    def tensors(self) -> list[Tensor | None]:
        """One for each place, None where there was none. Those copied together share memory."""
        found = list(self._single)
        for (places, shapes), joined in self._packs:
            pieces = torch.split(joined.view(-1), [shape.numel() for shape in shapes])
            for place, piece, shape in zip(places, pieces, shapes, strict=True):
                found[place] = piece.view(shape)
        return found


class _Together:
    """Small buffers that stay in their places, copied a kind at a time."""

    def __init__(self, found: Iterable[tuple[int, nn.Module, str]]) -> None:
        kinds: dict[tuple[torch.device, torch.dtype, int], list[tuple[int, nn.Module, str]]] = {}
        for i, module, key in found:
            value = module._buffers[key]
            assert value is not None, "nothing stands in that place"
            kinds.setdefault((value.device, value.dtype, min(2, value.dim())), []).append((i, module, key))
        self._where = [place for kind in kinds.values() for place in kind]
        self._values = self._now()
        self._shapes, self._dtypes = _shapes(self._values), _dtypes(self._values)
        self._packs: list[tuple[Pack, list[Tensor]]] = []
        for kind in kinds.values():
            first = sum(len(tensors) for _, tensors in self._packs)
            own = slice(first, first + len(kind))
            self._packs.append((Pack([i for i, _, _ in kind], self._shapes[own]), self._values[own]))

    def copy(self) -> Packs | None:
        """The copies; None where one of them is another now, or of another shape or type (`.data` may change these)."""
        if not self._packs:
            return []
        values = self._values
        same = all(map(is_, self._now(), values))
        if not same or _shapes(values) != self._shapes or _dtypes(values) != self._dtypes:
            return None
        return [(pack, _join(tensors)) for pack, tensors in self._packs]

    def moved(self) -> list[int]:
        """The places in which something is not as it was."""
        was = zip(self._values, self._shapes, self._dtypes, strict=True)
        is_now = zip(self._where, self._now(), was, strict=True)
        return [
            where[0]
            for where, now, (value, shape, dtype) in is_now
            if now is not value or value.shape != shape or value.dtype != dtype
        ]

    def _now(self) -> list[Tensor]:
        return [module._buffers.get(key) for _, module, key in self._where]  # type: ignore[misc]


class ModuleBuffers:
    """Every buffer of the modules, by module and name, so that one that forward rebinds is followed."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._places: list[tuple[str, nn.Module, str]] = []
        seen: set[int] = set()
        for prefix, root in modules:
            for path, module in root.named_modules():
                if id(module) in seen:
                    continue
                seen.add(id(module))
                for name in module._buffers:
                    self._places.append((".".join(filter(None, (prefix, path, name))), module, name))
        self._copies: list[Tensor | None] = [None] * len(self._places)
        # By reference, not by id: forward may rebind a buffer twice between two captures, and ids are used again.
        self._seen: list[tuple[weakref.ref[Tensor], int] | None] = [None] * len(self._places)
        self._stood = [0] * len(self._places)
        self._single = list(range(len(self._places)))
        """the places of those that are copied one by one"""
        self._together = _Together(())

    def whole(self) -> dict[str, Tensor]:
        """The buffers themselves, by full name, sharded ones as such."""
        found = ((name, module._buffers.get(key)) for name, module, key in self._places)
        return {name: value for name, value in found if value is not None}

    def named(self) -> dict[str, Tensor]:
        """What this rank has of the buffers as they are, by full name."""
        return {name: local(value) for name, value in self.whole().items()}

    def capture(self) -> BufferCapture:
        """Copies as of now. A capture is never changed afterwards."""
        if not self._places:
            return _NONE
        with torch.no_grad():
            packs = self._together.copy()
            if packs is None:
                self._regroup(self._together.moved())
                packs = self._together.copy()
                assert packs is not None, "nobody has changed anything meanwhile"
            settled = [self._copy(i) for i in self._single]
        captured = BufferCapture(list(self._copies), packs)
        if any(settled):
            self._regroup()
        return captured

    def _copy(self, i: int) -> bool:
        """Copy one by itself, if need be. Whether it has stood there long enough, and need not be by itself."""
        _, module, key = self._places[i]
        value, seen = module._buffers.get(key), self._seen[i]
        if value is None:
            self._copies[i], self._seen[i], self._stood[i] = None, None, 0
            return False
        mine = local(value)
        version = 0 if mine.is_inference() else mine._version
        small, stands = nbytes(mine) <= _SMALL, seen is not None and seen[0]() is value
        if small or self._copies[i] is None or not stands or seen is None or seen[1] != version:
            self._copies[i] = mine.clone()
            self._seen[i] = (weakref.ref(value), version)
        self._stood[i] = self._stood[i] + 1 if small and stands and _plain(value) else 0
        return self._stood[i] >= _STOOD

    def _regroup(self, moved: Sequence[int] = ()) -> None:
        """Copy together what has stood still for long enough, and what was `moved` by itself again."""
        for i in moved:
            self._stood[i] = 0
        together = [i for i, count in enumerate(self._stood) if count >= _STOOD]
        self._single = [i for i, count in enumerate(self._stood) if count < _STOOD]
        self._together = _Together((i, *self._places[i][1:]) for i in together)
        for i in together:
            self._copies[i] = self._seen[i] = None

    @torch.no_grad()
    def restore(self, capture: BufferCapture) -> None:
        """Put every buffer back to what it was at `capture`."""
        for (_, module, key), saved in zip(self._places, capture.tensors(), strict=True):
            value = module._buffers.get(key)
            mine = None if value is None else local(value)
            if saved is None:
                module._buffers[key] = None
            elif mine is not None and mine.shape == saved.shape and mine.dtype == saved.dtype:
                mine.copy_(saved)
            elif is_sharded(value):
                module._buffers[key] = shard_like(value, saved.clone())
            else:
                module._buffers[key] = saved.clone()
        self._seen = [None] * len(self._places)

    def as_named(self, capture: BufferCapture) -> dict[str, Tensor]:
        return {name: c for (name, _, _), c in zip(self._places, capture.tensors(), strict=True) if c is not None}

    def from_named(self, tensors: dict[str, Tensor]) -> BufferCapture:
        """A capture from host copies by name; what a name lacks was None."""
        return BufferCapture([tensors.get(name) for name, _, _ in self._places], [])


_NONE = BufferCapture((), [])


def _shapes(tensors: list[Tensor]) -> list[torch.Size]:
    return list(map(Tensor.size, tensors))


def _dtypes(tensors: list[Tensor]) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensors]


def _plain(value: Tensor) -> bool:
    """Whether a copy of its values in a row is a copy of it."""
    return (
        type(value) is Tensor
        and value.dtype in _KINDS
        and value.layout is torch.strided
        and value.is_contiguous()
        and not (value.is_quantized or value.is_neg() or value.is_conj())
    )


def _join(tensors: list[Tensor]) -> Tensor:
    """All of one kind in one new tensor, in one operation."""
    dim = tensors[0].dim()
    if dim == 0:
        return torch.stack(tensors)
    return torch.cat(tensors if dim == 1 else [tensor.reshape(-1) for tensor in tensors])
