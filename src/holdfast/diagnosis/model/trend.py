"""Robust trends: the slope of Theil and Sen, the test of Mann and Kendall. Single outliers cannot fake them.

A long series is reduced to medians of blocks first. This bounds the cost, and correlated neighbours do not count as
independent evidence.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.core.detectors.monotone import mann_kendall

MAX_BLOCKS = 120


class Trend(NamedTuple):
    """Holds a trend. `rise` is the slope times the length; `z` is the Mann-Kendall statistic, positive for a rise."""

    rise: float
    z: float
    level: float

    @property
    def relative_rise(self) -> float:
        return self.rise / max(abs(self.level), 1e-30)


def fit_trend(values: NDArray[np.float64]) -> Trend | None:
    """Fit a trend to the finite values in their order; return None for fewer than eight."""
    values = values[np.isfinite(values)]
    if len(values) < 8:
        return None
    medians = block_medians(values, MAX_BLOCKS)
    i, j = np.triu_indices(len(medians), 1)
    slope = float(np.median((medians[j] - medians[i]) / (j - i)))
    return Trend(slope * (len(medians) - 1), mann_kendall(medians.tolist()), float(np.median(medians)))


def block_medians(values: NDArray[np.float64], max_blocks: int) -> NDArray[np.float64]:
    """Return at most `max_blocks` medians of consecutive blocks of equal length."""
    size = -(-len(values) // max_blocks)
    if size == 1:
        return values
    whole = len(values) // size * size
    medians = np.median(values[:whole].reshape(-1, size), axis=1)
    rest = values[whole:]
    return np.append(medians, np.median(rest)) if len(rest) * 2 >= size else medians
