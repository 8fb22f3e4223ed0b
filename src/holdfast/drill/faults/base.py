"""What a fault is."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset


class Fault:
    """Strikes at step `step`, counted as in a run without faults. Override what it touches."""

    name = "fault"

    def __init__(self, step: int) -> None:
        self.step = step
        self.struck = False

    def data(self, dataset: Dataset[Any], per_step: int) -> Dataset[Any]:
        """The data with the fault in it; `per_step` samples make a step."""
        return dataset

    def strike(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Called once, before the step."""

    def before_step(self, number: int, model: nn.Module, optimizer: Optimizer) -> None:
        if number >= self.step and not self.struck:
            self.struck = True
            self.strike(model, optimizer)


class Altered(Dataset[Any]):
    """A dataset whose samples in [start, stop) are changed by a function of (index, sample)."""

    def __init__(self, inner: Any, start: int, stop: int, change: Any) -> None:
        self._inner, self._start, self._stop, self._change = inner, start, stop, change

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, n: int) -> Any:
        sample = self._inner[n]
        return self._change(n, sample) if self._start <= n < self._stop else sample
