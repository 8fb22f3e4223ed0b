"""Evaluation results side by side: of the latest point at which both runs had seen as much."""

from __future__ import annotations

import math
import re
from typing import Literal

import numpy as np

from holdfast.diagnosis.rundiff.curves import Axis
from holdfast.diagnosis.rundiff.report import Evaluation
from holdfast.diagnosis.rundiff.side import Side

_LOWER_IS_BETTER = re.compile(r"loss|perplex|ppl|error|err$|nll|bpb|bits_per|wer|cer|mse|mae|entropy|toxic")
_AS_MUCH = 0.01
_EQUAL = 1e-9

Result = tuple[int | None, float]


def compare(a: Side, b: Side, axis: Axis) -> list[Evaluation]:
    """Every metric either has. None: not measured there."""
    found = []
    for metric in sorted({*a.evals, *b.evals}):
        one, two = _matched(a, b, a.evals.get(metric, []), b.evals.get(metric, []), axis)
        better: Literal["lower", "higher"] = "lower" if _LOWER_IS_BETTER.search(metric.lower()) else "higher"
        left, right = (None if result is None else result[1] for result in (one, two))
        worse, change = _worse(left, right, better)
        found.append(
            Evaluation(
                metric=metric,
                a=left,
                b=right,
                a_step=None if one is None else one[0],
                b_step=None if two is None else two[0],
                better=better,
                worse=worse,
                change=change,
            )
        )
    return found


def _matched(
    a: Side, b: Side, left: list[Result], right: list[Result], axis: Axis
) -> tuple[Result | None, Result | None]:
    """The last of each, or the latest two at equal tokens where the last are not."""
    if not left or not right:
        return (left[-1] if left else None), (right[-1] if right else None)
    places = _places(a, left, axis), _places(b, right, axis)
    if places[0] is not None and places[1] is not None:
        for n in range(len(left) - 1, -1, -1):
            apart = np.abs(places[1] - places[0][n])
            nearest = int(len(apart) - 1 - np.argmin(apart[::-1]))
            if apart[nearest] <= _AS_MUCH * max(1.0, places[0][n]):
                return left[n], right[nearest]
    return left[-1], right[-1]


def _places(side: Side, values: list[Result], axis: Axis) -> np.ndarray | None:
    """Where on the axis each was measured; None where one does not say its step."""
    along = side.axis(axis)
    if along is None or not len(along) or any(step is None for step, _ in values):
        return None
    return np.interp([float(step) for step, _ in values if step is not None], side.step, along)


def _worse(a: float | None, b: float | None, better: str) -> tuple[Literal["a", "b"] | None, float | None]:
    if a is None or b is None:
        return None, None
    if math.isnan(a) or math.isnan(b):
        return (None if math.isnan(a) and math.isnan(b) else "a" if math.isnan(a) else "b"), math.nan
    change = (b - a) / abs(a) if a else math.nan
    if abs(b - a) <= _EQUAL * max(abs(a), abs(b)):
        return None, change
    return ("b" if (b > a) == (better == "lower") else "a"), change
