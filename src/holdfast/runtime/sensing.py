"""One step in numbers, packed into one small tensor where the step ran.

Loss, gradient norm, flags and overflow travel together, so that the host reads once. The flags are decided here, with
limits that come from earlier steps: what they say is the truth, on every device alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.core.types import Flag

Edge = Tensor | float | None
Edges = tuple[Edge, Edge]
"""what the loss and the gradient norm are compared with, where there is something to compare with"""


class Reading(NamedTuple):
    """What the packed tensor says, as numbers."""

    loss: float
    grad_norm: float
    flags: int
    overflow: bool
    loss_scale: float | None
    update_rms: float | None = None
    weight_norm: float | None = None
    extra: Tensor | None = None


class Sensed(NamedTuple):
    """A step's measurements, still on the device."""

    loss: Tensor
    norm: Tensor
    flags: Tensor
    overflow: Tensor
    scale: Tensor | None
    update: Tensor | None = None
    weights: Tensor | None = None
    extra: Tensor | None = None
    """further values of float64, in a row, that travel with them"""


@torch.no_grad()
def sense(
    loss: Tensor,
    norm: Tensor,
    limits: Edges,
    found_inf: Tensor | None,
    scale: Tensor | None,
    differs: Tensor | None = None,
) -> Sensed:
    """Flags from the numbers. Under a loss scaler, a non-finite gradient with an ordinary loss is its overflow."""
    loss, norm = loss.float(), norm.float().to(loss.device)
    most_loss, most_norm = limits
    flags = (~torch.isfinite(loss)).int() * int(Flag.LOSS_NONFINITE)
    flags = flags + (~torch.isfinite(norm)).int() * int(Flag.GRAD_NONFINITE)
    if most_loss is not None:
        flags = flags + (loss > most_loss).int() * int(Flag.LOSS_HIGH)
    if most_norm is not None:
        flags = flags + (norm > most_norm).int() * int(Flag.GRAD_HIGH)
    if differs is not None:
        flags = flags + differs.int() * int(Flag.GRAD_DIFFERS)
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
        self._own = len(parts)
        if sensed.extra is not None:
            packed = torch.cat([packed, sensed.extra])
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
        values = self._host[: self._own].tolist()
        others: dict[str, float | None] = {"loss_scale": None, **dict(zip(self._others, values[4:], strict=True))}
        extra = self._host[self._own :] if len(self._host) > self._own else None
        return Reading(values[0], values[1], int(values[2]), bool(values[3]), **others, extra=extra)
