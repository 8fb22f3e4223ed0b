"""Faults for the controlled runs, beside those of the drill: each put where it would arise."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from holdfast.drill.faults import AlteredDataset, Fault

FOREVER = 1 << 60


class LrTimes(Fault):
    """From the step on, the learning rate is `factor` times the scheduled one: a wrong peak after a resume."""

    name = "LR times"

    def __init__(self, step: int, factor: float) -> None:
        super().__init__(step)
        self._factor = factor

    def before_step(self, number: int, model: nn.Module, optimizer: Optimizer) -> None:
        if number >= self.step:
            # The scheduler sets the rate after each step again.
            for group in optimizer.param_groups:
                group["lr"] *= self._factor


class ShuffledLabels(Fault):
    """From the step on, targets do not belong to their tokens."""

    name = "shuffled labels"

    def wrap_dataset(self, dataset: Dataset[Any], per_step: int) -> Dataset[Any]:
        return AlteredDataset(dataset, (self.step - 1) * per_step, FOREVER, self._shuffle)

    def _shuffle(self, n: int, sample: dict[str, Any]) -> dict[str, Any]:
        order = torch.randperm(len(sample["targets"]), generator=torch.Generator().manual_seed(n))
        return {**sample, "targets": sample["targets"][order]}


class RepeatedNgrams(Fault):
    """For some steps every sequence is one short n-gram over and over, as in web text that was not filtered."""

    name = "repeated n-grams"

    def __init__(self, step: int, steps: int, length: int = 4) -> None:
        super().__init__(step)
        self._steps, self._length = steps, length

    def wrap_dataset(self, dataset: Dataset[Any], per_step: int) -> Dataset[Any]:
        first = (self.step - 1) * per_step
        return AlteredDataset(dataset, first, first + self._steps * per_step, self._repeat)

    def _repeat(self, n: int, sample: dict[str, Any]) -> dict[str, Any]:
        size = len(sample["tokens"]) + 1
        gram = torch.randint(0, 256, (self._length,), generator=torch.Generator().manual_seed(n))
        tokens = gram.repeat(size // self._length + 1)[:size]
        return {**sample, "tokens": tokens[:-1], "targets": tokens[1:]}


class BitFlips(Fault):
    """One bit of the exponent flips in some weights, as memory without error correction does.

    Weights are well under 1, so that bit 30 makes one enormous, bit 25 makes it 16 times as large, and bits 26 to 29, which
    are set, make it vanish.
    """

    name = "bit flips"

    def __init__(self, step: int, weights: int, bit: int) -> None:
        super().__init__(step)
        self._weights, self._bit = weights, bit

    def inject(self, model: nn.Module, optimizer: Optimizer) -> None:
        generator = torch.Generator().manual_seed(self.step)
        matrices = [p for p in model.parameters() if p.dim() == 2]
        for _ in range(self._weights):
            matrix = matrices[int(torch.randint(len(matrices), (), generator=generator))]
            flat = matrix.data.view(-1).view(torch.int32)
            place = int(torch.randint(flat.numel(), (), generator=generator))
            flat[place] ^= 1 << self._bit


class ForwardOverflow(Fault):
    """Activations past what fp16 can hold: no loss scale cures it."""

    name = "forward overflow"

    def inject(self, model: nn.Module, optimizer: Optimizer) -> None:
        widest = max((p for p in model.parameters() if p.dim() == 2), key=lambda p: p.shape[0])
        widest.data.mul_(1e6)
