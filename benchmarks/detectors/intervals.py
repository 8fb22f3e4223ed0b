"""Confidence intervals, without scipy: exact for a Poisson rate, Wilson's for a share."""

from __future__ import annotations

import math


def poisson(count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Garwood's exact interval for the mean of a Poisson count."""
    tail = (1 - confidence) / 2
    low = 0.0 if count == 0 else _solve(lambda mean: 1 - _at_most(count - 1, mean), tail, 0.0, float(count))
    high = _solve(lambda mean: 1 - _at_most(count, mean), 1 - tail, float(count), 2.0 * count + 40.0)
    return low, high


def wilson(found: int, of: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's interval for a share; (0, 1) where there is nothing to go by."""
    if of == 0:
        return 0.0, 1.0
    share, spread = found / of, z * z / of
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / of + spread / (4 * of)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def _at_most(count: int, mean: float) -> float:
    """P(X <= count) of a Poisson variable."""
    if mean <= 0:
        return 1.0
    logs = [k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(max(0, count - 2000), count + 1)]
    top = max(logs)
    return min(1.0, math.exp(top) * sum(math.exp(value - top) for value in logs))


def _solve(rising: object, target: float, low: float, high: float) -> float:
    """Where a rising function meets `target`, by bisection."""
    for _ in range(80):
        middle = (low + high) / 2
        if rising(middle) < target:  # type: ignore[operator]
            low = middle
        else:
            high = middle
    return (low + high) / 2
