"""A learning rate that is too high for one update, as from a script that edits it by hand."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from holdfast.drill.faults.base import Fault


class LrJump(Fault):
    name = "LR jump"

    def __init__(self, step: int, factor: float = 300.0) -> None:
        super().__init__(step)
        self._factor = factor

    def inject(self, model: nn.Module, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= self._factor
