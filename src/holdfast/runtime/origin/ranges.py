"""The values of a tensor in numbers. Nothing here draws random numbers or changes a tensor."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.core.origin.report import TensorRange
from holdfast.runtime.tensors.inspect import dense_parts
from holdfast.runtime.tensors.torch_private import inner_tensor


class Extremes(NamedTuple):
    """Whether a tensor holds NaN, -inf or +inf, and its largest magnitude (infinite with any of them)."""

    nan: bool
    minus: bool
    plus: bool
    largest: float

    @property
    def is_finite(self) -> bool:
        return not (self.nan or self.minus or self.plus)


FINITE = Extremes(False, False, False, 0.0)


def values_of(tensor: Tensor) -> Tensor | None:
    """Return the floating-point values of this rank's part as a plain tensor; None if it has none."""
    if not isinstance(tensor, Tensor) or tensor.device.type == "meta":
        return None
    inner = inner_tensor(tensor).detach()
    value = inner if inner.layout is torch.strided else dense_parts(inner)[-1]
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    if not value.is_floating_point() or value.numel() == 0:
        return None
    return value.float() if value.element_size() == 1 else value  # no reductions of float8


@torch.no_grad()
def extremes(tensor: Tensor) -> Extremes:
    """Return the extremes of a tensor. Waits for its device."""
    value = values_of(tensor)
    if value is None:
        return FINITE
    low, high = torch.stack(torch.aminmax(value)).tolist()
    if math.isnan(low) or math.isnan(high):
        return Extremes(True, bool((value == -math.inf).any()), bool((value == math.inf).any()), math.inf)
    return Extremes(False, low == -math.inf, high == math.inf, max(abs(low), abs(high)))


@torch.no_grad()
def measure(tensor: Tensor, *, count_zeros: bool = False) -> TensorRange:
    """Return the range of a tensor; without minimum and maximum if it holds no floating-point value."""
    shape, dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    value = values_of(tensor)
    if value is None:
        return TensorRange(shape=shape, dtype=dtype)
    zeros = 1.0 - int(value.count_nonzero()) / value.numel() if count_zeros else None
    low, high = torch.stack(torch.aminmax(value)).tolist()
    nonfinite = 0
    if not (math.isfinite(low) and math.isfinite(high)):
        finite = value[torch.isfinite(value)]
        nonfinite = value.numel() - finite.numel()
        low, high = torch.stack(torch.aminmax(finite)).tolist() if finite.numel() else (None, None)
    return TensorRange(shape=shape, dtype=dtype, minimum=low, maximum=high, nonfinite=nonfinite, zero_share=zeros)


def storage_key(tensor: Any) -> int:
    """Return the address of a tensor's memory: equal for a tensor, its views and its detached copies."""
    try:
        inner = inner_tensor(tensor)
        inner = inner if inner.layout is torch.strided else dense_parts(inner)[-1]
        return int(inner.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # a tensor without memory of its own
        return 0
