"""Which samples of a batch are themselves not finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.runtime.data.source import Draw
from holdfast.runtime.data.split import tensors_of


@torch.no_grad()
def nonfinite_samples(draws: Sequence[Draw]) -> list[int]:
    """Return the ids of rows that hold NaN, or Inf if most rows do not (a mask of -inf is in every row).

    Only batches whose rows and ids match one to one count. Waits for the device: call it only after a non-finite step.
    """
    bad: set[int] = set()
    for draw in draws:
        if draw.ids is None or not all(hasattr(i, "__index__") for i in draw.ids):
            continue
        rows = torch.zeros(len(draw.ids), dtype=torch.bool)
        for tensor in tensors_of(draw.batch):
            if tensor.is_floating_point() and tensor.dim() > 0 and tensor.shape[0] == len(draw.ids):
                rows |= _nonfinite_rows(tensor)
        bad.update(draw.ids[i].__index__() for i in rows.nonzero().flatten().tolist())
    return sorted(bad)


def _nonfinite_rows(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(tensor.shape[0], -1)
    nan = flat.isnan().any(1).cpu()
    inf = flat.isinf().any(1).cpu()
    return nan | inf if int(inf.sum()) * 2 < len(inf) else nan
