"""Finds running statistics of a normalization that one batch has spoilt: the loss in training does not show it."""

from __future__ import annotations

from holdfast.core.base.types import Finding, Kind, Severity
from holdfast.runtime.context import Context
from holdfast.runtime.data.bad_rows import outlying_samples
from holdfast.runtime.effects.attempt import StepAttempt

_GROWTH = 100.0
"""one batch that makes a running variance this many times larger is out of all proportion"""


def find_spoilt_statistics(context: Context, attempt: StepAttempt, following: StepAttempt | None) -> list[Finding]:
    """Find out whether the batch of an attempt has spoilt them. Called after a leap of the loss, by all ranks."""
    buffers, number = context.state.buffers, attempt.number
    after = buffers.capture() if following is None else following.buffers
    growth, name = buffers.largest_growth(attempt.buffers, after)
    samples = outlying_samples(attempt.draws) if growth > _GROWTH else []
    gathered = context.ranks.all_gather_object([growth, name, samples])
    growth, name, _ = max(gathered)
    if not growth > _GROWTH:
        return []
    samples = sorted({sample for _, _, found in gathered for sample in found})
    return [
        Finding(
            detector="statistics",
            kind=Kind.STATISTICS_JUMP,
            severity=Severity.ROLLBACK,
            step=number,
            onset=number,
            message=f"{name} became {growth:.3g} times larger in one step: evaluation normalizes by it",
            evidence={"tensor": name, "growth": growth, "samples": samples},
        )
    ]
