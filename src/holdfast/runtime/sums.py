"""Sums over the bits of many tensors, taken where they lie and brought together. Nothing here waits for a device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.runtime.sharded import local
from holdfast.runtime.snapshots.certify import fingerprint, strided


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
    parts = {name: local(value) for name, value in tensors.items()}
    devices = list(dict.fromkeys(part.device for part in parts.values())) or [torch.device("cpu")]
    home = next((device for device in devices if device.type != "cpu"), devices[0])
    names: list[str] = []
    values = [torch.zeros(0, dtype=torch.int64, device=home)]
    for device in devices:
        for here, sums in _of_one_device({name: part for name, part in parts.items() if part.device == device}):
            names += here
            values.append(_move(sums, home))
    return Sums(names, torch.cat(values), {name: _stamp(tensors[name], parts[name]) for name in names})


def _of_one_device(parts: dict[str, Tensor]) -> Iterator[tuple[list[str], Tensor]]:
    """Single numbers, of which optimizers have one a parameter, at one stroke; then the others."""
    rest = dict(parts)
    for dtype, word in ((torch.float32, torch.int32), (torch.int64, torch.int64)):
        numbers = [name for name, part in rest.items() if part.dim() == 0 and part.dtype is dtype]
        if numbers:
            yield numbers, torch.stack([rest.pop(name) for name in numbers]).view(word).to(torch.int64)
    if rest:
        yield list(rest), torch.stack([_sum(part) for part in rest.values()])


def _sum(part: Tensor) -> Tensor:
    """`fingerprint`, by the shortest way where the memory allows it: launching costs more than summing."""
    size = part.element_size()
    words = part.layout is torch.strided and part.is_contiguous() and part.numel() > 0
    if words and part.numel() * size % 8 == part.storage_offset() * size % 8 == 0 and part.dtype.is_floating_point:
        return part.view(-1).view(torch.int64).sum()
    return fingerprint(part)


def _stamp(value: Tensor, part: Tensor) -> tuple[int, ...] | None:
    """Where it lies, and the counts of writes in place: a DTensor's own, and that of the tensor inside it."""
    try:
        inner = getattr(value, "_local_tensor", value)
        return strided(part)[-1].data_ptr(), value._version, inner._version
    except RuntimeError:  # made in inference mode: writes are not counted
        return None


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
