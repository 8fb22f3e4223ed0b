"""Views a tensor's memory as bytes, to write from it and read into it without a copy."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.core.base.errors import RunDirError
from holdfast.distributed.checkpoint.rank_index import DTYPE_NAMES


@torch.no_grad()
def to_contiguous(name: str, value: Tensor) -> Tensor:
    """Return the tensor in row-major order, without a copy if possible. RunDirError if it cannot be written as bytes."""
    if value.device.type != "cpu":
        raise RunDirError(f"{name} is on {value.device}, but only tensors on the host can be written: copy it first")
    if value.dtype not in DTYPE_NAMES:
        raise RunDirError(f"{name} is {value.dtype}, which a checkpoint cannot hold: convert it to another dtype")
    return value.detach().resolve_conj().resolve_neg().contiguous()


@torch.no_grad()
def byte_view(value: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor. The view is writable and keeps the tensor's memory alive."""
    flat = value.detach().view(-1)
    if flat.numel() == 0:
        return memoryview(bytearray())
    return flat.view(torch.uint8).numpy().data
