"""Several faults in one run: a Tamper for the reference trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from holdfast.drill.faults.base import Fault
from holdfast.drill.faults.corrupt_optimizer import CorruptOptimizer
from holdfast.drill.faults.garbage_data import GarbageData
from holdfast.drill.faults.inf_gradient import InfGradient
from holdfast.drill.faults.lr_jump import LrJump
from holdfast.drill.faults.nan_batch import NanBatch


class Storm:
    """Each fault at its own step."""

    def __init__(self, faults: Sequence[Fault], per_step: int) -> None:
        self.faults, self._per_step = list(faults), per_step

    def data(self, dataset: Dataset[Any]) -> Dataset[Any]:
        for fault in self.faults:
            dataset = fault.data(dataset, self._per_step)
        return dataset

    def before_step(self, number: int, model: nn.Module, optimizer: Optimizer) -> None:
        for fault in self.faults:
            fault.before_step(number, model, optimizer)


def demo_storm(steps: int, per_step: int) -> Storm:
    """The demo's: five faults of five kinds, evenly spread over the run."""

    def at(share: float) -> int:
        return max(1, round(share * steps))

    return Storm(
        [
            NanBatch(at(0.10)),
            GarbageData(at(0.26)),
            InfGradient(at(0.44)),
            CorruptOptimizer(at(0.60)),
            LrJump(at(0.78)),
        ],
        per_step,
    )
