"""A batch with a NaN in it: one sequence's weight in the loss is not a number."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from holdfast.drill.faults.base import Altered, Fault


class NanBatch(Fault):
    name = "NaN batch"

    def data(self, dataset: Dataset[Any], per_step: int) -> Dataset[Any]:
        first = (self.step - 1) * per_step
        return Altered(dataset, first, first + 1, _spoil)


def _spoil(n: int, sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "weight": torch.tensor(float("nan"))}
