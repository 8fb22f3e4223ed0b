"""Several faults in one run, as a FaultInjector for the reference trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from holdfast.drill.faults import CorruptOptimizer, Fault, GarbageData, InfGradient, LrJump, NanBatch


class FaultSchedule:
    """Injects each fault at its step; `per_step` is the number of samples in a step."""

    def __init__(self, faults: Sequence[Fault], per_step: int) -> None:
        self.faults, self._per_step = list(faults), per_step

    def wrap_dataset(self, dataset: Dataset[Any]) -> Dataset[Any]:
        for fault in self.faults:
            dataset = fault.wrap_dataset(dataset, self._per_step)
        return dataset

    def before_step(self, number: int, model: nn.Module, optimizer: Optimizer) -> None:
        for fault in self.faults:
            fault.before_step(number, model, optimizer)


def demo_schedule(steps: int, per_step: int) -> FaultSchedule:
    """Return the demo's five faults, one of each kind, spread over the run."""
    shares = {NanBatch: 0.10, GarbageData: 0.26, InfGradient: 0.44, CorruptOptimizer: 0.60, LrJump: 0.78}
    return FaultSchedule([fault(max(1, round(share * steps))) for fault, share in shares.items()], per_step)
