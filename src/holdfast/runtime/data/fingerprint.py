"""A fingerprint of a step's batches, and the length of their sequences.

Computed when a batch is served, from at most a few kilobytes of its host tensors. Tensors on a device are not read:
reading them would wait for the device.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
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
        self._crc: int | None = 0 if fingerprint else None
        self._count = 0
        self._lengths: set[int | None] = set()

    def add(self, batch: Any) -> None:
        self._count += 1
        self._lengths.add(sequence_length(batch))
        if self._crc is not None:
            self._crc = fingerprint(batch, self._crc)

    @property
    def checksum(self) -> int | None:
        """The fingerprint of all batches; None if one could not be read."""
        return self._crc if self._count else None

    @property
    def sequence_length(self) -> int | None:
        """The length that all their sequences have, or None."""
        return next(iter(self._lengths)) if len(self._lengths) == 1 else None


def sequence_length(batch: Any) -> int | None:
    """Return T if the batch's "input_ids", or else its first tensor, is integers of shape (B, T); otherwise None."""
    if isinstance(batch, Tensor):
        first: Tensor | None = batch
    else:
        is_mapping = not isinstance(batch, list | tuple) and isinstance(batch, Mapping)
        named = batch.get("input_ids") if is_mapping else None
        first = named if isinstance(named, Tensor) else next(tensors_of(batch), None)
    if first is None or first.dim() != 2 or first.is_floating_point() or first.is_complex():
        return None
    return None if first.dtype is torch.bool else int(first.shape[1])


def fingerprint(batch: Any, crc: int = 0) -> int | None:
    """Return a CRC over blocks of its first tensors, continued from `crc`; None if one of them is not in host memory."""
    count = 0
    for tensor in tensors_of(batch):
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
            return None
        if tensor.numel():
            crc = _checksum(tensor.detach() if tensor.requires_grad else tensor, crc)
        count += 1
        if count == _MAX_TENSORS:
            break
    return crc if count else None


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
