"""What a step's batches look like from outside: a fingerprint of their content, and the length of their sequences.

Read when a batch is handed out, from tensors in host memory, a few kilobytes of each at most. What lies on a device is
left alone: looking at it would wait for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from holdfast.runtime.data.split import tensors_of

_TENSORS = 2
_BLOCKS, _BYTES = 4, 1024
"""stretches looked at, spread over a tensor, and how long each is"""


class BatchFingerprint:
    """One step's batches, in the order they were handed out."""

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
        """The fingerprint of all of them; None where one could not be looked at."""
        return self._crc if self._count else None

    @property
    def sequence_length(self) -> int | None:
        """The length that all their sequences have, or None."""
        return next(iter(self._lengths)) if len(self._lengths) == 1 else None


def sequence_length(batch: Any) -> int | None:
    """T where the batch is sequences of whole numbers, shaped (B, T): its "input_ids", or its first tensor."""
    if isinstance(batch, Tensor):
        first: Tensor | None = batch
    else:
        plain = isinstance(batch, list | tuple)
        named = batch.get("input_ids") if not plain and isinstance(batch, Mapping) else None
        first = named if isinstance(named, Tensor) else next(tensors_of(batch), None)
    if first is None or first.dim() != 2 or first.is_floating_point() or first.is_complex():
        return None
    return None if first.dtype is torch.bool else int(first.shape[1])


def fingerprint(batch: Any, crc: int = 0) -> int | None:
    """A checksum of parts of its first tensors, going on from `crc`; None where one of them is not in host memory."""
    seen = 0
    for tensor in tensors_of(batch):
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
            return None
        if tensor.numel():
            crc = _checksum(tensor.detach() if tensor.requires_grad else tensor, crc)
        seen += 1
        if seen == _TENSORS:
            break
    return crc if seen else None


def _checksum(tensor: Tensor, crc: int) -> int:
    """Over stretches of its bytes, which are not copied; of a tensor that is not contiguous, its first and last row."""
    if not tensor.is_contiguous():
        if tensor.dim() < 2:
            return _checksum(tensor[:: max(1, tensor.numel() // _BYTES)].contiguous(), crc)
        return _checksum(tensor[-1].contiguous(), _checksum(tensor[0].contiguous(), crc))
    data = _bytes(tensor)
    last = len(data) - _BYTES
    if last <= _BLOCKS * _BYTES:
        return zlib.crc32(data, crc)
    for n in range(_BLOCKS):
        start = n * last // (_BLOCKS - 1)
        crc = zlib.crc32(data[start : start + _BYTES], crc)
    return crc


def _bytes(tensor: Tensor) -> memoryview:
    try:
        return memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]
    except (TypeError, ValueError):  # numpy has no such type (bf16), or memoryview has none (complex)
        return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
