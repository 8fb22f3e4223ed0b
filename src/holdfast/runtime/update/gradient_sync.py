"""When gradients are averaged over ranks: in the backward of a step's last part, and in no other.

As DistributedDataParallel.no_sync and FSDP2's set_requires_gradient_sync do it. It has to be said before the forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


class GradientSync:
    """The modules among the user's that average gradients by themselves."""

    def __init__(self, given: Iterable[tuple[str, nn.Module]]) -> None:
        self._replicated: list[Any] = []
        self._sharded: list[Any] = []
        for _, module in given:
            for inner in module.modules():
                if hasattr(inner, "require_backward_grad_sync"):
                    self._replicated.append(inner)
            if hasattr(module, "set_requires_gradient_sync"):  # it sees to those inside
                self._sharded.append(module)
        self._on = True

    def before_forward(self, *, last: bool) -> None:
        if last == self._on:
            return
        self._on = last
        for module in self._replicated:
            module.require_backward_grad_sync = last
        for module in self._sharded:
            module.set_requires_gradient_sync(last)
