"""A phase is stuck after a time that is learned from its tail, never before a floor, never in a phase not seen."""

from __future__ import annotations

import random

import pytest

from holdfast.core.hang.timeouts import MIN_INSTANCES, PhaseTimes
from marks import slow

FLOOR = 8.0


def times(values: list[float]) -> PhaseTimes:
    learned = PhaseTimes()
    for seconds in values:
        learned.add(seconds)
    return learned


def test_a_phase_that_was_seen_too_seldom_has_no_timeout():
    assert times([0.05] * (MIN_INSTANCES - 1)).timeout(FLOOR) is None
    assert times([0.05] * MIN_INSTANCES).timeout(FLOOR) == FLOOR


def test_a_timeout_is_between_four_and_five_times_the_tail_of_a_steady_phase():
    rng = random.Random(0)
    learned = times([rng.gauss(10.0, 0.5) for _ in range(20_000)])
    tail = learned.quantile(0.999)
    assert 11.0 < tail < 12.2
    assert 4 * tail < learned.timeout(FLOOR) <= 5 * tail


def test_scheduling_noise_of_a_short_phase_does_not_raise_the_timeout():
    rng = random.Random(1)
    learned = times([rng.choice([0.001] * 980 + [0.05] * 18 + [0.1] * 2) for _ in range(50_000)])
    assert learned.timeout(FLOOR) == FLOOR


def test_an_instance_that_took_long_and_ended_is_allowed_again():
    learned = times([0.05] * 100_000 + [60.0])  # the first batch of an epoch
    assert learned.timeout(FLOOR) >= 120.0


def _draw(kind: str, rng: random.Random) -> float:
    if kind == "lognormal":
        return 0.05 * rng.lognormvariate(0.0, 1.0)
    if kind == "pareto":
        return 0.05 * rng.paretovariate(2.0)
    if kind == "exponential":
        return rng.expovariate(1 / 0.5)
    return 0.05 if rng.random() > 2e-3 else 0.05 + rng.expovariate(1 / 3.0)  # now and then a slow file


@pytest.mark.parametrize("kind", ["pareto", *slow("lognormal", "exponential", "slow files")])
def test_a_million_heavy_tailed_steps_raise_no_alarm(kind):
    rng, learned, alarms = random.Random(7), PhaseTimes(), []
    for step in range(1_000_000):
        seconds = _draw(kind, rng)
        if seconds > FLOOR and (timeout := learned.timeout(FLOOR)) is not None and seconds > timeout:
            alarms.append((step, seconds, timeout))
        learned.add(seconds)
    assert alarms == []
    assert learned.timeout(FLOOR) < 3600, "an alarm must remain possible"
