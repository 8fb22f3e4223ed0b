"""Which rows of a batch are themselves broken."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.runtime.data.source import Draw
from holdfast.runtime.data.split import tensors_of


@torch.no_grad()
def bad_samples(draws: list[Draw]) -> list[int]:
    """The ids of rows that hold NaN, or Inf where most rows do not (a mask of -inf is in every row).

    Only where rows and ids match one to one; waits for the device, so it is asked only after a non-finite step.
    """
    found: list[int] = []
    for draw in draws:
        if draw.ids is None or not all(hasattr(i, "__index__") for i in draw.ids):
            continue
        rows = torch.zeros(len(draw.ids), dtype=torch.bool)
        for tensor in tensors_of(draw.batch):
            if tensor.is_floating_point() and tensor.dim() > 0 and tensor.shape[0] == len(draw.ids):
                rows |= _broken(tensor)
        found += [int(_id(draw.ids[i])) for i in rows.nonzero().flatten().tolist()]
    return sorted(set(found))


def _broken(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(tensor.shape[0], -1)
    nan = flat.isnan().any(1).cpu()
    inf = flat.isinf().any(1).cpu()
    return nan | inf if int(inf.sum()) * 2 < len(inf) else nan


def _id(value: Any) -> int:
    return value.__index__()  # type: ignore[no-any-return]
