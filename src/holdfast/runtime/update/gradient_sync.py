"""Averages gradients over ranks once a step, in the backward of its last micro-batch.

DistributedDataParallel.no_sync and FSDP2's set_requires_gradient_sync do the same. The flag must be set before the forward.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from typing import Any

from torch import nn

from holdfast.runtime.tensors.torch_private import require


class GradientSync:
    """Holds the user's modules that average gradients themselves."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        modules = list(modules)
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
        is_sharded = any(callable(getattr(p, "to_local", None)) for _, m in modules for p in m.parameters())
        self.has_only_ddp = bool(self._ddp) and not self._fsdp and not is_sharded
        """gradients are averaged by DDP alone: nothing else communicates in forward and backward"""
        self.is_on = True
        """the next backward averages gradients"""

    def before_forward(self, *, is_last: bool) -> None:
        """Set whether the next backward averages gradients."""
        if is_last == self.is_on:
            return
        self.is_on = is_last
        for module in self._ddp:
            module.require_backward_grad_sync = is_last
        for module in self._fsdp:
            module.set_requires_gradient_sync(is_last)

    def skip_buffers_if_sent(self, error: BaseException, *, is_first: bool) -> bool:
        """Have DDP not send its buffers again in this step. Return False if it is not known whether it has sent them.

        DDP sends buffers at the start of the first forward after an averaging one. If a forward failed behind that, the next
        one in this step must not send them again: the other ranks would not join.
        is_first: no backward of this step has ended.
        """
        frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
        has_begun = not is_first or "_run_ddp_forward" in frames
        for module in self._ddp:
            sends = getattr(module, "broadcast_buffers", True) and any(True for _ in module.buffers())
            if sends and getattr(module, "require_forward_param_sync", True):
                if not has_begun:
                    return False
                module.require_forward_param_sync = False
        return True
