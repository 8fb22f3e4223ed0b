"""Which samples of a batch are themselves bad: not finite, or out of all proportion to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from holdfast.runtime.data.source import Draw
from holdfast.runtime.data.split import tensors_of

_OUTLYING_RATIO = 100.0
"""a row is out of all proportion if its largest value is this many times that of most rows"""


def nonfinite_samples(draws: Sequence[Draw]) -> list[int]:
    """Return the ids of rows that hold NaN, or Inf if most rows do not (a mask of -inf is in every row)."""
    return _samples(draws, nonfinite_rows)


def outlying_samples(draws: Sequence[Draw]) -> list[int]:
    """Return the ids of rows whose values are out of all proportion to those of most rows."""
    return _samples(draws, outlying_rows)


@torch.no_grad()
def _samples(draws: Sequence[Draw], find: Callable[[Tensor], Tensor]) -> list[int]:
    """Return the ids of the rows that `find` marks in any tensor.

    Only batches whose rows and ids match one to one count. Waits for the device: call it only after a bad step.
    """
    bad: set[int] = set()
    for draw in draws:
        if draw.ids is None or not all(hasattr(i, "__index__") for i in draw.ids):
            continue
        rows = torch.zeros(len(draw.ids), dtype=torch.bool)
        for tensor in tensors_of(draw.batch):
            if tensor.is_floating_point() and tensor.dim() > 0 and tensor.shape[0] == len(draw.ids):
                rows |= find(tensor)
        bad.update(draw.ids[i].__index__() for i in rows.nonzero().flatten().tolist())
    return sorted(bad)


def nonfinite_rows(tensor: Tensor) -> Tensor:
    """Return which rows hold NaN, or Inf if most rows do not."""
    flat = tensor.detach().reshape(tensor.shape[0], -1)
    nan = flat.isnan().any(1).cpu()
    inf = flat.isinf().any(1).cpu()
    return nan | inf if int(inf.sum()) * 2 < len(inf) else nan


def outlying_rows(tensor: Tensor) -> Tensor:
    """Return which rows are out of all proportion to the median row."""
    largest = tensor.detach().float().reshape(tensor.shape[0], -1).abs().amax(1).cpu()
    return largest > _OUTLYING_RATIO * largest.median()


@torch.no_grad()
def is_mask(tensor: Tensor) -> bool:
    """Return whether a tensor with -inf looks like a mask: its other values are all equal, or most of its rows hold -inf."""
    if tensor.dim() == 0 or tensor.isnan().any() or tensor.isposinf().any() or not tensor.isneginf().any():
        return False
    finite = tensor[torch.isfinite(tensor)]
    return finite.numel() == 0 or bool(finite.min() == finite.max()) or not bool(nonfinite_rows(tensor).any())
