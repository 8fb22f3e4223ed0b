"""Sends one step's measurements from the device to the host in one small transfer.

Every operation on a device costs a launch, so there are few: one packs the numbers, three compute the veto.
`fused_measurements` does all of it in one launch if it can.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.runtime.update.update_size import UpdateSamples, sums_of_squares
from holdfast.runtime.update.veto import FLOAT32_MAX, Slot, bounds_on_device, flags_on_host, veto_on_device

HostLimits = tuple[float | None, float | None]
MeasurementLimits = HostLimits | tuple[Tensor, Tensor]
"""limits of the loss and of the gradient norm; tensors if ranks have agreed on them, on the device"""


class HostMeasurements(NamedTuple):
    """Holds one step's measurements on the host."""

    loss: float
    grad_norm: float
    flags: int
    overflow: bool
    loss_scale: float | None
    update_rms: float | None = None
    weight_norm: float | None = None
    extra: Tensor | None = None


class DeviceMeasurements(NamedTuple):
    """Holds one step's measurements as tensors on the device, all but `update_samples` and `extra` of one element."""

    loss: Tensor
    grad_norm: Tensor
    limits: MeasurementLimits
    found_inf: Tensor | None = None
    """above 0 if the loss scaler found Inf or NaN among the gradients"""
    loss_scale: Tensor | None = None
    update_samples: UpdateSamples | None = None
    """the sampled update of a single process"""
    update_rms: Tensor | None = None
    """the update size that all ranks computed together"""
    weight_norm: Tensor | None = None
    grads_differ: Tensor | None = None
    """whether ranks that should have the same gradient do not"""
    extra: Tensor | None = None
    """a row of further float64 values for the host"""


def host_measurements(
    numbers: Mapping[Slot, float], limits: HostLimits, update_rms: float | None, extra: Tensor | None = None
) -> HostMeasurements:
    """Return the measurements with the flags that follow from them."""
    flags, overflow = flags_on_host(numbers, *limits)
    loss, grad_norm, scale = numbers[Slot.LOSS], numbers[Slot.GRAD_NORM], numbers.get(Slot.LOSS_SCALE)
    weight_norm = numbers.get(Slot.WEIGHT_NORM)
    return HostMeasurements(loss, grad_norm, flags, overflow, scale, update_rms, weight_norm, extra)


def rms_of_worst(sums: Sequence[float], counts: Sequence[Sequence[int]]) -> float | None:
    """Return the update size of the optimizer with the largest; NaN if one is NaN. None if nothing was sampled."""
    worst, start = None, 0
    for elements in counts:
        total = sum(sums[start : start + len(elements)])
        start += len(elements)
        rms = math.sqrt(total / sum(elements)) if total >= 0 else math.nan
        worst = rms if worst is None or not rms <= worst else worst
    return worst


class PackedMeasurements:
    """Holds measurements that are being copied to the host."""

    def __init__(
        self,
        values: Tensor,
        slots: list[Slot],
        limits: HostLimits | None,
        sample_counts: list[list[int]] | None,
        extra: int,
        spare: list[_PinnedCopy],
    ) -> None:
        self.values = values
        """on the device: the numbers by slot, the sums of the samples, `extra` further values"""
        self.limits = limits
        """as the device compares with them; None if they are among the numbers"""
        self._slots, self._sample_counts, self._extra, self._spare = slots, sample_counts, extra, spare
        self._pinned: _PinnedCopy | None = None
        if values.is_cuda:
            self._pinned = _take(spare, values)
            self._pinned.memory.copy_(values, non_blocking=True)
            self._pinned.event.record(torch.cuda.current_stream(values.device))  # not the current device's

    def read(self) -> HostMeasurements:
        """Wait for the copy, not for work queued later. Call once: the next step reuses the pinned memory."""
        host = self.values
        if self._pinned is not None:
            self._pinned.event.synchronize()
            host = self._pinned.memory
        end = len(host) - self._extra
        numbers = host[:end].tolist()
        extra = host[end:].clone() if self._extra else None
        if self._pinned is not None:
            self._spare.append(self._pinned)
        named = {slot: numbers[slot] for slot in self._slots}
        rms = named.get(Slot.UPDATE_RMS)
        if self._sample_counts is not None:
            rms = rms_of_worst(numbers[len(Slot) :], self._sample_counts)
        limits = self.limits or (named[Slot.LOSS_LIMIT], named[Slot.GRAD_NORM_LIMIT])
        return host_measurements(named, limits, rms, extra)


class MeasurementPacker:
    """Packs the measurements of a run's steps into memory that it reuses. Runs without gradients."""

    def __init__(self) -> None:
        self._spare: list[_PinnedCopy] = []
        self._absent = torch.zeros(1)
        self._bounds: tuple[object, tuple[Tensor, Tensor]] | None = None

    def pack(self, measurements: DeviceMeasurements) -> PackedMeasurements:
        """Begin the copy to the host."""
        m, agreed = measurements, agreed_limits(measurements.limits)
        # float32 holds one process's numbers. Limits that ranks have agreed on, and checksums, need float64.
        dtype = torch.float32 if agreed is None and m.extra is None else torch.float64
        device = m.loss.device
        by_slot = {
            Slot.LOSS: m.loss.float(),
            Slot.GRAD_NORM: m.grad_norm.float(),
            Slot.FOUND_INF: m.found_inf,
            Slot.LOSS_SCALE: m.loss_scale,
            Slot.LOSS_LIMIT: None if agreed is None else agreed[0],
            Slot.GRAD_NORM_LIMIT: None if agreed is None else agreed[1],
            Slot.GRADS_DIFFER: m.grads_differ,
            Slot.UPDATE_RMS: m.update_rms,
            Slot.WEIGHT_NORM: m.weight_norm,
        }
        if self._absent.device != device or self._absent.dtype is not dtype:
            self._absent = torch.zeros(1, dtype=dtype, device=device)
        tensors = [by_slot[slot] for slot in Slot]
        parts = [self._absent if t is None else t.to(device, dtype).view(1) for t in tensors]
        if m.update_samples is not None:
            for sums in sums_of_squares(m.update_samples):
                parts.append(sums.to(device, dtype))
        if m.extra is not None:
            parts.append(m.extra.to(device))
        return PackedMeasurements(
            torch.cat(parts),
            [slot for slot in Slot if by_slot[slot] is not None],
            host_limits(m.limits),
            None if m.update_samples is None else m.update_samples.counts,
            0 if m.extra is None else len(m.extra),
            self._spare,
        )

    def veto(self, measurements: DeviceMeasurements, packed: PackedMeasurements) -> Tensor:
        """Return 1.0 if the step will have a flag, else 0.0, on the device."""
        values = packed.values[:2]
        agreed = agreed_limits(measurements.limits)
        if agreed is not None:
            high = torch.stack([limit.to(values.device, values.dtype).view(()) for limit in agreed])
            high.clamp_(-FLOAT32_MAX, FLOAT32_MAX)
            bounds = torch.full_like(high, -FLOAT32_MAX), high
        else:  # sent to the device only when they change
            assert packed.limits is not None
            key = packed.limits, values.dtype, values.device
            if self._bounds is None or self._bounds[0] != key:
                self._bounds = key, bounds_on_device(packed.limits, values)
            bounds = self._bounds[1]
        return veto_on_device(values, bounds, measurements.found_inf, measurements.grads_differ)


def agreed_limits(limits: MeasurementLimits) -> tuple[Tensor, Tensor] | None:
    """Return the limits that ranks have agreed on, on the device; None if the host knows the limits."""
    loss, grad_norm = limits
    return (loss, grad_norm) if isinstance(loss, Tensor) and isinstance(grad_norm, Tensor) else None


def host_limits(limits: MeasurementLimits) -> HostLimits | None:
    """Return the limits known to the host, rounded to float32 as the device compares with them."""
    loss, grad_norm = limits
    if isinstance(loss, Tensor) or isinstance(grad_norm, Tensor):
        return None
    return _round_to_float32(loss), _round_to_float32(grad_norm)


def _round_to_float32(limit: float | None) -> float | None:
    try:
        return None if limit is None else float(struct.unpack("f", struct.pack("f", limit))[0])
    except OverflowError:
        return math.copysign(math.inf, limit or 1.0)


class _PinnedCopy(NamedTuple):
    """Holds pinned memory for one step's numbers, and the event after their copy."""

    memory: Tensor
    event: torch.cuda.Event


def _take(spare: list[_PinnedCopy], values: Tensor) -> _PinnedCopy:
    for n, pinned in enumerate(spare):
        if pinned.memory.shape == values.shape and pinned.memory.dtype == values.dtype:
            return spare.pop(n)
    memory = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return _PinnedCopy(memory, torch.cuda.Event())  # type: ignore[no-untyped-call]
