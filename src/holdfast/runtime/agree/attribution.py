"""Who brought it: the rank, its part of the step and its samples, although the average has spread it to everyone.

The rows of the step say what each rank measured before anything was averaged: its own loss, and the norm of the gradients
that some of its parameters had (`witness`). Asked only about a step that was vetoed.
"""

from __future__ import annotations

import math
import socket
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from holdfast.core.base.types import Flag
from holdfast.runtime.agree.rows import Column, Rows
from holdfast.runtime.data.nonfinite_rows import nonfinite_samples

if TYPE_CHECKING:
    from holdfast.runtime.step.step import Step

_LISTED = 32
"""sample ids, and ranks' numbers, that a finding lists at the most"""
_STANDS_OUT = 3.0
"""how many times the others' median a rank's own number must be to be named for it"""


class Blame(NamedTuple):
    """What is known of where it came from. No rank is named where nothing tells them apart."""

    ranks: list[int]
    by: str
    """what told: loss, gradient or data"""
    samples: list[int]
    """the ids of broken rows, of all ranks"""
    evidence: dict[str, Any]


def account(step: Step, *, rows: bool) -> dict[str, Any]:
    """What this rank can say of its own data, in plain values. Waits for the device. rows: look for broken ones."""
    worst, losses = _worst_part(step)
    draw = step.draws[min(worst * len(step.draws) // max(1, len(losses)), len(step.draws) - 1)]
    ids = [int(i) for i in draw.ids[:_LISTED]] if draw.ids and all(hasattr(i, "__index__") for i in draw.ids) else []
    return {
        "host": socket.gethostname(),
        "data": [list(d.span) for d in step.draws],
        "micro_batch": worst if len(losses) > 1 else None,
        "micro_batch_data": list(draw.span),
        "samples": ids,
        "nonfinite_samples": nonfinite_samples(step.draws) if rows else [],
    }


def _worst_part(step: Step) -> tuple[int, list[float]]:
    losses = torch.stack(step.losses).tolist() if step.losses else []
    for n, loss in enumerate(losses):
        if not math.isfinite(loss):
            return n, losses
    return (losses.index(max(losses)) if losses else 0), losses


def blame(rows: Rows, accounts: Sequence[dict[str, Any]], flags: int, limit: float | None) -> Blame:
    """From what all ranks measured and said: the same on every rank."""
    broken = sorted({int(i) for told in accounts for i in told["nonfinite_samples"]})
    ranks, by = _culprits(rows, accounts, flags, limit)
    evidence: dict[str, Any] = {"ranks": ranks, "by": by or "nothing tells the ranks apart"}
    if len(rows.of(Column.LOSS)) <= _LISTED:
        evidence["losses"] = rows.of(Column.LOSS)
        if any(rows.of(Column.WITNESS)):
            evidence["gradients"] = rows.of(Column.WITNESS)
    evidence["suspects"] = [
        {"rank": r, **{k: v for k, v in accounts[r].items() if v not in (None, [])}} for r in ranks[:_LISTED]
    ]
    return Blame(ranks, by, broken, evidence)


def _culprits(rows: Rows, accounts: Sequence[dict[str, Any]], flags: int, limit: float | None) -> tuple[list[int], str]:
    losses, weights = rows.of(Column.LOSS), rows.of(Column.WEIGHT)
    if flags & Flag.LOSS_NONFINITE:
        found = [r for r, loss in enumerate(losses) if weights[r] > 0 and not math.isfinite(loss)]
        if found:
            return found, "loss"
    if flags & (Flag.GRAD_NONFINITE | Flag.LOSS_NONFINITE):
        witness = rows.of(Column.WITNESS)
        found = [r for r, norm in enumerate(witness) if not math.isfinite(norm)]
        if found and len(found) < len(witness):
            return found, "gradient"
        found = [r for r, told in enumerate(accounts) if told["nonfinite_samples"]]
        if found:
            return found, "data"
    groups = readers(rows)
    if len(groups) == 1:
        return list(range(len(losses))), "all ranks read the same data"
    if flags & Flag.LOSS_HIGH:
        found = _outstanding(losses, groups)
        over = [r for r, loss in enumerate(losses) if limit is not None and loss > limit]
        if found or (over and len(over) < len(losses)):
            return found or over, "loss"
    if flags & (Flag.GRAD_HIGH | Flag.GRAD_NONFINITE):
        for column in (Column.WITNESS, Column.NORM):
            if found := _outstanding(rows.of(column), groups):
                return found, "gradient"
        if found := _outstanding(losses, groups):
            return found, "loss"
    return [], ""


def readers(rows: Rows) -> list[list[int]]:
    """The ranks, those together that read the same data (tensor parallel ranks do), where it could be looked at."""
    batches = rows.of(Column.BATCH)
    found: dict[float, list[int]] = {}
    for rank, batch in enumerate(batches):
        found.setdefault(batch if batch >= 0 else -1.0 - rank, []).append(rank)
    return list(found.values())


def _outstanding(values: Sequence[float], groups: Sequence[Sequence[int]]) -> list[int]:
    """Those that stand out above the others; none where all are alike."""
    strange = [r for r, v in enumerate(values) if not math.isfinite(v)]
    if strange:
        return strange if len(strange) < len(values) else []
    worst = [max(values[r] for r in group) for group in groups]
    found: list[int] = []
    for n, group in enumerate(groups):
        others = statistics.median(v for m, v in enumerate(worst) if m != n)
        if worst[n] > _STANDS_OUT * max(others, 0.0) and worst[n] > 0:
            found += group
    return sorted(found)
