"""Buffers that forward changes (BatchNorm, routers, amax): kept from the start of a step, so it can be undone.

A vetoed step has still moved them. Copies are taken before every step, on the device, in stream order. Large buffers
that have not changed since the last copy share it; small ones are copied always, because a write through `.data` leaves
no trace in the version counter.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from holdfast.runtime.sharded import around, is_sharded, local
from holdfast.runtime.snapshots.certify import nbytes

_SMALL = 64 * 1024

Capture = list[Tensor | None]


class Buffers:
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
        self._copies: Capture = [None] * len(self._places)
        # By reference, not by id: forward may rebind a buffer twice between two captures, and ids are used again.
        self._seen: list[tuple[weakref.ref[Tensor], int] | None] = [None] * len(self._places)

    def whole(self) -> dict[str, Tensor]:
        """The buffers themselves, by full name, sharded ones as such."""
        found = ((name, module._buffers.get(key)) for name, module, key in self._places)
        return {name: value for name, value in found if value is not None}

    def named(self) -> dict[str, Tensor]:
        """What this rank has of the buffers as they are, by full name."""
        return {name: local(value) for name, value in self.whole().items()}

    @torch.no_grad()
    def capture(self) -> Capture:
        """Copies as of now. A capture is never changed afterwards."""
        for i, (_, module, key) in enumerate(self._places):
            value = module._buffers.get(key)
            if value is None:
                self._copies[i], self._seen[i] = None, None
                continue
            mine = local(value)
            version = 0 if mine.is_inference() else mine._version
            seen = self._seen[i]
            same = seen is not None and seen[0]() is value and seen[1] == version
            if self._copies[i] is None or not same or nbytes(mine) <= _SMALL:
                self._copies[i] = mine.clone()
                self._seen[i] = (weakref.ref(value), version)
        return list(self._copies)

    @torch.no_grad()
    def restore(self, capture: Capture) -> None:
        """Put every buffer back to what it was at `capture`."""
        for (_, module, key), saved in zip(self._places, capture, strict=True):
            value = module._buffers.get(key)
            mine = None if value is None else local(value)
            if saved is None:
                module._buffers[key] = None
            elif mine is not None and mine.shape == saved.shape and mine.dtype == saved.dtype:
                mine.copy_(saved)
            elif is_sharded(value):
                module._buffers[key] = around(value, saved.clone())
            else:
                module._buffers[key] = saved.clone()
        self._seen = [None] * len(self._places)

    def as_named(self, capture: Capture) -> dict[str, Tensor]:
        return {name: c for (name, _, _), c in zip(self._places, capture, strict=True) if c is not None}

    def from_named(self, tensors: dict[str, Tensor]) -> Capture:
        """A capture from host copies by name; what a name lacks was None."""
        return [tensors.get(name) for name, _, _ in self._places]
