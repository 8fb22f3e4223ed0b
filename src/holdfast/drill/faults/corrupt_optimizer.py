"""Corrupted optimizer state: scales the second moments down, so that the next update is huge but finite."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.drill.faults.base import Fault


class CorruptOptimizer(Fault):
    name = "corrupted optimizer state"

    def inject(self, model: nn.Module, optimizer: Optimizer) -> None:
        for state in optimizer.state.values():
            moment = state.get("exp_avg_sq")
            if isinstance(moment, Tensor) and moment.dim() == 2:
                moment.mul_(1e-10)
