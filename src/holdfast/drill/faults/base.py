"""Base of all faults."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset


class Fault:
    """Breaks a run at step `step`, counted as in a run without faults. Subclasses override what they break."""

    name = "fault"

    def __init__(self, step: int) -> None:
        self.step = step
        self.is_injected = False

    def wrap_dataset(self, dataset: Dataset[Any], per_step: int) -> Dataset[Any]:
        """Return the data with the fault in it; a step has `per_step` samples."""
        return dataset

    def inject(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Break the model or the optimizer. Called once, before the step."""

    def before_step(self, number: int, model: nn.Module, optimizer: Optimizer) -> None:
        if number >= self.step and not self.is_injected:
            self.is_injected = True
            self.inject(model, optimizer)


class AlteredDataset(Dataset[Any]):
    """Replaces each sample n in [start, stop) by `change(n, sample)`."""

    def __init__(self, inner: Any, start: int, stop: int, change: Any) -> None:
        self._inner, self._start, self._stop, self._change = inner, start, stop, change

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, n: int) -> Any:
        sample = self._inner[n]
        return self._change(n, sample) if self._start <= n < self._stop else sample
