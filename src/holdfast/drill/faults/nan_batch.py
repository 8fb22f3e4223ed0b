"""A batch with a NaN: the loss weight of one sequence is NaN."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from holdfast.drill.faults.base import AlteredDataset, Fault


class NanBatch(Fault):
    name = "NaN batch"

    def wrap_dataset(self, dataset: Dataset[Any], per_step: int) -> Dataset[Any]:
        first = (self.step - 1) * per_step
        return AlteredDataset(dataset, first, first + 1, _set_nan_weight)


def _set_nan_weight(n: int, sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "weight": torch.tensor(float("nan"))}
