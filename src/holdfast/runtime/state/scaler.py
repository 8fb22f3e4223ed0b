"""Drives a GradScaler so that it sees overflows only: a veto of the gate never changes the loss scale.

`scaler.step` would overwrite the gate's `found_inf`, and a veto would halve the scale. So the guard unscales, reads what the
scaler found, steps the optimizers itself, and calls `update` with the scaler's own findings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from holdfast.runtime.tensors.torch_private import ScalerInternals


class Scaler:
    """Drives a scaler through a step: `scale`, `unscale`, then `update` or `reset_after_skip`."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self._internals = ScalerInternals(scaler)

    def scale(self, loss: Tensor) -> Tensor:
        return self._scaler.scale(loss)

    def get_scale(self) -> float:
        """Return the scale as a number. Waits for the device."""
        return float(self._scaler.get_scale())

    def scale_tensor(self) -> Tensor | None:
        """Return the scale on its device; None before the first loss."""
        return self._internals.scale

    def unscale(self, optimizers: list[Optimizer]) -> dict[int, Tensor]:
        """Unscale every gradient in place, unless the loop has. Return found_inf by optimizer id: 1.0 if its gradients held
        Inf or NaN."""
        found_inf: dict[int, Tensor] = {}
        for optimizer in optimizers:
            if not any(p.grad is not None for g in optimizer.param_groups for p in g["params"]):
                continue
            if not self.is_unscaled([optimizer]):
                self._scaler.unscale_(optimizer)
            flags = list(self._internals.found_inf_per_device(id(optimizer)).values())
            assert self._internals.scale is not None, "unscale_ has made it"
            device = self._internals.scale.device
            # A copy: `update` adds the other optimizers' flags to the first one in place.
            total = flags[0].to(device, copy=True)
            for flag in flags[1:]:
                total = torch.maximum(total, flag.to(device))  # not a sum: fused optimizers need exactly 1
            found_inf[id(optimizer)] = total
        return found_inf

    def is_unscaled(self, optimizers: list[Optimizer]) -> bool:
        """Return whether the gradients of one of the optimizers are unscaled since the last update."""
        return any(self._internals.found_inf_per_device(id(optimizer)) for optimizer in optimizers)

    @torch.no_grad()
    def set_found_inf(self, found_inf: dict[int, Tensor]) -> None:
        """Replace this rank's findings by what all ranks found, by optimizer id, for the next `update`. An optimizer without
        gradients on this rank may have them on another."""
        for key, agreed in found_inf.items():
            flags, scale = self._internals.found_inf_per_device(key), self._internals.scale
            if not flags and scale is not None:
                flags[scale.device] = torch.zeros_like(scale)
            for flag in flags.values():
                flag.copy_(agreed)

    def update(self) -> None:
        """Change the scale as torch does: lower it after an overflow, raise it after enough steps without one."""
        if self._internals.has_found_inf():
            self._scaler.update()

    def reset_after_skip(self) -> None:
        """Clear what `unscale_` recorded, and keep the scale and its growth count: the step was skipped."""
        if self._internals.scale is not None:
            self._scaler.update(self._internals.scale.clone())

    @torch.no_grad()
    def update_unless_vetoed(self, veto: Tensor | None) -> None:
        """Call `reset_after_skip` if the veto is not 0, else `update`, decided on the device."""
        scale = self._internals.scale
        if veto is None or scale is None:
            self.update()
            return
        tensors = scale, self._internals.growth_tracker
        before = [tensor.clone() for tensor in tensors]
        self.update()
        vetoed = veto.to(tensors[0].device) > 0
        for tensor, old in zip(tensors, before, strict=True):
            torch.where(vetoed, old, tensor, out=tensor)

    @torch.no_grad()
    def split_state(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Copy the scaler's tensors into `tensors`, and return the rest of its state."""
        if self._internals.scale is None:
            return {"state": self._scaler.state_dict()}
        tensors["scaler.scale"] = self._internals.scale.clone()
        tensors["scaler.growth_tracker"] = self._internals.growth_tracker.clone()
        return {}

    def find_mismatch(self, rest: dict[str, Any], tensors: Mapping[str, Tensor]) -> str | None:
        """Return why a GradScaler cannot have saved this; None if it can."""
        if "state" in rest:
            state, now = rest["state"], self._scaler.state_dict()
            is_whole = isinstance(state, dict) and now.keys() == state.keys()
            is_whole = is_whole and all(isinstance(value, int | float) for value in state.values())
        else:
            names = ("scaler.scale", "scaler.growth_tracker")
            is_whole = all(name in tensors and tensors[name].numel() == 1 for name in names)
        return None if is_whole else "the state of the GradScaler is incomplete"

    @torch.no_grad()
    def restore_state(self, rest: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        scale = self._internals.scale
        if "state" in rest:
            state = rest["state"]
            if scale is None:
                self._scaler.load_state_dict(state)
            else:
                scale.fill_(state["scale"])
                self._internals.growth_tracker.fill_(state["_growth_tracker"])
            return
        if scale is None:  # in a new process, before the first loss
            scale = self._internals.make_scale()
        scale.copy_(tensors["scaler.scale"])
        self._internals.growth_tracker.copy_(tensors["scaler.growth_tracker"])
