"""One step in numbers, on their way from where it ran to the host in one small transfer.

The numbers and the limits that come from earlier steps say everything: the host decides the flags from them, and the device,
where it does not wait for the host, decides by the very same comparisons whether anything is wrong at all. On a device every
operation costs a launch, so there are few: one puts the numbers together, three come to the veto. `sensing_fused` does all
of it in one where it can.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.core.base.types import Flag
from holdfast.runtime.tensors.cuda_streams import current_stream
from holdfast.runtime.update.update_size import UpdateSamples, UpdateSums, sense, size_of

Known = tuple[float | None, float | None]
MeasurementLimits = Known | tuple[Tensor, Tensor]
"""what the loss and the gradient norm are compared with, where there is something to compare with"""

MOST = torch.finfo(torch.float32).max
_LOSS_NONFINITE, _GRAD_NONFINITE = int(Flag.LOSS_NONFINITE), int(Flag.GRAD_NONFINITE)
_LOSS_HIGH, _GRAD_HIGH, _GRAD_DIFFERS = int(Flag.LOSS_HIGH), int(Flag.GRAD_HIGH), int(Flag.GRAD_DIFFERS)
_BY_LOSS = _LOSS_NONFINITE | _LOSS_HIGH


class HostMeasurements(NamedTuple):
    """What was sensed, as numbers."""

    loss: float
    grad_norm: float
    flags: int
    overflow: bool
    loss_scale: float | None
    update_rms: float | None = None
    weight_norm: float | None = None
    extra: Tensor | None = None


class DeviceMeasurements(NamedTuple):
    """A step's measurements, still on the device, single numbers all of them but the last."""

    loss: Tensor
    grad_norm: Tensor
    limits: MeasurementLimits
    found_inf: Tensor | None = None
    """above 0: a loss scaler found Inf or NaN among the gradients"""
    loss_scale: Tensor | None = None
    update_samples: UpdateSamples | None = None
    """what `UpdateSize.look` has found"""
    update_rms: Tensor | None = None
    """the update size, where ranks have worked it out together"""
    weight_norm: Tensor | None = None
    grads_differ: Tensor | None = None
    """whether ranks that should have the same gradient do not"""
    extra: Tensor | None = None
    """further values of float64, in a row, that travel with them"""


def reading(
    named: Mapping[str, float],
    limits: tuple[float | None, float | None],
    size: float | None,
    extra: Tensor | None = None,
) -> HostMeasurements:
    """The flags, from the numbers and what they are compared with."""
    loss, norm = named["loss"], named["norm"]
    most_loss, most_norm = limits
    flags = 0
    if not math.isfinite(loss):
        flags |= _LOSS_NONFINITE
    if not math.isfinite(norm):
        flags |= _GRAD_NONFINITE
    if most_loss is not None and loss > most_loss:
        flags |= _LOSS_HIGH
    if most_norm is not None and norm > most_norm:
        flags |= _GRAD_HIGH
    if named.get("differs"):
        flags |= _GRAD_DIFFERS
    # Under a loss scaler, a non-finite gradient with an ordinary loss is its overflow.
    overflow = named.get("found", 0.0) > 0 and not flags & _BY_LOSS
    return HostMeasurements(
        loss, norm, 0 if overflow else flags, overflow, named.get("scale"), size, named.get("weights"), extra
    )


class PackedMeasurements:
    """The numbers on their way to the host. `read` waits for them, and for nothing enqueued later."""

    def __init__(
        self,
        values: Tensor,
        names: list[str],
        limits: Known | None,
        update: UpdateSums | None,
        extra: int,
        spare: list[_Place],
    ) -> None:
        self.values = values
        """where the step ran, the loss and the norm first"""
        self.limits = limits
        """as the device compares with them; None where they travel with the numbers"""
        self._names, self._update, self._extra, self._spare = names, update, extra, spare
        self._host = values
        self._place: _Place | None = None
        if values.is_cuda:
            self._place = place = _take(spare, values)
            self._host = place.memory
            place.memory.copy_(values, non_blocking=True)
            place.event.record(current_stream(values.device))  # which need not be the current device

    def read(self) -> HostMeasurements:
        """Once: the memory serves another step then."""
        if self._place is not None:
            self._place.event.synchronize()
        own = len(self._host) - self._extra  # what ranks brought beside it is thousands of numbers, and read elsewhere
        host = self._host[:own].tolist()
        extra = self._host[own:].clone() if self._extra else None
        if self._place is not None:
            self._spare.append(self._place)
        named = dict(zip(self._names, host, strict=False))
        numbers = host[len(self._names) :]
        size = named.get("update_rms") if self._update is None else size_of(numbers, self._update.elements)
        return reading(named, self.limits or (named["most_loss"], named["most_norm"]), size, extra)


class MeasurementPacker:
    """Puts a run's numbers together, step after step, in memory that is used again. Nothing of it has a graph."""

    def __init__(self) -> None:
        self._spare: list[_Place] = []
        self._edges: tuple[object, tuple[Tensor, Tensor]] | None = None

    def pack(self, sensed: DeviceMeasurements) -> PackedMeasurements:
        """Send them to the host."""
        agreed, limits = compared_with(sensed.limits)
        # Single numbers of torch's default kind fit into four bytes; what ranks have agreed on, and sums, take eight.
        wide = agreed is not None or sensed.extra is not None
        kind, home = (torch.float64 if wide else torch.float32), sensed.loss.device
        numbers = {
            "loss": sensed.loss.float(),
            "norm": sensed.grad_norm.float(),
            "found": sensed.found_inf,
            "scale": sensed.loss_scale,
            "update_rms": sensed.update_rms,
            "weights": sensed.weight_norm,
            "differs": sensed.grads_differ,
            "most_loss": None if agreed is None else agreed[0],
            "most_norm": None if agreed is None else agreed[1],
        }
        names = [name for name, value in numbers.items() if value is not None]
        parts = [v.to(home, kind).view(1) for v in numbers.values() if v is not None]
        sampled = None if sensed.update_samples is None else sense(sensed.update_samples)
        if sampled is not None:
            parts += [part.to(home, kind) for part in sampled.parts]
        if sensed.extra is not None:
            parts.append(sensed.extra.to(home))
        extra = 0 if sensed.extra is None else len(sensed.extra)
        return PackedMeasurements(torch.cat(parts), names, limits, sampled, extra, self._spare)

    def veto(self, sensed: DeviceMeasurements, packed: PackedMeasurements) -> Tensor:
        """1.0 where a flag will be set, 0.0 elsewhere, on the device."""
        values = packed.values[:2]
        if sensed.found_inf is not None:  # a norm that the scaler has found out about is not for us
            found = sensed.found_inf.to(values.device).view(1) > 0
            values = torch.cat([values[:1], values[1:].masked_fill(found, -MOST)])
        low, high = self._edges_of(sensed, packed, values)
        # What is not what it is cut down to is too high, or not finite; NaN is never what it is.
        bad = torch.ne(torch.clamp(values, low, high), values, out=torch.empty_like(values, dtype=torch.float32))
        veto = torch.amax(bad)
        if sensed.grads_differ is not None:
            veto = torch.maximum(veto, sensed.grads_differ.to(veto.device, veto.dtype))
        return veto

    def _edges_of(
        self, sensed: DeviceMeasurements, packed: PackedMeasurements, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What loss and norm may be at least, to be finite, and at most. Sent once, until the limits change."""
        agreed, _ = compared_with(sensed.limits)
        if agreed is not None:
            high = torch.stack([each.to(values.device, values.dtype).view(()) for each in agreed]).clamp(max=MOST)
            return torch.full_like(high, -MOST), high
        key = packed.limits, values.dtype, values.device
        if self._edges is None or self._edges[0] != key:
            most = [MOST if limit is None else min(limit, MOST) for limit in packed.limits or ()]
            there = torch.tensor([[-MOST, -MOST], most], dtype=values.dtype, pin_memory=values.is_cuda)
            low, high = there.to(values.device, non_blocking=True).unbind()
            self._edges = key, (low, high)
        return self._edges[1]


def compared_with(limits: MeasurementLimits) -> tuple[tuple[Tensor, Tensor] | None, Known | None]:
    """What ranks have agreed on, where the step ran; or what the host knows, as the device will compare with it."""
    loss, norm = limits
    if isinstance(loss, Tensor) and isinstance(norm, Tensor):
        return (loss, norm), None
    assert not isinstance(loss, Tensor) and not isinstance(norm, Tensor)
    return None, (_single(loss), _single(norm))


class _Place(NamedTuple):
    """Pinned memory for one step's numbers."""

    memory: Tensor
    event: torch.cuda.Event


def _take(spare: list[_Place], values: Tensor) -> _Place:
    for n, place in enumerate(spare):
        if place.memory.shape == values.shape and place.memory.dtype == values.dtype:
            return spare.pop(n)
    memory = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return _Place(memory, torch.cuda.Event())  # type: ignore[no-untyped-call]


def _single(limit: float | None) -> float | None:
    """In four bytes."""
    try:
        return None if limit is None else float(struct.unpack("f", struct.pack("f", limit))[0])
    except OverflowError:
        return math.copysign(math.inf, limit or 1.0)
