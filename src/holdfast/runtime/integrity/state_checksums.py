"""Checksum many tensors on their devices and collect the results on one. Nothing here waits for a device."""

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


class StateChecksums(NamedTuple):
    """One checksum a tensor, in the order of `names`, on one device."""

    names: list[str]
    values: Tensor
    write_counts: dict[str, tuple[int, ...] | None]
    """address and version counters that change when the program writes to a tensor; None if writes are not counted"""

    def select(self, names: Sequence[str], values: Tensor | None = None) -> Tensor:
        """Return the entries of some names, from `values` or from the checksums themselves."""
        values = self.values if values is None else values
        if list(names) == self.names:
            return values
        index = {name: n for n, name in enumerate(self.names)}
        chosen = torch.tensor([index[name] for name in names], dtype=torch.int64)
        return values.index_select(0, _move(chosen, values.device))


def checksum_state(tensors: Mapping[str, Tensor]) -> StateChecksums:
    """Checksum every tensor on its own device. Host results (step counts) move to the accelerator without waiting."""
    parts = {name: local_part(value) for name, value in tensors.items()}
    devices = list(dict.fromkeys(part.device for part in parts.values())) or [torch.device("cpu")]
    target = next((device for device in devices if device.type != "cpu"), devices[0])
    names: list[str] = []
    values = []
    for device in devices:
        on_device = {name: part for name, part in parts.items() if part.device == device}
        checksums = checksum_and_finite(on_device, finite=False)
        names += checksums.names
        values.append(_move(checksums.sums, target))
    return StateChecksums(names, torch.cat(values), {name: _count_writes(tensors[name]) for name in names})


def _count_writes(value: Tensor) -> tuple[int, ...] | None:
    """Return the address and the in-place write counts: a DTensor's own, and those of the tensor inside it."""
    inner = inner_tensor(value)
    if value.is_inference() or inner.is_inference():  # writes are not counted
        return None
    dense = inner if inner.layout is torch.strided else dense_parts(inner)[-1]
    return dense.data_ptr(), version_of(value), version_of(inner)


def name_weights(names: list[str], device: torch.device) -> Tensor:
    """Return for each name a number to add and an odd one to multiply by, which loses no bit."""
    pairs = []
    for digest in map(name_digest, names):
        offset, factor = (int.from_bytes(half, "little", signed=True) for half in (digest[:8], digest[8:]))
        pairs.append((offset, factor | 1))
    return _move(torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T.contiguous(), device)


def name_digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _move(values: Tensor, device: torch.device) -> Tensor:
    return values.to(device, non_blocking=True)
