"""Checksums of tensors, and the search for non-finite values: whether a copy can be trusted."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from holdfast.runtime.tensors.named_params import local_part
from holdfast.runtime.tensors.sharded import local
from holdfast.runtime.tensors.torch_private import sparse_coo_parts

Sums = dict[str, int]
AllowedNonfinite = Callable[[str], Tensor | None]
"""tensor name -> mask of the elements that may be NaN or Inf, or None"""
_MINMAX_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@torch.no_grad()
def checksums(tensors: dict[str, Tensor]) -> Sums:
    """Return the checksum of each tensor. Any single flipped bit changes it."""
    return {name: int(bit_checksum(value)) for name, value in tensors.items()}


@torch.no_grad()
def bit_checksum(value: Tensor) -> Tensor:
    """Return the sum over a tensor's bits, as an int64 tensor on its device. Does not wait for the device."""
    first, *others = map(_sum_words, dense_parts(value))
    return sum(others, first)


def _sum_words(value: Tensor) -> Tensor:
    """Sum 8-byte words and the remaining bytes. Depends on the values alone, so a copy has the sum of its source."""
    if value.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=value.device)
    flat = value.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    raw = flat.view(torch.uint8) if flat.dtype is not torch.bool else flat.to(torch.uint8)
    whole = raw.numel() // 8 * 8
    words, rest = raw[:whole], raw[whole:]
    if whole and words.storage_offset() % 8:
        words = words.clone()
    total = words.view(torch.int64).sum()
    return total + rest.sum(dtype=torch.int64) if rest.numel() else total


@torch.no_grad()
def first_nonfinite(tensors: dict[str, Tensor], allowed: AllowedNonfinite) -> str | None:
    """Return the first tensor whose local part holds NaN or Inf where that is not allowed, or None."""
    for name, value in ((name, local_part(value)) for name, value in tensors.items()):
        if known_finite(value):
            continue
        mask = nonfinite_mask(value)
        if mask is None:
            continue
        exempt = allowed(name)
        if exempt is not None and exempt.shape == mask.shape:
            mask &= ~exempt.to(mask.device)
        if bool(mask.any()):
            return name
    return None


def known_finite(value: Tensor) -> bool:
    """Return whether minimum and maximum prove that all values are finite: on a CPU 15 times faster than isfinite."""
    if value.device.type != "cpu" or value.dtype not in _MINMAX_DTYPES or value.layout is not torch.strided:
        return False
    return value.numel() == 0 or all(bool(torch.isfinite(v)) for v in torch.aminmax(value))


def nonfinite_mask(value: Tensor) -> Tensor | None:
    """Return which elements are NaN or Inf; None for a tensor that cannot hold them. Of a sparse one, its values count."""
    value = dense_parts(value)[-1]
    if not (value.is_floating_point() or value.is_complex()) or value.numel() == 0:
        return None
    if value.is_floating_point() and value.element_size() == 1:
        value = value.float()  # torch.isfinite does not support float8
    return ~torch.isfinite(value)


def dense_parts(value: Tensor) -> list[Tensor]:
    """Return the dense tensors that the local part of a tensor is made of, its values last."""
    value = local(value)
    if value.layout is torch.strided:
        return [value]
    if value.layout is torch.sparse_coo:
        return [*sparse_coo_parts(value)]
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [value.ccol_indices(), value.row_indices(), value.values()]
    return [value.crow_indices(), value.col_indices(), value.values()]


def nbytes(value: Tensor) -> int:
    return sum(part.nbytes for part in dense_parts(value))
