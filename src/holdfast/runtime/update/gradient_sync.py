"""Averages gradients over ranks once a step, in the backward of its last micro-batch.

DistributedDataParallel.no_sync and FSDP2's set_requires_gradient_sync do the same. The flag must be set before the forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from holdfast.runtime.tensors.torch_private import require


class GradientSync:
    """Holds the user's modules that average gradients themselves."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._ddp: list[Any] = []
        self._fsdp: list[Any] = []
        for _, module in modules:
            for inner in module.modules():
                if type(inner).__name__ == "DistributedDataParallel":
                    require(inner, "require_backward_grad_sync")
                if hasattr(inner, "require_backward_grad_sync"):
                    self._ddp.append(inner)
            if hasattr(module, "set_requires_gradient_sync"):  # it sets the flag of the modules inside too
                self._fsdp.append(module)
        self.has_modules = bool(self._ddp or self._fsdp)
        self._is_on = True

    def before_forward(self, *, is_last: bool) -> None:
        """Set whether the next backward averages gradients."""
        if is_last == self._is_on:
            return
        self._is_on = is_last
        for module in self._ddp:
            module.require_backward_grad_sync = is_last
        for module in self._fsdp:
            module.set_requires_gradient_sync(is_last)
