"""The rule that vetoes an update, for the host and in torch operations. `measurement_kernel` applies it in Triton.

A step is vetoed if its loss or gradient norm is not finite or exceeds its limit. It is also vetoed if ranks that should have
the same gradient do not. If the loss scaler found Inf or NaN, it handles the gradients itself, and only the loss counts.
Limits are never NaN, and one below the smallest finite value counts as that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum

import torch
from torch import Tensor

from holdfast.core.base.types import Flag

FLOAT32_MAX = torch.finfo(torch.float32).max
"""a value is finite if it is between this and its negative: measurements are float32"""


class Slot(IntEnum):
    """The place of each number in a step's packed measurements. The kernel reads and writes the first six."""

    LOSS = 0
    GRAD_NORM = 1
    FOUND_INF = 2
    LOSS_SCALE = 3
    LOSS_LIMIT = 4
    GRAD_NORM_LIMIT = 5
    GRADS_DIFFER = 6
    UPDATE_RMS = 7
    WEIGHT_NORM = 8


_LOSS_NONFINITE, _GRAD_NONFINITE = int(Flag.LOSS_NONFINITE), int(Flag.GRAD_NONFINITE)
_LOSS_HIGH, _GRAD_HIGH, _GRAD_DIFFERS = int(Flag.LOSS_HIGH), int(Flag.GRAD_HIGH), int(Flag.GRAD_DIFFERS)


def flags_on_host(
    numbers: Mapping[Slot, float], loss_limit: float | None, grad_norm_limit: float | None
) -> tuple[int, bool]:
    """Return the step's flags, and whether the loss scaler's overflow is all that is wrong. Any flag vetoes the update."""
    flags = 0
    for slot, limit, nonfinite, high in (
        (Slot.LOSS, loss_limit, _LOSS_NONFINITE, _LOSS_HIGH),
        (Slot.GRAD_NORM, grad_norm_limit, _GRAD_NONFINITE, _GRAD_HIGH),
    ):
        value = numbers[slot]
        if not math.isfinite(value):
            flags |= nonfinite
        if limit is not None and value > max(limit, -FLOAT32_MAX):
            flags |= high
    if numbers.get(Slot.GRADS_DIFFER):
        flags |= _GRAD_DIFFERS
    overflow = numbers.get(Slot.FOUND_INF, 0.0) > 0 and not flags & (_LOSS_NONFINITE | _LOSS_HIGH)
    return (0 if overflow else flags), overflow


def upper_bound(limit: float | None) -> float:
    """Return the largest finite value that does not exceed the limit."""
    return FLOAT32_MAX if limit is None else min(max(limit, -FLOAT32_MAX), FLOAT32_MAX)


def bounds_on_device(limits: tuple[float | None, float | None], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest acceptable loss and gradient norm, with the device and dtype of `like`."""
    rows = [[-FLOAT32_MAX] * 2, [upper_bound(limit) for limit in limits]]
    bounds = torch.tensor(rows, dtype=like.dtype, pin_memory=like.is_cuda)
    low, high = bounds.to(like.device, non_blocking=True).unbind()
    return low, high


def veto_on_device(
    values: Tensor, bounds: tuple[Tensor, Tensor], found_inf: Tensor | None, grads_differ: Tensor | None
) -> Tensor:
    """Return 1.0 if the step is to be vetoed, else 0.0, in few launches. `values` holds the loss and the gradient norm."""
    # clamp(x) != x if and only if x exceeds its limit or is not finite; NaN never equals itself.
    bad = torch.ne(torch.clamp(values, *bounds), values, out=torch.empty_like(values, dtype=torch.float32))
    of_gradient = bad[Slot.GRAD_NORM]
    if grads_differ is not None:
        torch.maximum(of_gradient, grads_differ.to(bad.device, bad.dtype), out=of_gradient)
    if found_inf is not None:
        of_gradient.masked_fill_(found_inf.to(bad.device).view(()) > 0, 0.0)
    return torch.amax(bad)
