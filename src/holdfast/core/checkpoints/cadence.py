"""How often to save: the interval that loses the least time, and the useful share of the time at that interval.

Failures come at random at a constant rate, one every M seconds on average, at any moment, also during a restart.

    tau     useful seconds between two saves
    delta   seconds for which a save stops the training thread
    R       seconds from a failure to the first step after it
    L       seconds from the end of the stall until a run could resume from the save: it must be written, and certified
            by healthy steps. Both happen while the run trains, so L is the longer of the two

An attempt consists of R, repeated at every failure during it, and the time to the next failure: M e^(R/M) in all. It
keeps as many intervals as were saved, written and certified when it ended: the j-th if it lasted j (tau + delta) + L.
So, exactly:

    goodput(tau) = tau / M * e^(-(R + L) / M) / (e^((tau + delta) / M) - 1)

which for L = 0 is the inverse of Daly's expected time (J. T. Daly, A higher order estimate of the optimum checkpoint
interval for restart dumps, Future Generation Computer Systems 22, 2006). Neither R nor L changes the best tau.
"""

from __future__ import annotations

import math
from typing import NamedTuple

_AROUND = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_TINY = 1e-300


class Costs(NamedTuple):
    """The costs of saving, failing and training, in seconds."""

    stall: float
    """for which a save stops the training thread"""
    restart: float
    """from a failure to the first step after it"""
    mtbf: float
    """between two failures of the whole job, on average"""
    step_time: float
    write: float = 0.0
    """from the end of the stall until the last byte is on disk, while the run trains"""
    certify_steps: int = 0
    """healthy steps before a save counts as good"""

    @property
    def lag(self) -> float:
        """Seconds from the end of the stall until a run could resume from the save."""
        return max(self.write, self.certify_steps * self.step_time)


class Option(NamedTuple):
    """One cadence and its results."""

    steps: int
    seconds: float
    """useful seconds between two saves"""
    goodput: float
    """useful share of the wall time"""
    lost_per_failure: float
    """seconds of training that a failure loses, on average"""
    saves_per_hour: float


class Advice(NamedTuple):
    """The best cadence in whole steps, and how it was computed."""

    best: Option
    young: float
    daly: float
    exact: float
    """seconds between saves by each formula; `best` is the exact one in whole steps, not under `least_steps`"""
    least_steps: int
    """a shorter interval would only wait for the previous save"""
    around: list[Option]
    """cadences around the best, the best among them"""
    now: Option | None
    """the current cadence of the run"""


def young(stall: float, mtbf: float) -> float:
    """Young 1974: tau = sqrt(2 delta M). Accurate if delta is far smaller than M."""
    return math.sqrt(2 * stall * mtbf)


def daly(stall: float, mtbf: float) -> float:
    """Daly 2006: tau = sqrt(2 delta M) [1 + 1/3 sqrt(delta / 2M) + 1/9 delta / 2M] - delta if delta < 2M, else M."""
    if stall >= 2 * mtbf:
        return mtbf
    ratio = stall / (2 * mtbf)
    return young(stall, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def exact(stall: float, mtbf: float) -> float:
    """Return the tau with the highest goodput: the root of 1 - tau / M = e^(-(tau + delta) / M), by bisection."""
    a, low, high = stall / mtbf, 0.0, 1.0
    for _ in range(120):
        middle = (low + high) / 2
        if -middle - math.expm1(-(middle + a)) > 0:
            low = middle
        else:
            high = middle
    return low * mtbf


def goodput(tau: float, costs: Costs) -> float:
    """Return the useful share of the wall time at `tau` useful seconds between saves, by the formula above."""
    x = (tau + costs.stall) / costs.mtbf
    after = math.exp(-(costs.restart + costs.lag) / costs.mtbf)
    return tau / costs.mtbf * math.exp(-x) / -math.expm1(-x) * after


def lost_per_failure(tau: float, costs: Costs) -> float:
    """Return the seconds of training that a failure loses, on average; near tau / 2 + L if both are far below M.

    That is the training of an attempt, M (1 - e^(-tau/M)) / (1 - e^(-(tau+delta)/M)), minus the part that is kept.
    """
    x = (tau + costs.stall) / costs.mtbf
    trained = costs.mtbf * math.expm1(-tau / costs.mtbf) / math.expm1(-x)
    kept = tau * math.exp(-x - costs.lag / costs.mtbf) / -math.expm1(-x)
    return max(0.0, trained - kept)


def option(steps: int, costs: Costs) -> Option:
    """Return the results of a save every `steps` steps."""
    tau = steps * costs.step_time
    hourly = 3600 / (tau + costs.stall)
    return Option(steps, tau, goodput(tau, costs), lost_per_failure(tau, costs), hourly)


def advise(costs: Costs, every: int | None = None) -> Advice:
    """Return the best cadence for these costs; `every` is the current one, in steps."""
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
    """Return the steps that pass while a save is written: an earlier save would have to wait for it."""
    return max(1, math.ceil(costs.write / costs.step_time))


def rate_interval(count: int, level: float = 0.9) -> tuple[float, float]:
    """Return the exact (Garwood) confidence interval of a Poisson mean, given `count` events.

    With the lower mean, `count` or more events have the probability (1 - level) / 2; with the upper, `count` or fewer.
    """
    tail = (1 - level) / 2
    low = 0.0 if count == 0 else _mean_at(count - 1, 1 - tail)
    return low, _mean_at(count, tail)


def _mean_at(count: int, probability: float) -> float:
    """Return the mean for which `count` events or fewer have this probability."""
    low, high = 0.0, count + 10 * math.sqrt(count + 1) + 10
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(count, middle) > probability else (low, middle)
    return low


def _at_most(count: int, mean: float) -> float:
    logs = [n * math.log(max(mean, _TINY)) - mean - math.lgamma(n + 1) for n in range(count + 1)]
    return math.fsum(math.exp(value) for value in logs)
