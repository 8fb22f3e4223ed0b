"""Faults, each injected at a step where it would arise. Each is injected once; bad data stays in the data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
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


class CorruptOptimizer(Fault):
    """Scales the second moments down, so that the next update is huge but finite."""

    name = "corrupted optimizer state"

    def inject(self, model: nn.Module, optimizer: Optimizer) -> None:
        for state in optimizer.state.values():
            moment = state.get("exp_avg_sq")
            if isinstance(moment, Tensor) and moment.dim() == 2:
                moment.mul_(1e-10)


class GarbageData(Fault):
    """Serves random tokens for some steps, as from a broken shard or a wrong tokenizer."""

    name = "garbage data"

    def __init__(self, step: int, steps: int = 12, vocab_size: int = 256) -> None:
        super().__init__(step)
        self._steps, self._vocab_size = steps, vocab_size

    def wrap_dataset(self, dataset: Dataset[Any], per_step: int) -> Dataset[Any]:
        first = (self.step - 1) * per_step
        return AlteredDataset(dataset, first, first + self._steps * per_step, self._randomize)

    def _randomize(self, n: int, sample: dict[str, Any]) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(n)
        length = len(sample["tokens"])
        noise = torch.randint(0, self._vocab_size, (length + 1,), generator=generator)
        return {**sample, "tokens": noise[:-1], "targets": noise[1:]}


class InfGradient(Fault):
    """Writes an Inf into one gradient while the loss is finite, as an overflow in one kernel does."""

    name = "Inf gradient"

    def inject(self, model: nn.Module, optimizer: Optimizer) -> None:
        parameter: Any = list(model.parameters())[1]

        def write_inf(p: Any) -> None:
            p.grad.view(-1)[0] = float("inf")
            handle.remove()

        handle = parameter.register_post_accumulate_grad_hook(write_inf)


class LrJump(Fault):
    """Sets a learning rate that is too high for one update, as a script does that edits it by hand."""

    name = "LR jump"

    def __init__(self, step: int, factor: float = 300.0) -> None:
        super().__init__(step)
        self._factor = factor

    def inject(self, model: nn.Module, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= self._factor


class NanBatch(Fault):
    """Serves a batch with a NaN: the loss weight of one sequence."""

    name = "NaN batch"

    def wrap_dataset(self, dataset: Dataset[Any], per_step: int) -> Dataset[Any]:
        first = (self.step - 1) * per_step
        return AlteredDataset(dataset, first, first + 1, _set_nan_weight)


def _set_nan_weight(n: int, sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "weight": torch.tensor(float("nan"))}
