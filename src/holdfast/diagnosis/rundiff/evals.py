"""Compares evaluation results at the latest point at which both runs had seen equal data."""

from __future__ import annotations

import math
import re
from typing import Literal

import numpy as np

from holdfast.diagnosis.rundiff.compared_run import ComparedRun
from holdfast.diagnosis.rundiff.curves import Axis
from holdfast.diagnosis.rundiff.report import EvalComparison

_LOWER_IS_BETTER = re.compile(r"loss|perplex|ppl|error|err$|nll|bpb|bits_per|wer|cer|mse|mae|entropy|toxic")
_SAME_POSITION = 0.01
_SAME_VALUE = 1e-9

StepValue = tuple[int | None, float]


def compare(a: ComparedRun, b: ComparedRun, axis: Axis) -> list[EvalComparison]:
    """Compare every metric that either run has. A missing result is None."""
    comparisons = []
    for metric in sorted({*a.evals, *b.evals}):
        left, right = _match(a, b, a.evals.get(metric, []), b.evals.get(metric, []), axis)
        a_step, a_value = left or (None, None)
        b_step, b_value = right or (None, None)
        better: Literal["lower", "higher"] = "lower" if _LOWER_IS_BETTER.search(metric.lower()) else "higher"
        worse, change = _worse(a_value, b_value, better)
        comparisons.append(
            EvalComparison(
                metric=metric,
                a=a_value,
                b=b_value,
                a_step=a_step,
                b_step=b_step,
                better=better,
                worse=worse,
                change=change,
            )
        )
    return comparisons


def _match(
    a: ComparedRun, b: ComparedRun, left: list[StepValue], right: list[StepValue], axis: Axis
) -> tuple[StepValue | None, StepValue | None]:
    """Return the latest two results at equal positions on the axis, or else the last of each."""
    if not left or not right:
        return (left[-1] if left else None), (right[-1] if right else None)
    left_at, right_at = _positions(a, left, axis), _positions(b, right, axis)
    if left_at is not None and right_at is not None:
        for n in range(len(left) - 1, -1, -1):
            distance = np.abs(right_at - left_at[n])
            nearest = int(len(distance) - 1 - np.argmin(distance[::-1]))
            if distance[nearest] <= _SAME_POSITION * max(1.0, left_at[n]):
                return left[n], right[nearest]
    return left[-1], right[-1]


def _positions(run: ComparedRun, results: list[StepValue], axis: Axis) -> np.ndarray | None:
    """Return the position of each result on the axis; None if one has no step."""
    positions = run.axis(axis)
    if positions is None or not len(positions) or any(step is None for step, _ in results):
        return None
    return np.interp([float(step) for step, _ in results if step is not None], run.step, positions)


def _worse(a: float | None, b: float | None, better: str) -> tuple[Literal["a", "b"] | None, float | None]:
    """Return the worse run and the relative change. A NaN result is worse than any number."""
    if a is None or b is None:
        return None, None
    if math.isnan(a) or math.isnan(b):
        return (None if math.isnan(a) and math.isnan(b) else "a" if math.isnan(a) else "b"), math.nan
    change = (b - a) / abs(a) if a else math.nan
    if abs(b - a) <= _SAME_VALUE * max(abs(a), abs(b)):
        return None, change
    return ("b" if (b > a) == (better == "lower") else "a"), change
