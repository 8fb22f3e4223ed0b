"""Listens to a loop that keeps its own lines: `loss.backward()`, `optimizer.step()`, `scaler.step(optimizer)`.

While the guard is open, these methods ask the engine. Optimizer and scaler get an attribute of their own; `Tensor.backward`
is replaced for the process, because a loss has no owner. So is `Accelerator.backward`, which divides and scales the loss.
Accelerate's and Fabric's optimizers call `step` of the optimizer or of the scaler inside them. `Fabric.clip_gradients` does
not raise for gradients that are not finite: the guard does not let them land. Closing the guard puts everything back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from holdfast.core.base.errors import StepError
from holdfast.runtime.guard.loop import DrivenLoop
from holdfast.runtime.state.optimizers import Optimizers
from holdfast.runtime.tensors.torch_private import note_step_called


class ReplacedMethods:
    """Replaces methods of the user's objects and classes until `restore`."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def __len__(self) -> int:
        return len(self._before)

    def replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        self._before.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, method)

    def restore(self) -> None:
        """Put the methods back, the newest first."""
        while self._before:
            owner, name, before = self._before.pop()
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


class OwnLines:
    """Replaces the methods of a loop's own lines from `open` to `close`."""

    def __init__(self, loop: DrivenLoop, optimizers: Optimizers, scaler: GradScaler | None) -> None:
        self._loop, self._optimizers, self._scaler = loop, optimizers, scaler
        self._methods = ReplacedMethods()
        self._is_updating = self._is_counted = False
        self._handle: Any = None

    def open(self, count_step: Callable[..., None] | None) -> None:
        """Replace the methods; or, with `count_step`, only have the steps counted: the guard is switched off."""
        (optimizer,) = self._optimizers.outer
        if count_step is not None:
            self._handle = optimizer.register_step_post_hook(count_step)
            return
        self._methods.replace(optimizer, "step", self._step(optimizer, optimizer.step))
        if self._scaler is not None:
            self._methods.replace(self._scaler, "step", self._scaler_step(self._scaler.step))
            self._methods.replace(self._scaler, "update", self._scaler_update(self._scaler.update))
        self._methods.replace(Tensor, "backward", self._backward(Tensor.backward))
        accelerator = getattr(sys.modules.get("accelerate"), "Accelerator", None)
        if accelerator is not None:
            self._methods.replace(accelerator, "backward", self._accelerator_backward(accelerator.backward))
        for package in ("lightning.fabric", "lightning_fabric"):
            fabric = getattr(sys.modules.get(package), "Fabric", None)
            if fabric is not None:
                self._methods.replace(fabric, "clip_gradients", self._fabric_clip(fabric.clip_gradients))
        self._loop.finds_clip = True

    def close(self) -> None:
        """Put the methods back."""
        if self._handle is not None:
            self._handle.remove()
        self._methods.restore()

    def _update(self) -> None:
        self._is_updating = True
        try:
            self._loop.update()
        finally:
            self._is_updating = False

    def _step(self, optimizer: Optimizer, plain: Callable[..., Any]) -> Callable[..., Any]:
        def step(closure: Any = None) -> Any:
            if self._optimizers.allows_step:
                return plain()
            if closure is not None:
                raise StepError("optimizer.step(closure): a step that evaluates the loss again cannot be guarded")
            note_step_called(optimizer)
            self._update()
            return None

        return update_wrapper(step, plain)  # with the mark by which a scheduler knows that steps are counted

    def _scaler_step(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if optimizer not in self._optimizers.all:
                return plain(optimizer, *args, **kwargs)
            self._update()
            return None

        return step

    def _scaler_update(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def update(new_scale: Any = None) -> None:
            if self._is_updating or new_scale is not None:  # otherwise the update has moved the scale already
                plain(new_scale)

        return update

    def _backward(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            result = plain(tensor, *args, **kwargs)
            is_loss = tensor.numel() == 1 and tensor.dtype.is_floating_point
            if self._loop.is_in_step and is_loss and not self._is_counted:
                value = tensor.detach().reshape(())
                scale = None if self._scaler is None else self._scaler.get_scale()
                self._loop.add_backward(value if scale is None else value / scale)
            return result

        return backward

    def _accelerator_backward(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def backward(accelerator: Any, loss: Tensor, **kwargs: Any) -> Any:
            self._is_counted = True
            try:
                result = plain(accelerator, loss, **kwargs)
            finally:
                self._is_counted = False
            if self._loop.is_in_step:
                self._loop.add_loss(loss)
                if accelerator.sync_gradients:  # the last part of a step: the gradients are whole
                    self._loop.measure()
            return result

        return backward

    def _fabric_clip(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def clip_gradients(fabric: Any, *args: Any, **kwargs: Any) -> Any:
            # It raises by default; the guard does not let such an update land.
            if self._loop.is_in_step and len(args) < 6:
                kwargs["error_if_nonfinite"] = False
            return plain(fabric, *args, **kwargs)

        return clip_gradients
