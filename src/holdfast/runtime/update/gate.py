"""Whether an update lands.

On the device: fused optimizers take the veto as a tensor and leave everything alone where it is set; the host learns of it
a step later. On the host: it reads the numbers first, which waits for the device, and does not step. Both decide by the
same flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer

from holdfast.core.base.errors import SetupError
from holdfast.runtime.state.optimizers import Optimizers, parameters_of
from holdfast.runtime.state.scaler import Scaler
from holdfast.runtime.state.schedule import scaled
from holdfast.runtime.tensors.named_params import same_objects
from holdfast.runtime.tensors.norms import Clip, LocalNorms, NormAndClip
from holdfast.runtime.update.fused_measurements import Fused, FusedPacked
from holdfast.runtime.update.fused_step import FusedStep
from holdfast.runtime.update.measurements import Packed, Packing, Reading, Sensed

_AS_IT_IS = nullcontext()


class Passage:
    """One update handed to the gate: what it decided, now or when it is read."""

    def __init__(
        self,
        packed: Packed | FusedPacked,
        fresh: Sequence[tuple[Optimizer, Tensor]] = (),
        found: dict[int, Tensor] | None = None,
    ) -> None:
        self._packed = packed
        self._fresh = fresh
        self._found = found or {}
        self._reading: Reading | None = None

    def read(self) -> Reading:
        if self._reading is None:
            self._reading = self._packed.read()
        return self._reading

    def undo_first_touch(self, *, overflow: bool) -> None:
        """After a veto, or an overflow: optimizer state that this step brought into being goes again.

        Fused SGD leaves its first momentum uninitialised where it was told not to step; the others leave zeros that a
        step never taken would not have made. An overflow concerns only the optimizers that it was found for.
        """
        for optimizer, p in self._fresh:
            if not overflow or float(self._found.get(id(optimizer), 0.0)):
                optimizer.state.pop(p, None)


class Gate:
    """Lets an update through, or not. `armed` is False in observe mode: it sees everything and stops nothing."""

    def __init__(
        self,
        optimizers: Optimizers,
        scaler: Scaler | None,
        where: str,
        armed: bool,
        on_cuda: bool,
        *,
        norms: NormAndClip | None = None,
    ) -> None:
        if where == "device" and not optimizers.fused:
            names = ", ".join(type(o).__name__ for o in optimizers)
            raise SetupError(
                f'[detect] gate = "device" needs fused optimizers, and {names} is not: pass fused=True where it is '
                'offered, or set gate = "host"'
            )
        if where == "device" and len({p.device.type for p in optimizers.parameters()}) > 1:
            raise SetupError(
                '[detect] gate = "device": some of what is trained is on the CPU, where the veto would come too late; set '
                'gate = "host"'
            )
        self.on_device = where == "device" or (where == "auto" and on_cuda and optimizers.fused)
        self._chosen = where == "auto" and self.on_device
        """that it is on the device was not asked for"""
        self._optimizers, self._scaler, self._armed = optimizers, scaler, armed
        self._norms = norms or LocalNorms()
        self._packing, self._fused = Packing(), Fused()
        self._steps = [FusedStep(o, optimizers.our_hooks) for o in optimizers]
        self._nothing: Tensor | None = None

    def follow_hooks(self, *, alone: bool) -> str | None:
        """Between two updates. Somebody who has hooked into them since the beginning would hear of those that do not land:
        from here on the host decides. Of several ranks none can do so by itself; what is to be said of it."""
        if not self._chosen or not self._optimizers.hooked():
            return None
        self._chosen = False
        if alone:
            self.on_device = False
            return "a hook has been put on optimizer.step(): from here on the host decides whether an update lands"
        return (
            "a hook has been put on optimizer.step() after the Guard was made, and will also be called for updates that did "
            "not land: register it before, on every rank"
        )

    def apply(
        self,
        sensed: Sensed,
        parameters: Sequence[Tensor],
        found: dict[int, Tensor],
        max_norm: float | None,
        lr_factor: float,
        *,
        own: Tensor | None = None,
        kind: torch.dtype | None = None,
    ) -> Passage:
        """Clip and step, unless a flag says no. `found` is what the scaler found, per optimizer; `own` the gradient norm
        as this rank has it, where `sensed` holds the one that all agreed on; `kind` what all gradients are known to be."""
        own = sensed.norm if own is None else own
        with torch.set_grad_enabled(False):  # `no_grad` takes three times as long to come and go
            packed = (self._fused.pack(sensed, max_norm) if self.on_device else None) or self._packing.pack(sensed)
            passage = Passage(packed, self._fresh() if self.on_device else (), found)
            if self.on_device:
                self._on_device(packed, sensed, own, parameters, found, max_norm, lr_factor, kind)
            else:
                self._on_host(passage.read(), sensed, own, parameters, found, max_norm, lr_factor)
        return passage

    def _on_host(
        self,
        reading: Reading,
        sensed: Sensed,
        own: Tensor,
        parameters: Sequence[Tensor],
        found: dict[int, Tensor],
        max_norm: float | None,
        lr_factor: float,
    ) -> None:
        if reading.flags and self._armed:
            if self._scaler is not None:
                self._scaler.leave()
            return
        if max_norm is not None:
            self._norms.clip(parameters, Clip(max_norm, own, sensed.norm))
        with self._scaled(lr_factor):
            for optimizer in self._optimizers:
                flag = found.get(id(optimizer))
                if flag is None or not float(flag):
                    optimizer.step()
        if self._scaler is not None:
            self._scaler.update()

    def _veto(self, sensed: Sensed, packed: Packed | FusedPacked) -> Tensor:
        """1 where the update is not to land, as fused optimizers take it."""
        if self._armed:
            return packed.veto if isinstance(packed, FusedPacked) else self._packing.veto(sensed, packed)
        if self._nothing is None or self._nothing.device != sensed.loss.device:
            self._nothing = torch.zeros((), device=sensed.loss.device)
        return self._nothing

    def _on_device(
        self,
        packed: Packed | FusedPacked,
        sensed: Sensed,
        own: Tensor,
        parameters: Sequence[Tensor],
        found: dict[int, Tensor],
        max_norm: float | None,
        lr_factor: float,
        kind: torch.dtype | None,
    ) -> None:
        veto, lands, factor = self._veto(sensed, packed), None, None
        if isinstance(packed, FusedPacked):
            lands = packed.lands if self._armed else None
            factor = packed.factor if own is sensed.norm else None
        if max_norm is not None:
            self._norms.clip(parameters, Clip(max_norm, own, sensed.norm, factor))
        with self._scaled(lr_factor):
            for optimizer, step in zip(self._optimizers, self._steps, strict=True):
                flag = found.get(id(optimizer))
                if flag is None:
                    step.take(veto, lands, kind)
                else:
                    step.take(torch.maximum(veto, flag.view(()).to(veto.device)), None, kind)
        if self._scaler is not None:
            self._scaler.update_unless(veto if self._armed else None)

    def _scaled(self, lr_factor: float) -> AbstractContextManager[None]:
        return _AS_IT_IS if lr_factor == 1.0 else scaled(self._optimizers.groups(), lr_factor)

    def _fresh(self) -> list[tuple[Optimizer, Tensor]]:
        """Parameters that get their first optimizer state in this step."""
        return [
            (optimizer, p)
            for optimizer in self._optimizers
            if not _all_have_state(optimizer)
            for g in optimizer.param_groups
            for p in g["params"]
            if p.grad is not None and not optimizer.state.get(p)
        ]


def _all_have_state(optimizer: Optimizer) -> bool:
    """As it is from the second step on, in the order of the parameters; False where it takes a closer look."""
    return same_objects(list(optimizer.state), parameters_of(optimizer)) and all(optimizer.state.values())
