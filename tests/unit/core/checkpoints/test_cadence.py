"""How often to save: the formulas against each other, against a simulated run, and at their edges."""

from __future__ import annotations

import functools
import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.checkpoints import cadence
from holdfast.core.checkpoints.cadence import Costs, advise, goodput
from marks import examples, slow

HOUR = 3600.0
USUAL = Costs(stall=12, restart=300, mtbf=36 * HOUR, step_time=0.8, write=30, certify_steps=10)
OFTEN = settings(max_examples=examples(200), deadline=None, derandomize=True)


# ---- the run itself, step by step


def simulated(costs: Costs, every: int, failures: int, seed: int) -> tuple[float, float]:
    """A run that trains, saves, fails, restarts; no formula in it. Its goodput, and seconds lost a failure."""
    random = Random(seed)
    wall = useful = lost = 0.0
    for _ in range(failures):
        # Restart until one succeeds; a failure may come in it as at any time.
        while (left := random.expovariate(1 / costs.mtbf)) < costs.restart:
            wall += left
        left -= costs.restart
        wall += costs.restart + left
        clock, trained, kept = 0.0, 0.0, 0.0
        saves: list[tuple[float, float]] = []  # when a run can resume from it, what it holds
        while True:
            for _ in range(every):
                if clock + costs.step_time > left:
                    break
                clock += costs.step_time
                trained += costs.step_time
            else:
                if clock + costs.stall > left:
                    break
                clock += costs.stall
                saves.append((clock + max(costs.write, costs.certify_steps * costs.step_time), trained))
                continue
            break
        kept = max((state for ready, state in saves if ready <= left), default=0.0)
        useful += kept
        lost += trained - kept
    return useful / wall, lost / failures


@pytest.mark.slow
@pytest.mark.parametrize(
    ("costs", "every"),
    [
        (Costs(stall=10, restart=60, mtbf=2000, step_time=20), 5),
        *slow((Costs(stall=10, restart=60, mtbf=2000, step_time=50), 10)),
        *slow((Costs(stall=30, restart=400, mtbf=1000, step_time=20), 10)),
        (Costs(stall=2, restart=100, mtbf=3000, step_time=50, write=90), 2),
        (Costs(stall=2, restart=100, mtbf=3000, step_time=50, write=90, certify_steps=5), 2),
        (Costs(stall=0, restart=0, mtbf=500, step_time=10), 2),
    ],
)
def test_goodput_is_what_a_simulated_run_has(costs, every):
    share, lost = simulated(costs, every, failures=30_000, seed=5)
    expected = cadence.option(every, costs)
    assert share == pytest.approx(expected.goodput, rel=0.02)
    # The simulated step in which it failed is not counted as trained: half a step on average.
    assert lost + costs.step_time / 2 == pytest.approx(expected.lost_per_failure, rel=0.02)


@pytest.mark.slow
def test_no_cadence_of_a_simulated_run_is_better_than_the_one_advised():
    costs = Costs(stall=20, restart=60, mtbf=2000, step_time=20)
    best = advise(costs).best.steps
    assert best * 20 == pytest.approx(math.sqrt(2 * 20 * 2000), rel=0.1)
    shares = {
        n: simulated(costs, n, failures=30_000, seed=6)[0] for n in (best // 4, best // 2, best, 2 * best, 4 * best)
    }
    assert max(shares, key=shares.__getitem__) == best


# ---- the formulas


def test_without_a_lag_it_is_dalys_expected_time():
    tau, delta, restart, mtbf = 1800.0, 12.0, 300.0, 36 * HOUR
    wall = mtbf * math.exp(restart / mtbf) * (math.exp((tau + delta) / mtbf) - 1) / tau
    assert goodput(tau, Costs(delta, restart, mtbf, 1.0)) == pytest.approx(1 / wall, rel=1e-9)


def test_young_and_daly_by_hand():
    assert cadence.young(8, 100) == 40
    assert cadence.daly(8, 100) == pytest.approx(40 * (1 + 0.2 / 3 + 0.04 / 9) - 8)
    assert cadence.daly(200, 100) == cadence.daly(10**6, 100) == 100


@OFTEN
@given(st.floats(1e-3, 1e4), st.floats(1, 1e8))
def test_exact_interval_is_a_maximum_and_near_dalys_where_that_holds(stall, mtbf):
    best = cadence.exact(stall, mtbf)
    assert 0 < best <= mtbf
    costs = Costs(stall, 0, mtbf, 1)
    for other in (0.5, 0.9, 1.1, 2.0):
        assert goodput(best, costs) >= goodput(best * other, costs) * (1 - 1e-12)
    if stall < mtbf / 2:
        assert best == pytest.approx(cadence.daly(stall, mtbf), rel=0.02)


def test_slow_restarts_and_late_certification_cost_goodput_and_leave_the_interval():
    slow = USUAL._replace(restart=3000, certify_steps=1000)
    assert advise(slow).best.steps == advise(USUAL).best.steps
    assert advise(slow).best.goodput < advise(USUAL).best.goodput


@OFTEN
@given(
    st.builds(
        Costs,
        stall=st.floats(0, 1e5),
        restart=st.floats(0, 1e6),
        mtbf=st.floats(1e-3, 1e9),
        step_time=st.floats(1e-4, 1e5),
        write=st.floats(0, 1e5),
        certify_steps=st.integers(0, 10**6),
    ),
    st.integers(1, 10**6),
)
def test_advice_is_sane_for_any_costs(costs, every):
    advice = advise(costs, every)
    for one in (advice.best, advice.now, *advice.around):
        assert 0 <= one.goodput <= 1
        assert one.lost_per_failure >= 0
        assert one.steps >= 1
    assert advice.best.steps >= advice.least_steps
    assert advice.best in advice.around
    assert [o.steps for o in advice.around] == sorted({o.steps for o in advice.around})
    assert advice.best.goodput == max(o.goodput for o in advice.around)
    if every >= advice.least_steps:
        assert advice.best.goodput >= advice.now.goodput * (1 - 1e-9)


@OFTEN
@given(st.floats(0.01, 100), st.floats(10, 1e6), st.floats(0.01, 1000))
def test_no_whole_number_of_steps_is_better_than_the_best(stall, mtbf, step_time):
    costs = Costs(stall, 0, mtbf, step_time)
    best = advise(costs).best
    for steps in (best.steps - 1, best.steps + 1):
        assert steps < 1 or cadence.option(steps, costs).goodput <= best.goodput


def test_saves_are_never_closer_than_one_takes_to_write():
    advice = advise(USUAL._replace(stall=0.001, write=60))
    assert advice.exact < 60
    assert advice.best.steps == advice.least_steps == 75


def test_save_that_stalls_nothing_is_as_often_as_it_can_be():
    advice = advise(USUAL._replace(stall=0, write=0))
    assert (advice.exact, advice.best.steps) == (0, 1)


def test_loss_at_a_failure_is_half_an_interval_and_the_lag():
    costs = Costs(stall=1, restart=0, mtbf=1e7, step_time=1, write=40, certify_steps=100)
    assert costs.lag == 100
    assert cadence.option(600, costs).lost_per_failure == pytest.approx(300 + 100, rel=0.01)


# ---- how sure a measured rate is


@pytest.mark.parametrize(
    ("count", "low", "high"),  # chi-square quantiles, from tables
    [(0, 0.0, 2.9957), (1, 0.0513, 4.7439), (3, 0.8177, 7.7537), (10, 5.4254, 16.9622)],
)
def test_interval_of_a_count_is_the_exact_one(count, low, high):
    assert cadence.rate_interval(count) == pytest.approx((low, high), abs=1e-4)


def test_interval_covers_the_truth_as_often_as_it_says():
    random, mean, hits = Random(3), 4.0, 0
    interval = functools.cache(cadence.rate_interval)
    for _ in range(4000):
        count, left = 0, mean
        while (left := left - random.expovariate(1)) > 0:
            count += 1
        low, high = interval(count)
        hits += low <= mean <= high
    assert 0.9 <= hits / 4000 <= 0.97  # never less; for few events it is wider than it need be


def test_interval_of_thousands_does_not_overflow():
    low, high = cadence.rate_interval(5000)
    assert 4880 < low < 5000 < high < 5120
