"""Sums over the bits of many tensors, taken where they lie and brought together. Nothing here waits for a device."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.runtime.tensors.checksum import checksum_and_finite
from holdfast.runtime.tensors.inspect import dense_parts
from holdfast.runtime.tensors.named_params import local_part
from holdfast.runtime.tensors.torch_private import inner_tensor, version_of


class Sums(NamedTuple):
    """One sum a tensor, in the order of `names`, together on one device."""

    names: list[str]
    values: Tensor
    stamps: dict[str, tuple[int, ...] | None]
    """what moves when the program writes to a tensor; None where nothing would"""

    def of(self, names: Sequence[str]) -> Tensor:
        return self.pick(self.values, names)

    def pick(self, values: Tensor, names: Sequence[str]) -> Tensor:
        """Of one value for each of `self.names`, those of some of them."""
        if list(names) == self.names:
            return values
        place = {name: index for index, name in enumerate(self.names)}
        chosen = torch.tensor([place[name] for name in names], dtype=torch.int64)
        return values.index_select(0, _move(chosen, values.device))


def sums_of(tensors: Mapping[str, Tensor]) -> Sums:
    """Where most of the state lies on a device, what lies on the host (step counts) is sent there, without waiting."""
    parts = {name: local_part(value) for name, value in tensors.items()}
    devices = list(dict.fromkeys(part.device for part in parts.values())) or [torch.device("cpu")]
    home = next((device for device in devices if device.type != "cpu"), devices[0])
    names: list[str] = []
    values = []
    for device in devices:
        here = parts if len(devices) == 1 else {name: part for name, part in parts.items() if part.device == device}
        seen = checksum_and_finite(here, finite=False)
        names += seen.names
        values.append(_move(seen.sums, home))
    return Sums(names, torch.cat(values), {name: _stamp(tensors[name]) for name in names})


def _stamp(value: Tensor) -> tuple[int, ...] | None:
    """Where it lies, and the counts of writes in place: a DTensor's own, and that of the tensor inside it."""
    inner = inner_tensor(value)
    if value.is_inference() or inner.is_inference():  # writes are not counted
        return None
    where = inner if inner.layout is torch.strided else dense_parts(inner)[-1]
    return where.data_ptr(), version_of(value), version_of(inner)


def weights(names: list[str], device: torch.device) -> Tensor:
    """For each name a number to add, and an odd one to multiply with: that loses no bit."""
    pairs = []
    for each in map(digest, names):
        add, times = (int.from_bytes(half, "little", signed=True) for half in (each[:8], each[8:]))
        pairs.append((add, times | 1))
    return _move(torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T.contiguous(), device)


def digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _move(values: Tensor, device: torch.device) -> Tensor:
    return values.to(device, non_blocking=True)
