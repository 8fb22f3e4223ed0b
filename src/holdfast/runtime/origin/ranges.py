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
    """Whether a tensor holds NaN, -inf or +inf, and its largest magnitude. With NaN the two others are not looked for."""

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


def _bounds(value: Tensor) -> tuple[float, float]:
    low, high = torch.aminmax(value)
    if value.device.type == "cpu":
        return low.item(), high.item()
    both = torch.stack((low, high)).tolist()  # waits for the device once
    return both[0], both[1]


def extremes(tensor: Tensor) -> Extremes:
    """Return the extremes of a tensor. Waits for its device."""
    value = values_of(tensor)
    if value is None:
        return FINITE
    low, high = _bounds(value)
    if math.isnan(low) or math.isnan(high):
        return Extremes(True, False, False, math.inf)
    return Extremes(False, low == -math.inf, high == math.inf, max(abs(low), abs(high)))


def measure(tensor: Tensor, *, count_zeros: bool = False) -> TensorRange:
    """Return the range of a tensor; without minimum and maximum if it holds no floating-point value."""
    shape, dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    value = values_of(tensor)
    if value is None:
        return TensorRange(shape=shape, dtype=dtype)
    zeros = 1.0 - int(value.count_nonzero()) / value.numel() if count_zeros else None
    bounds = _bounds(value)
    low: float | None = bounds[0]
    high: float | None = bounds[1]
    nonfinite = 0
    if not all(map(math.isfinite, bounds)):
        finite = value[torch.isfinite(value)]
        nonfinite = value.numel() - finite.numel()
        low, high = _bounds(finite) if finite.numel() else (None, None)
    return TensorRange(shape=shape, dtype=dtype, minimum=low, maximum=high, nonfinite=nonfinite, zero_share=zeros)


def nonfinite_row_numbers(tensor: Tensor) -> list[int]:
    """Return the rows of a tensor that are not finite; none of a number."""
    if tensor.dim() == 0:
        return []
    flat = tensor.detach().reshape(tensor.shape[0], -1)
    return (~torch.isfinite(flat)).any(1).nonzero().flatten().tolist()


def memory_of(tensor: Any) -> torch.UntypedStorage | None:
    """Return the memory of a tensor's values; None if it has none of its own."""
    try:
        inner = inner_tensor(tensor)
        inner = inner if inner.layout is torch.strided else dense_parts(inner)[-1]
        return inner.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None


def storage_key(tensor: Any) -> int:
    """Return the address of a tensor's memory: equal for a tensor, its views and its detached copies; 0 without memory."""
    memory = memory_of(tensor)
    try:
        return 0 if memory is None else int(memory.data_ptr())
    except RuntimeError:
        return 0
