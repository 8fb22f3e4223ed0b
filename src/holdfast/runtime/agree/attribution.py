"""Find the rank, the micro-batch and the samples that a vetoed step came from.

Averaging spreads a bad gradient to every rank. The rows of the step hold what each rank measured before that: its own
loss, and the norm of a few of its gradients (`update/local_grad_norms.py`).
"""

from __future__ import annotations

import math
import socket
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.core.base.types import Flag
from holdfast.runtime.agree.rows import Column, Rows
from holdfast.runtime.data.bad_rows import nonfinite_samples
from holdfast.runtime.data.source import Draw

_MAX_LISTED = 32
"""sample ids, and ranks, that a finding lists at most"""
_OUTLIER_RATIO = 3.0
"""a rank is named if its number exceeds this multiple of the other ranks' median"""


class Origin(NamedTuple):
    """Names the origin of a vetoed step. Names no rank if nothing tells the ranks apart."""

    ranks: list[int]
    by: str
    """the measurement that tells: loss, gradient or data"""
    samples: list[int]
    """ids of rows that hold NaN or Inf, over all ranks"""
    evidence: dict[str, Any]


def describe_data(draws: Sequence[Draw], part_losses: Sequence[Tensor], *, find_nonfinite: bool) -> dict[str, Any]:
    """Describe this rank's data in plain values for the other ranks. Waits for the device."""
    losses = torch.stack(list(part_losses)).tolist() if part_losses else []
    worst = _worst_part(losses)
    draw = draws[min(worst * len(draws) // max(1, len(losses)), len(draws) - 1)]
    has_ids = draw.ids and all(hasattr(i, "__index__") for i in draw.ids)
    return {
        "host": socket.gethostname(),
        "data": [list(d.span) for d in draws],
        "micro_batch": worst if len(losses) > 1 else None,
        "micro_batch_data": list(draw.span),
        "samples": [int(i) for i in draw.ids[:_MAX_LISTED]] if draw.ids and has_ids else [],
        "nonfinite_samples": nonfinite_samples(draws) if find_nonfinite else [],
    }


def _worst_part(losses: Sequence[float]) -> int:
    """Return the index of the first non-finite loss, else of the highest."""
    nonfinite = next((n for n, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if nonfinite is not None:
        return nonfinite
    return losses.index(max(losses)) if losses else 0


def find_origin(rows: Rows, accounts: Sequence[dict[str, Any]], flags: int, loss_limit: float | None) -> Origin:
    """Return the origin from the rows and from each rank's `describe_data`. The result is equal on every rank."""
    samples = sorted({int(i) for account in accounts for i in account["nonfinite_samples"]})
    ranks, by = _find_ranks(rows, accounts, flags, loss_limit)
    evidence: dict[str, Any] = {"ranks": ranks, "by": by or "nothing tells the ranks apart"}
    if rows.size <= _MAX_LISTED:
        evidence["losses"] = rows.values(Column.LOSS)
        if any(rows.values(Column.LOCAL_GRAD_NORM)):
            evidence["gradients"] = rows.values(Column.LOCAL_GRAD_NORM)
    evidence["suspects"] = [
        {"rank": r, **{k: v for k, v in accounts[r].items() if v not in (None, [])}} for r in ranks[:_MAX_LISTED]
    ]
    return Origin(ranks, by, samples, evidence)


def _find_ranks(
    rows: Rows, accounts: Sequence[dict[str, Any]], flags: int, loss_limit: float | None
) -> tuple[list[int], str]:
    losses, weights = rows.values(Column.LOSS), rows.values(Column.WEIGHT)
    if flags & Flag.LOSS_NONFINITE:
        ranks = [r for r, loss in enumerate(losses) if weights[r] > 0 and not math.isfinite(loss)]
        if ranks:
            return ranks, "loss"
    if flags & (Flag.GRAD_NONFINITE | Flag.LOSS_NONFINITE):
        norms = rows.values(Column.LOCAL_GRAD_NORM)
        ranks = [r for r, norm in enumerate(norms) if not math.isfinite(norm)]
        if ranks and len(ranks) < len(norms):
            return ranks, "gradient"
        ranks = [r for r, account in enumerate(accounts) if account["nonfinite_samples"]]
        if ranks:
            return ranks, "data"
    groups = group_by_batch(rows)
    if len(groups) == 1:
        return list(range(len(losses))), "all ranks read the same data"
    if flags & Flag.LOSS_HIGH:
        ranks = _outliers(losses, groups)
        above = [r for r, loss in enumerate(losses) if loss_limit is not None and loss > loss_limit]
        if ranks or (above and len(above) < len(losses)):
            return ranks or above, "loss"
    if flags & (Flag.GRAD_HIGH | Flag.GRAD_NONFINITE):
        for column in (Column.LOCAL_GRAD_NORM, Column.NORM):
            if ranks := _outliers(rows.values(column), groups):
                return ranks, "gradient"
        if ranks := _outliers(losses, groups):
            return ranks, "loss"
    return [], ""


def group_by_batch(rows: Rows) -> list[list[int]]:
    """Return the ranks grouped by the batch they read (tensor-parallel ranks share one), if it has a fingerprint."""
    groups: dict[float, list[int]] = {}
    for rank, batch in enumerate(rows.values(Column.BATCH)):
        groups.setdefault(batch if batch >= 0 else -1.0 - rank, []).append(rank)
    return list(groups.values())


def _outliers(values: Sequence[float], groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks whose value is far above the others'; none if all are alike."""
    nonfinite = [r for r, v in enumerate(values) if not math.isfinite(v)]
    if nonfinite:
        return nonfinite if len(nonfinite) < len(values) else []
    highest = [max(values[r] for r in group) for group in groups]
    outliers: list[int] = []
    for n, group in enumerate(groups):
        others = statistics.median(v for m, v in enumerate(highest) if m != n)
        if highest[n] > _OUTLIER_RATIO * max(others, 0.0) and highest[n] > 0:
            outliers += group
    return sorted(outliers)
