"""How often to save: the interval at which the least time is lost, and what share of the time is then useful.

Failures come at random at a constant rate, one every M seconds on average, at any moment, also while restarting.

    tau     useful seconds between two saves
    delta   seconds that the training thread stands still for a save
    R       seconds from a failure to the first step after it
    L       seconds from there until a run would go on from the save: it is written, and certified by the healthy steps
            that followed. Both happen while the run trains, so it is the longer of the two

A life of the run is R, spent again at every failure in it, and then the time to the next failure: M e^(R/M) in all. Of
that life as many whole intervals are kept as had been saved, written and certified when it ended: the j-th if it lasted
j (tau + delta) + L. So, exactly:

    goodput(tau) = tau / M * e^(-(R + L) / M) / (e^((tau + delta) / M) - 1)

which for L = 0 is Daly's expected time turned over (J. T. Daly, A higher order estimate of the optimum checkpoint
interval for restart dumps, Future Generation Computer Systems 22, 2006). Neither R nor L moves the best tau.
"""

from __future__ import annotations

import math
from typing import NamedTuple

_AROUND = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_TINY = 1e-300


class Costs(NamedTuple):
    """What saving, failing and training cost, all in seconds."""

    stall: float
    """the training thread stands still for a save"""
    restart: float
    """from a failure to the first step after it"""
    mtbf: float
    """between two failures of the whole job, on average"""
    step_time: float
    write: float = 0.0
    """after that, until the last byte is on disk, while the run trains"""
    certify_steps: int = 0
    """healthy steps before a save counts as good"""

    @property
    def lag(self) -> float:
        """From the end of the stall until a run would go on from the save."""
        return max(self.write, self.certify_steps * self.step_time)


class Option(NamedTuple):
    """One cadence, and what comes of it."""

    steps: int
    seconds: float
    """useful seconds between two saves"""
    goodput: float
    """useful share of the wall time"""
    lost_per_failure: float
    """seconds of training done that a failure takes back, on average"""
    saves_per_hour: float


class Advice(NamedTuple):
    """The best cadence in whole steps, and how it was come by."""

    best: Option
    young: float
    daly: float
    exact: float
    """seconds between saves by each formula; `best` is the exact one in whole steps, not under `least_steps`"""
    least_steps: int
    """saving more often would only wait for the save before"""
    around: list[Option]
    """cadences around the best, the best among them"""
    now: Option | None
    """at the cadence the run has"""


def young(stall: float, mtbf: float) -> float:
    """Young 1974: tau = sqrt(2 delta M). Good where delta is far smaller than M."""
    return math.sqrt(2 * stall * mtbf)


def daly(stall: float, mtbf: float) -> float:
    """Daly 2006: tau = sqrt(2 delta M) [1 + 1/3 sqrt(delta / 2M) + 1/9 delta / 2M] - delta if delta < 2M, else M."""
    if stall >= 2 * mtbf:
        return mtbf
    ratio = stall / (2 * mtbf)
    return young(stall, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def exact(stall: float, mtbf: float) -> float:
    """The tau of the highest goodput: the root of 1 - tau / M = e^(-(tau + delta) / M), by halving."""
    a, low, high = stall / mtbf, 0.0, 1.0
    for _ in range(120):
        middle = (low + high) / 2
        if -middle - math.expm1(-(middle + a)) > 0:
            low = middle
        else:
            high = middle
    return low * mtbf


def goodput(tau: float, costs: Costs) -> float:
    """The useful share of the wall time at `tau` useful seconds between saves, by the formula above."""
    x = (tau + costs.stall) / costs.mtbf
    after = math.exp(-(costs.restart + costs.lag) / costs.mtbf)
    return tau / costs.mtbf * math.exp(-x) / -math.expm1(-x) * after


def lost_per_failure(tau: float, costs: Costs) -> float:
    """Seconds of training that a failure takes back, on average; near tau / 2 + L where both are far under M.

    What is trained in a life, M (1 - e^(-tau/M)) / (1 - e^(-(tau+delta)/M)), less what of it is kept.
    """
    x = (tau + costs.stall) / costs.mtbf
    trained = costs.mtbf * math.expm1(-tau / costs.mtbf) / math.expm1(-x)
    kept = tau * math.exp(-x - costs.lag / costs.mtbf) / -math.expm1(-x)
    return max(0.0, trained - kept)


def option(steps: int, costs: Costs) -> Option:
    """What comes of a save every `steps` steps."""
    tau = steps * costs.step_time
    hourly = 3600 / (tau + costs.stall)
    return Option(steps, tau, goodput(tau, costs), lost_per_failure(tau, costs), hourly)


def advise(costs: Costs, every: int | None = None) -> Advice:
    """The best cadence for these costs; `every` is the one the run has, in steps."""
    least = least_steps(costs)
    tau = exact(costs.stall, costs.mtbf)
    below = max(least, math.floor(tau / costs.step_time))
    best = max((option(n, costs) for n in (below, below + 1)), key=lambda o: o.goodput)
    counts = sorted({max(least, round(best.steps * share)) for share in _AROUND})
    return Advice(
        best=best,
        young=young(costs.stall, costs.mtbf),
        daly=daly(costs.stall, costs.mtbf),
        exact=tau,
        least_steps=least,
        around=[option(n, costs) for n in counts],
        now=None if every is None else option(every, costs),
    )


def least_steps(costs: Costs) -> int:
    """Steps that pass while one save is written: a save sooner than that would have to wait for it."""
    return max(1, math.ceil(costs.write / costs.step_time))


def rate_interval(count: int, level: float = 0.9) -> tuple[float, float]:
    """The Poisson means with which `count` events are not surprising: the exact (Garwood) interval.

    Under the lower one, `count` or more have the chance (1 - level) / 2; so have `count` or fewer under the upper.
    """
    tail = (1 - level) / 2
    low = 0.0 if count == 0 else _mean_at(count - 1, 1 - tail)
    return low, _mean_at(count, tail)


def _mean_at(count: int, chance: float) -> float:
    """The mean for which `count` events or fewer have this chance, which falls as the mean grows."""
    low, high = 0.0, count + 10 * math.sqrt(count + 1) + 10
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(count, middle) > chance else (low, middle)
    return low


def _at_most(count: int, mean: float) -> float:
    logs = [n * math.log(max(mean, _TINY)) - mean - math.lgamma(n + 1) for n in range(count + 1)]
    return math.fsum(math.exp(value) for value in logs)
