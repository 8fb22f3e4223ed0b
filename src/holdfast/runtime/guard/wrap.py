"""Listens to a loop that keeps its own lines: `loss.backward()`, `optimizer.step()`, `scaler.step(optimizer)`.

While the guard is open, these methods ask the engine. Optimizer and scaler get an attribute of their own; `Tensor.backward`
and `torch.autograd.backward` are replaced for the process, because a loss has no owner. So is `Accelerator.backward`, which
divides and scales the loss. Accelerate's and Fabric's optimizers call `step` of the optimizer or of the scaler inside them.
`Fabric.clip_gradients` does not raise for gradients that are not finite: the guard does not let them land. Closing the guard
puts everything back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

import torch
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
        self._missed = missed = set[str]()
        """not empty if the optimizer was stepped before the guard was opened. The hook holds nothing else"""
        self._before_open = optimizers.outer[0].register_step_post_hook(lambda *_: missed.add("step"))

    def pop_missed_updates(self) -> bool:
        """Return whether the optimizer was stepped, since the last call, while nothing asked the guard."""
        found = bool(self._missed)
        self._missed.clear()
        return found

    def open(self, count_step: Callable[..., None] | None) -> None:
        """Replace the methods; or, with `count_step`, only have the steps counted: the guard is switched off."""
        (optimizer,) = self._optimizers.outer
        self._before_open.remove()
        if count_step is not None:
            self._handle = optimizer.register_step_post_hook(count_step)
            return
        self._methods.replace(optimizer, "step", self._step(optimizer, optimizer.step))
        if self._scaler is not None:
            self._methods.replace(self._scaler, "step", self._scaler_step(self._scaler.step))
            self._methods.replace(self._scaler, "update", self._scaler_update(self._scaler.update))
        self._methods.replace(Tensor, "backward", self._backward(Tensor.backward))
        self._methods.replace(torch.autograd, "backward", self._autograd_backward(torch.autograd.backward))
        accelerator = getattr(sys.modules.get("accelerate"), "Accelerator", None)
        if accelerator is not None:
            self._methods.replace(accelerator, "backward", self._accelerator_backward(accelerator.backward))
        for package in ("lightning.fabric", "lightning_fabric"):
            fabric = getattr(sys.modules.get(package), "Fabric", None)
            if fabric is not None:
                self._methods.replace(fabric, "clip_gradients", self._fabric_clip(fabric.clip_gradients))
        self._loop.finds_clip = True
        self._loop.keep_gradients()

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
        evaluates_once = type(optimizer).__module__.startswith("torch.optim.")

        def step(closure: Any = None) -> Any:
            if self._optimizers.allows_step:
                return plain()
            if closure is not None and not evaluates_once:
                raise StepError(
                    f"{type(optimizer).__name__}.step(closure): it may evaluate the loss again after an update; call the "
                    "closure before optimizer.step(), or use an optimizer of torch.optim"
                )
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            note_step_called(optimizer)
            self._update()
            return loss

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

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Count no backward inside: those of the call in progress, and of checkpointed layers."""
        self._is_counted = True
        try:
            yield
        finally:
            self._is_counted = False

    def _backward(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensor: Tensor, gradient: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self._is_counted or not self._loop.is_in_step:
                return plain(tensor, gradient, *args, **kwargs)
            with self._counting():
                result = plain(tensor, gradient, *args, **kwargs)
            self._count([tensor], [gradient])
            return result

        return backward

    def _autograd_backward(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self._is_counted or not self._loop.is_in_step:
                return plain(tensors, grad_tensors, *args, **kwargs)
            with self._counting():
                result = plain(tensors, grad_tensors, *args, **kwargs)
            losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            given = [grad_tensors] if isinstance(grad_tensors, Tensor) else grad_tensors
            self._count(losses, [None] * len(losses) if given is None else list(given))
            return result

        return backward

    def _count(self, losses: Sequence[Any], gradients: Sequence[Tensor | None]) -> None:
        """Count the scalar whose gradient a backward has added: the sum of the losses, weighted by what they were given."""
        scale = None if self._scaler is None else self._scaler.get_scale()
        for loss, gradient in zip(losses, gradients, strict=True):
            if isinstance(loss, Tensor) and loss.dtype.is_floating_point:
                value = loss.detach() if gradient is None else loss.detach() * gradient.detach()
                value = value.reshape(()) if value.numel() == 1 else value.sum()
                self._loop.add_backward(value if scale is None else value / scale)

    def _accelerator_backward(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def backward(accelerator: Any, loss: Tensor, **kwargs: Any) -> Any:
            with self._counting():
                result = plain(accelerator, loss, **kwargs)
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
