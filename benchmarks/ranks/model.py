"""What a collective may take on more ranks than there are processes here: fits, and how far to trust them.

A shape says how often a message is passed on before every rank has every row: round a ring n - 1 times, up and down a tree
the logarithm of it. The time is a constant and so much a pass, fitted to the medians of blocks by least squares of relative
errors, since times on a shared machine spread in proportion. Where ranks share cores, a pass of each of them takes its turn:
the third shape is a ring whose passes do that, and what it says of larger sizes is said for a core a rank. Intervals are
of the fit alone (blocks drawn again with replacement): that the shape itself holds further on is an assumption.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

SEED = 7
INTERVAL = (0.05, 0.95)
ENOUGH = "a fit with one number of ranks left out takes three whose trees are of different depth, as 2, 4 and 8"
Blocks = Mapping[int, Sequence[float]]
"""by the number of ranks, a time for every block"""


class Shape(NamedTuple):
    """How many passes, one after the other: as measured on so many cores, and with a core a rank."""

    here: Callable[[int, int], float]
    apart: Callable[[int], float]


def _ring(ranks: int) -> float:
    return ranks - 1


def _tree(ranks: int) -> float:
    return math.ceil(math.log2(ranks))


SHAPES = {
    "ring": Shape(lambda ranks, cores: _ring(ranks), _ring),
    "tree": Shape(lambda ranks, cores: _tree(ranks), _tree),
    "ring on shared cores": Shape(lambda ranks, cores: _ring(ranks) * max(1.0, ranks / cores), _ring),
}


class Fit(NamedTuple):
    base: float
    slope: float

    def at(self, passes: float) -> float:
        return self.base + self.slope * passes


def fit(passes: Sequence[float], times: Sequence[float]) -> Fit:
    """The line with the least squares of relative errors."""
    weights = [1 / t**2 for t in times]
    total = sum(weights)
    x = sum(w * p for w, p in zip(weights, passes, strict=True)) / total
    y = sum(w * t for w, t in zip(weights, times, strict=True)) / total
    along = sum(w * (p - x) ** 2 for w, p in zip(weights, passes, strict=True))
    if along == 0:
        raise ValueError("a fit takes two numbers of ranks that differ")
    slope = sum(w * (p - x) * (t - y) for w, p, t in zip(weights, passes, times, strict=True)) / along
    return Fit(y - slope * x, slope)


def left_out(passes: Sequence[float], times: Sequence[float]) -> float:
    """How far off, relative and root mean square, the fit to all other sizes is at each."""
    wrong = []
    for n, (x, t) in enumerate(zip(passes, times, strict=True)):
        others = fit([*passes[:n], *passes[n + 1 :]], [*times[:n], *times[n + 1 :]])
        wrong.append((others.at(x) / t - 1) ** 2)
    return math.sqrt(statistics.mean(wrong))


def enough(sizes: Sequence[int]) -> bool:
    """Whether every shape can be told from a constant when one of these is left out."""
    return len({_tree(n) for n in sizes if n > 1}) >= 3


def model(
    blocks: Blocks, beyond: Sequence[int], cores: int, shapes: Sequence[str] = tuple(SHAPES), draws: int = 1000
) -> dict[str, Any]:
    """Each shape's fit, residuals, error at sizes left out, and what it says of larger sizes; `best` has the least error.
    One rank passes nothing on, and is not fitted."""
    sizes = sorted(n for n in blocks if n > 1)
    if not enough(sizes):
        raise ValueError(ENOUGH)
    middle = [statistics.median(blocks[n]) for n in sizes]
    found: dict[str, dict[str, Any]] = {}
    for name in shapes:
        shape = SHAPES[name]
        passes = [shape.here(n, cores) for n in sizes]
        line = fit(passes, middle)
        drawn = _drawn([blocks[n] for n in sizes], passes, draws)
        found[name] = {
            "base": line.base,
            "slope": line.slope,
            "slope_interval": _interval([one.slope for one in drawn]),
            "error": left_out(passes, middle),
            "residuals": {n: t / line.at(p) - 1 for n, p, t in zip(sizes, passes, middle, strict=True)},
            "beyond": {
                n: {"value": line.at(shape.apart(n)), "interval": _interval([o.at(shape.apart(n)) for o in drawn])}
                for n in beyond
            },
        }
    return {"shapes": found, "best": min(found, key=lambda name: float(found[name]["error"]))}


def _drawn(blocks: Sequence[Sequence[float]], passes: Sequence[float], draws: int) -> list[Fit]:
    """Fits to medians of blocks drawn with replacement."""
    order = random.Random(SEED)
    found = []
    for _ in range(draws):
        found.append(fit(passes, [statistics.median(order.choices(times, k=len(times))) for times in blocks]))
    return found


def _interval(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in INTERVAL]
