"""Whether a copy may be trusted: finite everywhere it should be, and unchanged since it was made."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Sums = dict[str, int]
Intended = Callable[[str], Tensor | None]


@torch.no_grad()
def checksums(tensors: dict[str, Tensor]) -> Sums:
    """A sum over the bits of each tensor: any single flipped bit changes it."""
    return {name: _sum(value) for name, value in tensors.items()}


def _sum(value: Tensor) -> int:
    if value.numel() == 0:
        return 0
    flat = value.contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    raw = flat.view(torch.uint8) if flat.dtype is not torch.bool else flat.to(torch.uint8)
    if raw.numel() % 4 == 0 and raw.storage_offset() % 4 == 0:
        raw = raw.view(torch.int32)
    return int(raw.sum(dtype=torch.int64))


@torch.no_grad()
def first_nonfinite(tensors: dict[str, Tensor], intended: Intended) -> str | None:
    """The first tensor that holds NaN or Inf where it should not."""
    for name, value in tensors.items():
        if not (value.is_floating_point() or value.is_complex()) or value.numel() == 0:
            continue
        bad = ~torch.isfinite(value)
        allowed = intended(name)
        if allowed is not None and allowed.shape == bad.shape:
            bad &= ~allowed.to(bad.device)
        if bool(bad.any()):
            return name
    return None
