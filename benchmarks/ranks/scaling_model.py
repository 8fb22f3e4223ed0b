"""Extrapolates the time of a collective to more ranks, with error estimates.

A shape gives the number of passes until every rank has every row: n - 1 round a ring, log2(n) in a tree. The model is a
constant plus a time per pass, fitted to the medians of blocks. It minimizes squared relative errors, since times on a
shared machine spread in proportion. If ranks share cores, their passes take turns; the third shape is a ring that models
this, and extrapolates to one core a rank. Intervals come from bootstrapped fits. They assume that the shape holds.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

SEED = 7
INTERVAL = (0.05, 0.95)
TOO_FEW_SIZES = (
    "a fit with one number of ranks left out needs three sizes with trees of different depth, such as 2, 4 and 8"
)
Blocks = Mapping[int, Sequence[float]]
"""times of all blocks, for each number of ranks"""


class CollectiveShape(NamedTuple):
    """Holds the number of sequential passes: measured with (ranks, cores), and with one core for each rank."""

    measured: Callable[[int, int], float]
    core_per_rank: Callable[[int], float]


def _ring(ranks: int) -> float:
    return ranks - 1


def _tree(ranks: int) -> float:
    return math.ceil(math.log2(ranks))


SHAPES = {
    "ring": CollectiveShape(lambda ranks, cores: _ring(ranks), _ring),
    "tree": CollectiveShape(lambda ranks, cores: _tree(ranks), _tree),
    "ring on shared cores": CollectiveShape(lambda ranks, cores: _ring(ranks) * max(1.0, ranks / cores), _ring),
}


class LinearFit(NamedTuple):
    base: float
    slope: float

    def at(self, passes: float) -> float:
        return self.base + self.slope * passes


def fit(passes: Sequence[float], times: Sequence[float]) -> LinearFit:
    """Return the line that minimizes the squared relative errors."""
    weights = [1 / t**2 for t in times]
    total = sum(weights)
    x = sum(w * p for w, p in zip(weights, passes, strict=True)) / total
    y = sum(w * t for w, t in zip(weights, times, strict=True)) / total
    variance = sum(w * (p - x) ** 2 for w, p in zip(weights, passes, strict=True))
    if variance == 0:
        raise ValueError("a fit needs two numbers of ranks that differ")
    slope = sum(w * (p - x) * (t - y) for w, p, t in zip(weights, passes, times, strict=True)) / variance
    return LinearFit(y - slope * x, slope)


def leave_one_out_error(passes: Sequence[float], times: Sequence[float]) -> float:
    """Return the relative RMS error at each size of the fit to all other sizes."""
    squares = []
    for n, (x, t) in enumerate(zip(passes, times, strict=True)):
        others = fit([*passes[:n], *passes[n + 1 :]], [*times[:n], *times[n + 1 :]])
        squares.append((others.at(x) / t - 1) ** 2)
    return math.sqrt(statistics.mean(squares))


def has_enough_sizes(sizes: Sequence[int]) -> bool:
    """Return whether every shape can be fitted when one size is left out."""
    return len({_tree(n) for n in sizes if n > 1}) >= 3


def fit_shapes(
    blocks: Blocks, beyond: Sequence[int], cores: int, shapes: Sequence[str] = tuple(SHAPES), draws: int = 1000
) -> dict[str, Any]:
    """Return for each shape its fit, residuals, leave-one-out error and extrapolations; `best` has the least error.
    A single rank makes no passes and is ignored."""
    sizes = sorted(n for n in blocks if n > 1)
    if not has_enough_sizes(sizes):
        raise ValueError(TOO_FEW_SIZES)
    medians = [statistics.median(blocks[n]) for n in sizes]
    results: dict[str, dict[str, Any]] = {}
    for name in shapes:
        shape = SHAPES[name]
        passes = [shape.measured(n, cores) for n in sizes]
        line = fit(passes, medians)
        resampled = _bootstrap([blocks[n] for n in sizes], passes, draws)
        results[name] = {
            "base": line.base,
            "slope": line.slope,
            "slope_interval": _interval([one.slope for one in resampled]),
            "error": leave_one_out_error(passes, medians),
            "residuals": {n: t / line.at(p) - 1 for n, p, t in zip(sizes, passes, medians, strict=True)},
            "beyond": {
                n: {"value": line.at(p), "interval": _interval([each.at(p) for each in resampled])}
                for n, p in ((n, shape.core_per_rank(n)) for n in beyond)
            },
        }
    return {"shapes": results, "best": min(results, key=lambda name: float(results[name]["error"]))}


def _bootstrap(blocks: Sequence[Sequence[float]], passes: Sequence[float], draws: int) -> list[LinearFit]:
    """Return fits to the medians of blocks drawn with replacement."""
    draw = random.Random(SEED)
    return [
        fit(passes, [statistics.median(draw.choices(times, k=len(times))) for times in blocks]) for _ in range(draws)
    ]


def _interval(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in INTERVAL]
