"""Garbage data: random tokens for some steps, as from a broken shard or a wrong tokenizer."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from holdfast.drill.faults.base import AlteredDataset, Fault


class GarbageData(Fault):
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
