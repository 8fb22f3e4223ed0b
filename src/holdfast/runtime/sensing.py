"""One step in numbers, packed into one small tensor where the step ran.

Loss, gradient norm, flags and overflow travel together, so that the host reads once. The flags are decided here, with
limits that come from earlier steps: what they say is the truth, on every device alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from holdfast.core.engine import Limits
from holdfast.core.types import Flag


class Reading(NamedTuple):
    """What the packed tensor says, as numbers."""

    loss: float
    grad_norm: float
    flags: int
    overflow: bool
    loss_scale: float | None
    update_rms: float | None = None
    weight_norm: float | None = None


class Sensed(NamedTuple):
    """A step's measurements, still on the device."""

    loss: Tensor
    norm: Tensor
    flags: Tensor
    overflow: Tensor
    scale: Tensor | None
    update: Tensor | None = None
    weights: Tensor | None = None


@torch.no_grad()
def gradient_norm(parameters: Sequence[Tensor]) -> Tensor:
    """The total norm, exactly as `clip_grad_norm_` computes it."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not any(g.is_sparse for g in gradients):
        return get_total_norm(gradients)
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    return get_total_norm(dense)


@torch.no_grad()
def weight_norm(parameters: Sequence[Tensor], home: torch.device) -> Tensor | None:
    """The norm of all of them together, on `home`; None where there are none."""
    return get_total_norm(parameters).to(home) if parameters else None


@torch.no_grad()
def clip(parameters: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """The second half of `clip_grad_norm_`, with the norm that was sensed."""
    if any(p.grad is not None and p.grad.is_sparse for p in parameters):
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for p in parameters:
            if p.grad is not None:
                p.grad.mul_(factor.to(p.grad.device))
    else:
        clip_grads_with_norm_(parameters, max_norm, norm)


@torch.no_grad()
def sense(loss: Tensor, norm: Tensor, limits: Limits, found_inf: Tensor | None, scale: Tensor | None) -> Sensed:
    """Flags from the numbers. Under a loss scaler, a non-finite gradient with an ordinary loss is its overflow."""
    loss, norm = loss.float(), norm.float().to(loss.device)
    flags = (~torch.isfinite(loss)).int() * int(Flag.LOSS_NONFINITE)
    flags = flags + (~torch.isfinite(norm)).int() * int(Flag.GRAD_NONFINITE)
    if limits.loss is not None:
        flags = flags + (loss > limits.loss).int() * int(Flag.LOSS_HIGH)
    if limits.grad_norm is not None:
        flags = flags + (norm > limits.grad_norm).int() * int(Flag.GRAD_HIGH)
    overflow = torch.zeros_like(flags, dtype=torch.bool)
    if found_inf is not None:
        by_loss = int(Flag.LOSS_NONFINITE | Flag.LOSS_HIGH)
        overflow = (found_inf.to(loss.device) > 0) & ((flags & by_loss) == 0)
        flags = torch.where(overflow, torch.zeros_like(flags), flags)
    return Sensed(loss, norm, flags, overflow, None if scale is None else scale.detach().to(loss.device).clone())


class Packed:
    """The numbers on their way to the host. `read` waits for them, and for nothing enqueued later."""

    @torch.no_grad()
    def __init__(self, sensed: Sensed) -> None:
        parts = [sensed.loss, sensed.norm, sensed.flags, sensed.overflow]
        others = {"loss_scale": sensed.scale, "update_rms": sensed.update, "weight_norm": sensed.weights}
        self._others = [name for name, part in others.items() if part is not None]
        parts += [part for part in others.values() if part is not None]
        packed = torch.stack([p.double().reshape(()) for p in parts])
        self._event: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host = packed

    def read(self) -> Reading:
        if self._event is not None:
            self._event.synchronize()
        values = self._host.tolist()
        others = {"loss_scale": None, **dict(zip(self._others, values[4:], strict=True))}
        return Reading(values[0], values[1], int(values[2]), bool(values[3]), **others)
