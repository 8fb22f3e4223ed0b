"""A fingerprint of a step's batches, and the length of their sequences.

Computed when a batch is served, from at most a few kilobytes of its host tensors. Tensors on a device are not read:
reading them would wait for the device.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from holdfast.runtime.data.split import tensors_of

_MAX_TENSORS = 2
_BLOCKS, _BLOCK_BYTES = 4, 1024
"""how many blocks of a tensor are read, spread evenly, and their size"""


class BatchFingerprint:
    """The fingerprint of one step's batches, in the order they were served."""

    def __init__(self, *, fingerprint: bool) -> None:
        self._is_enabled, self._count = fingerprint, 0
        self.checksum: int | None = None
        """the fingerprint of all batches; None if one could not be read"""
        self.sequence_length: int | None = None
        """the length that all their sequences have, or None"""

    def add(self, batch: Any) -> None:
        """Add one batch."""
        tensors = [batch] if isinstance(batch, Tensor) else first_tensors(batch, _MAX_TENSORS)
        length = _sequence_length(batch, tensors)
        self.sequence_length = length if self._count == 0 or length == self.sequence_length else None
        if self._is_enabled and (self._count == 0 or self.checksum is not None):
            self.checksum = _fingerprint(tensors, self.checksum or 0)
        self._count += 1


def first_tensors(batch: Any, count: int) -> list[Tensor]:
    """Return the first tensors of a batch of any nesting."""
    if isinstance(batch, list | tuple) and all(isinstance(value, Tensor) for value in batch[:count]):
        return list(batch[:count])  # the usual batch
    return list(islice(tensors_of(batch), count))


def sequence_length(batch: Any) -> int | None:
    """Return T if the batch's "input_ids", or else its first tensor, is integers of shape (B, T); otherwise None."""
    return _sequence_length(batch, [batch] if isinstance(batch, Tensor) else first_tensors(batch, 1))


def _sequence_length(batch: Any, tensors: Sequence[Tensor]) -> int | None:
    is_mapping = not isinstance(batch, list | tuple | Tensor) and isinstance(batch, Mapping)
    named = batch.get("input_ids") if is_mapping else None
    first = named if isinstance(named, Tensor) else tensors[0] if tensors else None
    if first is None or first.dim() != 2 or first.is_floating_point() or first.is_complex():
        return None
    return None if first.dtype is torch.bool else int(first.shape[1])


def fingerprint(batch: Any, crc: int = 0) -> int | None:
    """Return a CRC over blocks of its first tensors, continued from `crc`; None if one of them is not in host memory."""
    return _fingerprint(first_tensors(batch, _MAX_TENSORS), crc)


def _fingerprint(tensors: Sequence[Tensor], crc: int) -> int | None:
    for tensor in tensors:
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
            return None
        if tensor.numel():
            crc = _checksum(tensor.detach() if tensor.requires_grad else tensor, crc)
    return crc if tensors else None


def _checksum(tensor: Tensor, crc: int) -> int:
    """Return the CRC of blocks of its bytes, uncopied. Of a non-contiguous tensor: its first and last row."""
    if not tensor.is_contiguous():
        if tensor.dim() < 2:
            return _checksum(tensor[:: max(1, tensor.numel() // _BLOCK_BYTES)].contiguous(), crc)
        return _checksum(tensor[-1].contiguous(), _checksum(tensor[0].contiguous(), crc))
    data = _bytes(tensor)
    last = len(data) - _BLOCK_BYTES
    if last <= _BLOCKS * _BLOCK_BYTES:
        return zlib.crc32(data, crc)
    for n in range(_BLOCKS):
        start = n * last // (_BLOCKS - 1)
        crc = zlib.crc32(data[start : start + _BLOCK_BYTES], crc)
    return crc


def _bytes(tensor: Tensor) -> memoryview:
    try:
        return memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]
    except (TypeError, ValueError):  # NumPy lacks the dtype (bf16), or memoryview does (complex)
        return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
