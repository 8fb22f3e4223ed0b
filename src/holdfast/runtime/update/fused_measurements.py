"""Measures a step, computes the veto and the clip factor in one launch, for a single process on a GPU.

In a loop that waits for the host, each of the dozen launches of `measurements` costs 10 to 30 us. Without Triton, or for
numbers that the kernel cannot read, `measurements` does it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from holdfast.runtime.tensors.norms import clip_factor
from holdfast.runtime.tensors.triton_kernels import OptionalKernel
from holdfast.runtime.update.measurements import (
    DeviceMeasurements,
    HostMeasurements,
    host_limits,
    host_measurements,
    rms_of_worst,
)
from holdfast.runtime.update.update_size import UpdateSample
from holdfast.runtime.update.veto import FLOAT32_MAX, Slot, upper_bound

_ALREADY_CURRENT = nullcontext()
_TRIED = (
    *((1.0, 1.0), (1.0, 3.0), (0.3, 1.7), (1.7, 0.3), (0.77, 12345.678), (1.0, 0.0), (5.0, 1e-42), (1e-40, 3.0)),
    *((1.0, math.inf), (math.inf, 3.0), (math.inf, math.inf), (1.0, math.nan)),
)
"""pairs of max_norm and gradient norm that the kernel is tested with when it is loaded"""


class FusedMeasurements:
    """Holds measurements that the kernel writes to the host, and the veto and clip factor on the device."""

    def __init__(
        self,
        buffer: Any,
        results: Sequence[Tensor],
        limits: tuple[float | None, float | None],
        has_scaler: bool,
        sample_counts: list[list[int]],
        spare: list[Any],
    ):
        self.veto, self.clip_factor = results
        self._buffer, self._limits, self._has_scaler = buffer, limits, has_scaler
        self._sample_counts, self._spare = sample_counts, spare

    def read(self) -> HostMeasurements:
        """Wait for the kernel. Call once: the next step reuses the buffer."""
        loss, grad_norm, found_inf, scale, *sums = self._buffer.read()
        self._spare.append(self._buffer)
        numbers = {Slot.LOSS: loss, Slot.GRAD_NORM: grad_norm}
        if self._has_scaler:
            numbers |= {Slot.FOUND_INF: found_inf, Slot.LOSS_SCALE: scale}
        return host_measurements(numbers, self._limits, rms_of_worst(sums, self._sample_counts))


class FusedPacker:
    """Launches the kernel for the steps of one run."""

    def __init__(self) -> None:
        self._spare: list[Any] = []
        self._results = torch.empty(0)
        self._result_views: Sequence[Tensor] = ()
        self._table: Any = None
        self._table_key: object = None

    def pack(self, measurements: DeviceMeasurements, max_norm: float | None = None) -> FusedMeasurements | None:
        """Begin to send the measurements to the host, compute the veto and, with `max_norm`, the clip factor. Return None,
        having done nothing, if this step is not for the kernel."""
        m, device = measurements, measurements.loss.device
        if m.update_rms is not None or m.weight_norm is not None or m.grads_differ is not None or m.extra is not None:
            return None
        if device.type != "cuda" or (kernel := KERNEL.get(device)) is None:
            return None
        limits = host_limits(m.limits)
        scaler = None if m.found_inf is None or m.loss_scale is None else (m.found_inf, m.loss_scale)
        if limits is None or (m.found_inf is None) != (m.loss_scale is None):
            return None
        if not kernel.can_read(device, m.loss, m.grad_norm, *(scaler or ())):
            return None
        samples = [] if m.update_samples is None else m.update_samples.all()
        if samples and not self._update_table(samples, device, kernel):
            return None
        if self._results.device != device:
            self._results = torch.zeros(2, device=device)
            self._result_views = self._results.unbind()
        buffer = self._spare.pop() if self._spare else kernel.StepBuffer()
        bounds = upper_bound(limits[0]), upper_bound(limits[1])
        gradients = [s.gradient for s in samples]
        try:
            with _ALREADY_CURRENT if torch.cuda.current_device() == device.index else torch.cuda.device(device):
                table = self._table if samples else None
                buffer.send(m.loss, m.grad_norm, scaler, bounds, max_norm, gradients, table, self._results)
        except Exception as error:  # a variant of the kernel that could not be built
            KERNEL.disable(error)
            return None
        counts = [] if m.update_samples is None else m.update_samples.counts
        return FusedMeasurements(buffer, self._result_views, limits, scaler is not None, counts, self._spare)

    def _update_table(self, samples: list[UpdateSample], device: torch.device, kernel: Any) -> bool:
        """Send the kernel's table of samples to the device if it has changed. Return whether the kernel can read them."""
        dtypes = {s.gradient.dtype for s in samples}, {s.moment.dtype for s in samples}
        if len(samples) > kernel.MAX_SAMPLES or len(dtypes[0]) != 1 or len(dtypes[1]) != 1:
            return False
        gradient, moment = dtypes[0].pop(), dtypes[1].pop()
        rows = [_table_row(s, device, kernel) for s in samples]
        if None in rows or not (kernel.is_known(gradient) and kernel.is_known(moment)):
            return False
        key = rows, gradient, moment, device
        if key != self._table_key:
            self._table, self._table_key = kernel.SampleTable(rows, gradient, moment, device), key
        return True


def _table_row(sample: UpdateSample, device: torch.device, kernel: Any) -> tuple[float, ...] | None:
    """Return a sample's row in the kernel's table; None if the kernel cannot read the sample."""
    moment, beta2, step = sample.moment, sample.beta2, sample.step
    if moment.device != device or isinstance(sample.group.get("eps"), Tensor):
        return None
    address, log2_beta2 = 0, 0.0
    if beta2 is not None:
        if isinstance(beta2, Tensor) or not isinstance(step, Tensor) or not kernel.can_read(device, step):
            return None
        address, log2_beta2 = step.data_ptr(), math.log2(beta2) if beta2 > 0 else -math.inf
    length = moment.shape[1]
    return moment.data_ptr(), address, moment.numel(), length, moment.stride(0), sample.floor, log2_beta2


def _load(device: torch.device) -> Any:
    from holdfast.runtime.update import measurement_kernel

    one, buffer = torch.ones((), device=device), measurement_kernel.StepBuffer()
    for max_norm, norm in _TRIED:  # the second and later ones use the launch shortcut
        measured = torch.full((), norm, device=device)
        results = torch.full((2,), 7.0, device=device)
        buffer.send(one, measured, None, (FLOAT32_MAX, 2.0), max_norm, (), None, results)
        veto, factor = results.tolist()
        expected = float(clip_factor(max_norm, measured))
        clips = factor == expected or (math.isnan(factor) and math.isnan(expected))
        if buffer.read()[Slot.LOSS] != 1.0 or veto != (0.0 if norm <= 2.0 else 1.0) or not clips:
            raise RuntimeError("the kernel returned a wrong result")
    return measurement_kernel


KERNEL = OptionalKernel(_load, "each step is measured in several launches")
