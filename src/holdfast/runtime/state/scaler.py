"""The GradScaler, driven so that it sees overflow only: a veto of ours never moves the loss scale.

`scaler.step` would overwrite a `found_inf` of ours, and through its own state a veto would halve the scale. So the guard
unscales, reads what the scaler found, steps the optimizers itself, and lets `update` see the scaler's own findings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer


class Scaler:
    """One step's dealings with a scaler: `scale`, `unscale`, then `update` or `reset_after_skip`."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler: Any = scaler

    def scale(self, loss: Tensor) -> Tensor:
        return self._scaler.scale(loss)  # type: ignore[no-any-return]

    def get_scale(self) -> float:
        """The scale as a number. Waits for the device."""
        return float(self._scaler.get_scale())

    def scale_tensor(self) -> Tensor:
        return self._scaler._scale  # type: ignore[no-any-return]

    def unscale(self, optimizers: list[Optimizer]) -> dict[int, Tensor]:
        """Unscale every gradient in place; per optimizer, by id, whether it held Inf or NaN."""
        found: dict[int, Tensor] = {}
        for optimizer in optimizers:
            if not any(p.grad is not None for g in optimizer.param_groups for p in g["params"]):
                continue
            self._scaler.unscale_(optimizer)
            flags = list(self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
            home = self._scaler._scale.device
            total = flags[0].to(home, copy=True)  # `update` adds the other optimizers' to the first one in place
            for flag in flags[1:]:
                total = torch.maximum(total, flag.to(home))  # optimizers take 1 for a veto, and nothing else
            found[id(optimizer)] = total
        return found

    @torch.no_grad()
    def set_found_inf(self, found: dict[int, Tensor]) -> None:
        """What all ranks found, by optimizer as `unscale` says it, takes the place of what this one did: `update` goes by
        it. An optimizer that had no gradients here has them elsewhere."""
        for key, agreed in found.items():
            flags = self._scaler._per_optimizer_states[key]["found_inf_per_device"]
            if not flags:
                flags[self._scaler._scale.device] = torch.zeros_like(self._scaler._scale)
            for flag in flags.values():
                flag.copy_(agreed)

    def update(self) -> None:
        """As torch does it: back off after an overflow, grow after enough steps without."""
        if any(state["found_inf_per_device"] for state in self._scaler._per_optimizer_states.values()):
            self._scaler.update()

    def reset_after_skip(self) -> None:
        """As if the step had not been: the scale and its growth count stay. Still clears what `unscale_` recorded."""
        if self._scaler._scale is not None:
            self._scaler.update(self._scaler._scale.clone())

    @torch.no_grad()
    def update_unless_vetoed(self, veto: Tensor | None) -> None:
        """`reset_after_skip` where the veto is not 0, `update` elsewhere, decided on the device."""
        if veto is None:
            self.update()
            return
        own = self._scaler._scale, self._scaler._growth_tracker
        before = [each.clone() for each in own]
        self.update()
        vetoed = veto.to(own[0].device) > 0
        for each, was in zip(own, before, strict=True):
            torch.where(vetoed, was, each, out=each)

    @torch.no_grad()
    def split_state(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        if self._scaler._scale is None:
            return {"state": self._scaler.state_dict()}
        tensors["scaler.scale"] = self._scaler._scale.clone()
        tensors["scaler.growth_tracker"] = self._scaler._growth_tracker.clone()
        return {}

    @torch.no_grad()
    def restore_state(self, rest: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if "state" in rest:
            state = rest["state"]
            if self._scaler._scale is None:
                self._scaler.load_state_dict(state)
            else:
                self._scaler._scale.fill_(state["scale"])
                self._scaler._growth_tracker.fill_(state["_growth_tracker"])
            return
        if self._scaler._scale is None:
            # In a new process the scaler makes its tensors at the first loss; they are needed before it.
            self._scaler._lazy_init_scale_growth_tracker(torch.device(self._scaler._device))
        self._scaler._scale.copy_(tensors["scaler.scale"])
        self._scaler._growth_tracker.copy_(tensors["scaler.growth_tracker"])
