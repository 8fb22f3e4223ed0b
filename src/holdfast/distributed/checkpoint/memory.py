"""A tensor's own memory as bytes, to be written from and read into without a copy."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.core.base.errors import RunDirError
from holdfast.distributed.checkpoint.index import NAMES


@torch.no_grad()
def dense(name: str, value: Tensor) -> Tensor:
    """The tensor laid out row by row: itself where it is so already. RunDirError for what cannot be written as bytes."""
    if value.device.type != "cpu":
        raise RunDirError(f"{name} is on {value.device}: what is written to a checkpoint is copied to the host first")
    if value.dtype not in NAMES:
        raise RunDirError(f"{name} is {value.dtype}, which a checkpoint cannot hold: keep it as another dtype")
    return value.detach().resolve_conj().resolve_neg().contiguous()


@torch.no_grad()
def raw(value: Tensor) -> memoryview:
    """The bytes of a tensor that `dense` gave, or of one that is contiguous anyway; writable, and keeping it alive."""
    flat = value.detach().view(-1)
    if flat.numel() == 0:
        return memoryview(bytearray())
    return flat.view(torch.uint8).numpy().data
