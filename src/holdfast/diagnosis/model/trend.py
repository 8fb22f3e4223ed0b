"""Trends that single values cannot fake: the slope of Theil and Sen, the test of Mann and Kendall.

Long series are cut into blocks first and each block is its median, so that the cost is bounded and neighbouring
values, which hang together, do not pass for independent evidence.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.core.detectors.monotone import mann_kendall

MOST_BLOCKS = 120


class Trend(NamedTuple):
    """`rise` is the Theil-Sen slope times the length of the series; `z` is Mann and Kendall's, up when positive."""

    rise: float
    z: float
    blocks: int
    level: float


def trend(values: NDArray[np.float64], most: int = MOST_BLOCKS) -> Trend | None:
    """The trend over the finite values in their order; None for fewer than eight of them."""
    values = values[np.isfinite(values)]
    n = len(values)
    if n < 8:
        return None
    medians = blocks(values, most)
    m = len(medians)
    i, j = np.triu_indices(m, 1)
    steps = medians[j] - medians[i]
    slope = float(np.median(steps / (j - i)))
    z = mann_kendall(medians.tolist())
    return Trend(slope * (m - 1), z, m, float(np.median(medians)))


def blocks(values: NDArray[np.float64], most: int) -> NDArray[np.float64]:
    """At most `most` medians of neighbouring stretches of equal length."""
    size = -(-len(values) // most)
    if size == 1:
        return values
    whole = len(values) // size * size
    parts = np.median(values[:whole].reshape(-1, size), axis=1)
    rest = values[whole:]
    return np.append(parts, np.median(rest)) if len(rest) * 2 >= size else parts
