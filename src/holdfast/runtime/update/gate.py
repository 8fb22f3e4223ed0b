"""Decides whether an update is applied.

The device gate passes its veto to fused optimizers as `found_inf`, as torch.amp.GradScaler does. They then change nothing,
and the host reads the result one step later. The host gate reads the measurements first, which waits for the device, and
does not call `step()`. Both apply the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from holdfast.core.base.errors import SetupError
from holdfast.runtime.state.optimizers import Optimizers, parameters_of
from holdfast.runtime.state.scaler import Scaler
from holdfast.runtime.state.schedule import scaled_lr
from holdfast.runtime.tensors.named_params import same_objects
from holdfast.runtime.tensors.norms import ClipSpec, GradientNorms, LocalNorms
from holdfast.runtime.update.fused_measurements import FusedMeasurements, FusedPacker
from holdfast.runtime.update.measurements import (
    DeviceMeasurements,
    HostMeasurements,
    MeasurementPacker,
    PackedMeasurements,
)

_UNCHANGED = nullcontext()


class UpdateHandle:
    """Holds one update that the gate has applied or vetoed, and its measurements."""

    def __init__(
        self,
        packed: PackedMeasurements | FusedMeasurements,
        without_state: Sequence[tuple[Optimizer, Tensor]] = (),
        found_inf: dict[int, Tensor] | None = None,
    ) -> None:
        self._packed = packed
        self._without_state = without_state
        self._found_inf = found_inf or {}
        self.measurements: HostMeasurements | None = None
        """None until `read`"""

    def read(self) -> HostMeasurements:
        """Return the measurements. The first call waits for the device."""
        if self.measurements is None:
            self.measurements = self._packed.read()
        return self.measurements

    def drop_new_optimizer_state(self, *, overflow: bool) -> None:
        """Delete the optimizer state that a vetoed or overflowed step created.

        A vetoed fused SGD leaves its first momentum uninitialised; other optimizers leave zeros that a step never taken
        would not have created. An overflow concerns only the optimizers whose gradients held Inf or NaN.
        """
        for optimizer, p in self._without_state:
            if not overflow or float(self._found_inf.get(id(optimizer), 0.0)):
                optimizer.state.pop(p, None)


class Gate:
    """Applies or vetoes updates. With `armed=False` (observe mode) it measures every update and vetoes none."""

    def __init__(
        self,
        optimizers: Optimizers,
        scaler: Scaler | None,
        location: str,
        armed: bool,
        on_cuda: bool,
        *,
        norms: GradientNorms | None = None,
    ) -> None:
        if location == "device" and not optimizers.all_fused:
            names = ", ".join(type(o).__name__ for o in optimizers)
            raise SetupError(
                f'[detect] gate = "device" needs fused optimizers, and {names} is not: pass fused=True if it is '
                'offered, or set gate = "host"'
            )
        if location == "device" and len({p.device.type for p in optimizers.parameters()}) > 1:
            raise SetupError(
                '[detect] gate = "device": some trained parameters are on the CPU, where the veto would come too late; set '
                'gate = "host"'
            )
        self.on_device = location == "device" or (location == "auto" and on_cuda and optimizers.all_fused)
        self._may_move_to_host = location == "auto" and self.on_device
        self._optimizers, self._scaler, self._armed = optimizers, scaler, armed
        self._norms = norms or LocalNorms()
        self._packer, self._fused_packer = MeasurementPacker(), FusedPacker()

    def check_step_hooks(self, *, is_distributed: bool) -> str | None:
        """Move to the host if a step hook was registered since the last update, because it would also be called for vetoed
        updates. Return what to log. One of several ranks cannot move by itself; it returns a warning."""
        if not self._may_move_to_host or not self._optimizers.has_step_hooks():
            return None
        self._may_move_to_host = False
        if not is_distributed:
            self.on_device = False
            return (
                "a hook was registered on optimizer.step(): from now on the host decides whether an update is applied"
            )
        return (
            "a hook was registered on optimizer.step() after the Guard was made, and will also be called for vetoed "
            "updates: register it before, on every rank"
        )

    def apply(
        self,
        measurements: DeviceMeasurements,
        parameters: Sequence[Tensor],
        found_inf: dict[int, Tensor],
        max_norm: float | None,
        lr_factor: float,
        *,
        local_norm: Tensor | None = None,
    ) -> UpdateHandle:
        """Clip the gradients and step the optimizers unless the step is vetoed.

        `found_inf` holds the loss scaler's result by optimizer id. `local_norm` is this rank's gradient norm, if
        `measurements` holds the one that all ranks agreed on.
        """
        local_norm = measurements.grad_norm if local_norm is None else local_norm
        with torch.set_grad_enabled(False):  # entering `no_grad` takes three times as long
            packed = self._pack(measurements, max_norm)
            handle = UpdateHandle(packed, self._parameters_without_state() if self.on_device else (), found_inf)
            if not self.on_device and handle.read().flags and self._armed:
                if self._scaler is not None:
                    self._scaler.reset_after_skip()
                return handle
            if max_norm is not None:
                factor = None
                if isinstance(packed, FusedMeasurements) and local_norm is measurements.grad_norm:
                    factor = packed.clip_factor
                self._norms.clip(parameters, ClipSpec(max_norm, local_norm, measurements.grad_norm, factor))
            with self._scaled_lr(lr_factor):
                if self.on_device:
                    self._step_on_device(measurements, packed, found_inf)
                else:
                    self._step_on_host(found_inf)
        return handle

    def _pack(self, measurements: DeviceMeasurements, max_norm: float | None) -> PackedMeasurements | FusedMeasurements:
        fused = self._fused_packer.pack(measurements, max_norm) if self.on_device else None
        return self._packer.pack(measurements) if fused is None else fused

    def _step_on_host(self, found_inf: dict[int, Tensor]) -> None:
        for optimizer in self._optimizers.outer:
            flag = found_inf.get(id(optimizer))
            if flag is None or not float(flag):
                optimizer.step()
        if self._scaler is not None:
            self._scaler.update()

    def _step_on_device(
        self,
        measurements: DeviceMeasurements,
        packed: PackedMeasurements | FusedMeasurements,
        found_inf: dict[int, Tensor],
    ) -> None:
        veto: Tensor | None = None
        if self._armed:
            veto = packed.veto if isinstance(packed, FusedMeasurements) else self._packer.veto(measurements, packed)
        for optimizer in self._optimizers:
            flag = found_inf.get(id(optimizer))
            if flag is None:
                _step_unless(optimizer, veto)
            else:
                flag = flag.view(())
                _step_unless(optimizer, flag if veto is None else torch.maximum(veto, flag.to(veto.device)))
        if self._scaler is not None:
            self._scaler.update_unless_vetoed(veto)

    def _scaled_lr(self, factor: float) -> AbstractContextManager[None]:
        return _UNCHANGED if factor == 1.0 else scaled_lr(self._optimizers.param_groups(), factor)

    def _parameters_without_state(self) -> list[tuple[Optimizer, Tensor]]:
        """Return the parameters that get their first optimizer state in this step."""
        return [
            (optimizer, p)
            for optimizer in self._optimizers
            # From the second step on, state usually has exactly the parameters as its keys, in the same order.
            if not (same_objects(list(optimizer.state), parameters_of(optimizer)) and all(optimizer.state.values()))
            for p in parameters_of(optimizer)
            if p.grad is not None and not optimizer.state.get(p)
        ]


def _step_unless(optimizer: Any, found_inf: Tensor | None) -> None:
    """Call `step()` so that a fused optimizer changes nothing, step counts included, if `found_inf` is 1."""
    if found_inf is None:
        optimizer.step()
        return
    optimizer.found_inf, optimizer.grad_scale = found_inf, None
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf, optimizer.grad_scale
