"""Captures the buffers that forward changes (BatchNorm, routers, amax) before every step, so that a step can be undone.

A vetoed step has already changed them. Copies are made on the device, in stream order. Large buffers that have not
changed since the last copy share it. Small ones are always copied, because a write through `.data` does not move the
version counter. Small ones that stay in place are copied together, one kernel for each dtype.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor, nn

from holdfast.runtime.state.wrappers import full_name, named_modules
from holdfast.runtime.tensors.inspect import nbytes
from holdfast.runtime.tensors.sharded import is_sharded, local
from holdfast.runtime.tensors.torch_private import own_buffers, shard_like, version_of

_SMALL_BYTES = 64 * 1024
_STABLE_CAPTURES = 4
"""captures in a row with the same small buffer in a place, before it is copied together with others"""
_JOINABLE_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
"""dtypes that torch.cat joins without changing a bit"""


_NORMALIZATIONS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


class BufferPack(NamedTuple):
    """Buffers of one dtype that are copied into one tensor: their indices and shapes."""

    indices: list[int]
    shapes: list[torch.Size]


PackedCopies = list[tuple[BufferPack, Tensor]]
Places = list[tuple[str, nn.Module, str]]
"""full name, module, and name within the module, of each buffer"""


class BufferCapture:
    """Holds copies of all buffers at one moment. They are never changed afterwards."""

    def __init__(self, places: Places, single: Sequence[Tensor | None], packs: PackedCopies) -> None:
        self.places, self._single, self._packs = places, single, packs

    def tensors(self) -> list[Tensor | None]:
        """Return one tensor for each buffer, None for one that was None. Those copied together share memory."""
        tensors = list(self._single)
        for (indices, shapes), joined in self._packs:
            pieces = torch.split(joined.view(-1), [shape.numel() for shape in shapes])
            for index, piece, shape in zip(indices, pieces, shapes, strict=True):
                tensors[index] = piece.view(shape)
        return tensors


class _StableBuffers:
    """Small buffers that stay in place. They are copied together, one tensor for each device and dtype."""

    def __init__(self, places: Iterable[tuple[int, nn.Module, str]]) -> None:
        groups: dict[tuple[torch.device, torch.dtype, int], list[tuple[int, nn.Module, str]]] = {}
        for index, module, key in places:
            value = own_buffers(module)[key]
            assert value is not None
            groups.setdefault((value.device, value.dtype, min(2, value.dim())), []).append((index, module, key))
        self.places = [place for group in groups.values() for place in group]
        self._values = self._current()
        self._shapes, self._dtypes = _shapes(self._values), _dtypes(self._values)
        self._packs: list[tuple[BufferPack, list[Tensor]]] = []
        start = 0
        for group in groups.values():
            members = slice(start, start + len(group))
            self._packs.append((BufferPack([i for i, _, _ in group], self._shapes[members]), self._values[members]))
            start += len(group)

    def copy(self) -> PackedCopies | None:
        """Return copies; None if one was replaced, or its shape or dtype changed through `.data`."""
        if not self._packs:
            return []
        values = self._values
        is_same = all(map(is_, self._current(), values))
        if not is_same or _shapes(values) != self._shapes or _dtypes(values) != self._dtypes:
            return None
        return [(pack, _join(tensors)) for pack, tensors in self._packs]

    def changed(self) -> list[int]:
        """Return the indices of buffers that were replaced, or whose shape or dtype changed."""
        before = zip(self._values, self._shapes, self._dtypes, strict=True)
        return [
            index
            for (index, _, _), now, (value, shape, dtype) in zip(self.places, self._current(), before, strict=True)
            if now is not value or value.shape != shape or value.dtype != dtype
        ]

    def _current(self) -> list[Tensor]:
        return [own_buffers(module).get(key) for _, module, key in self.places]  # type: ignore[misc]


class ModuleBuffers:
    """All buffers of the modules, found by module and name, so that one that forward rebinds is followed."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._modules = list(modules)
        self._watch(_find_places(self._modules))

    def find_new(self) -> dict[str, Tensor]:
        """Look for modules that were added or removed since, and return the buffers that were not watched before."""
        before, places = {name for name, _, _ in self.places}, _find_places(self._modules)
        if [place[1:] for place in places] != [place[1:] for place in self.places]:
            self._watch(places)
        return {name: value for name, value in self.named().items() if name not in before}

    def _watch(self, places: Places) -> None:
        """Capture the buffers in these places from now on. Captures made before keep theirs."""
        self.places = places
        self._copies: list[Tensor | None] = [None] * len(self.places)
        # By reference, not by id: forward may rebind a buffer twice between two captures, and ids are reused.
        self._copied_from: list[tuple[weakref.ref[Tensor], int] | None] = [None] * len(self.places)
        """the buffer each copy was made of, and its version"""
        self._unchanged = [0] * len(self.places)
        """captures in a row that found the same small buffer"""
        self._single = list(range(len(self.places)))
        """the buffers that are copied one by one"""
        self._stable = _StableBuffers(())
        self.running_variances = [
            index
            for index, (_, module, key) in enumerate(self.places)
            if isinstance(module, _NORMALIZATIONS) and key == "running_var"
        ]
        """the running statistics that normalize in evaluation"""

    def named_whole(self) -> dict[str, Tensor]:
        """Return the buffers by full name, sharded ones as DTensors."""
        named = ((name, own_buffers(module).get(key)) for name, module, key in self.places)
        return {name: value for name, value in named if value is not None}

    def named(self) -> dict[str, Tensor]:
        """Return this rank's parts of the buffers by full name."""
        return {name: local(value) for name, value in self.named_whole().items()}

    def capture(self) -> BufferCapture:
        """Return copies of all buffers as they are now."""
        if not self.places:
            return NO_BUFFERS
        with torch.no_grad():
            packs = self._stable.copy()
            if packs is None:
                self._regroup(self._stable.changed())
                packs = self._stable.copy()
                assert packs is not None
            became_stable = [self._copy_single(i) for i in self._single]
        captured = BufferCapture(self.places, list(self._copies), packs)
        if any(became_stable):
            self._regroup()
        return captured

    def _copy_single(self, i: int) -> bool:
        """Copy one buffer if needed. Returns whether it has been in place long enough to be copied with others."""
        _, module, key = self.places[i]
        value, copied_from = own_buffers(module).get(key), self._copied_from[i]
        if value is None:
            self._copies[i], self._copied_from[i], self._unchanged[i] = None, None, 0
            return False
        part = local(value)
        version = version_of(part)
        is_small, is_same = nbytes(part) <= _SMALL_BYTES, copied_from is not None and copied_from[0]() is value
        if is_small or self._copies[i] is None or not is_same or copied_from is None or copied_from[1] != version:
            self._copies[i] = part.clone()
            self._copied_from[i] = (weakref.ref(value), version)
        self._unchanged[i] = self._unchanged[i] + 1 if is_small and is_same and _is_joinable(value) else 0
        return self._unchanged[i] >= _STABLE_CAPTURES

    def _regroup(self, changed: Sequence[int] = ()) -> None:
        """Copy together what has been in place long enough, and what `changed` one by one again."""
        for i in changed:
            self._unchanged[i] = 0
        stable = [i for i, count in enumerate(self._unchanged) if count >= _STABLE_CAPTURES]
        self._single = [i for i, count in enumerate(self._unchanged) if count < _STABLE_CAPTURES]
        self._stable = _StableBuffers((i, *self.places[i][1:]) for i in stable)
        for i in stable:
            self._copies[i] = self._copied_from[i] = None

    @torch.no_grad()
    def restore(self, capture: BufferCapture) -> None:
        """Restore every buffer of `capture` to its value there."""
        for (_, module, key), saved in zip(capture.places, capture.tensors(), strict=True):
            value = own_buffers(module).get(key)
            part = None if value is None else local(value)
            if saved is None:
                own_buffers(module)[key] = None
            elif part is not None and part.shape == saved.shape and part.dtype == saved.dtype:
                part.copy_(saved)
            elif is_sharded(value):
                own_buffers(module)[key] = shard_like(value, saved.clone())
            else:
                own_buffers(module)[key] = saved.clone()
        self._copied_from = [None] * len(self.places)

    @torch.no_grad()
    def largest_growth(self, before: BufferCapture, after: BufferCapture) -> tuple[float, str]:
        """Return how many times larger a running variance became, of the one that grew most, and its name."""
        old, new = before.tensors(), after.tensors()
        pairs = [(old[i], new[i], self.places[i][0]) for i in self.running_variances]
        growths = [
            (b.float().norm() / a.float().norm(), name) for a, b, name in pairs if a is not None and b is not None
        ]
        return max(((float(growth), name) for growth, name in growths), default=(0.0, ""))

    def as_named(self, capture: BufferCapture) -> dict[str, Tensor]:
        """Return the copies of a capture by full name, without those that were None."""
        return {name: c for (name, _, _), c in zip(capture.places, capture.tensors(), strict=True) if c is not None}

    def from_named(self, tensors: dict[str, Tensor]) -> BufferCapture:
        """Invert `as_named`: a name that is missing was None."""
        return BufferCapture(self.places, [tensors.get(name) for name, _, _ in self.places], [])


NO_BUFFERS = BufferCapture([], (), [])


def _find_places(modules: Iterable[tuple[str, nn.Module]]) -> Places:
    places: Places = []
    seen: set[int] = set()
    for path, module in named_modules(modules):
        if id(module) not in seen:
            seen.add(id(module))
            places += [(full_name(path, name), module, name) for name in own_buffers(module)]
    return places


def _shapes(tensors: list[Tensor]) -> list[torch.Size]:
    return list(map(Tensor.size, tensors))


def _dtypes(tensors: list[Tensor]) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensors]


def _is_joinable(value: Tensor) -> bool:
    """Return whether the values in a row are a copy of the tensor."""
    return (
        type(value) is Tensor
        and value.dtype in _JOINABLE_DTYPES
        and value.layout is torch.strided
        and value.is_contiguous()
        and not (value.is_quantized or value.is_neg() or value.is_conj())
    )


def _join(tensors: list[Tensor]) -> Tensor:
    """Copy all into one new tensor, in one operation."""
    dim = tensors[0].dim()
    if dim == 0:
        return torch.stack(tensors)
    return torch.cat(tensors if dim == 1 else [tensor.reshape(-1) for tensor in tensors])
