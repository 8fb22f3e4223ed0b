"""The baseline of a series: level, trend, scale and tail, and what does not move them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from feeding import ar1, noisy
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.detectors.baseline import NORMAL_TAIL, Baseline
from marks import examples


def fed(values, start: int = 32, *, falling: bool = True) -> Baseline:
    baseline = Baseline(start, falling=falling)
    for value in values:
        baseline.update(float(value))
    return baseline


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    st.lists(st.floats(-1e6, 1e6) | st.sampled_from([1e149, -1e149, 0.0]), min_size=1, max_size=120),
    st.integers(1, 20),
    st.booleans(),
)
def test_baseline_is_finite_and_has_a_scale_whatever_it_is_fed(values, start, falling):
    baseline = fed(values, start, falling=falling)
    if baseline.ready:
        assert math.isfinite(baseline.expected())
        assert 0 < baseline.scale < math.inf
        assert 2.0 <= baseline.tail <= 60.0
        assert 0.0 <= baseline.autocorrelation <= 1.0
        assert math.isfinite(baseline.threshold_distance(8.0))
        assert baseline.trend <= 0 or not falling


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 1000), st.integers(1, 40), st.integers(100, 2500))
def test_values_given_together_and_one_by_one_make_the_same_baseline(seed, start, count):
    values = noisy(count, seed, noise=0.1)
    one_by_one, together = fed(values, start), Baseline(start)
    at = 0
    while at < count:
        if together.ready:
            some = values[at : at + together.values_until_update()]
            together.extend(some)
            at += len(some)
        else:
            together.update(values[at])
            at += 1
    assert json.dumps(together.state_dict()) == json.dumps(one_by_one.state_dict())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, -1e308, 1e150])
def test_baseline_takes_in_nothing_that_is_not_finite_or_beyond_arithmetic(value):
    clean, dirty = fed(noisy(100), 20), Baseline(20)
    for one in noisy(100):
        dirty.update(value)
        dirty.update(one)
    assert dirty.state_dict() == clean.state_dict()


def test_baseline_goes_on_along_a_falling_line_and_is_level_on_a_rising_one():
    falling, rising = fed(10 - 0.1 * np.arange(32)), fed(10 + 0.1 * np.arange(32))
    assert falling.expected() == pytest.approx(10 - 0.1 * 32)
    assert rising.expected() == pytest.approx(10 + 0.1 * 31)
    assert falling.scale == pytest.approx(1e-3 * falling.level, rel=1e-3), "there is no noise around the line"


def test_rise_is_never_learned_as_a_trend():
    baseline = fed(noisy(300))
    for value in 2.2 + 0.01 * np.arange(200):
        baseline.update(float(value))
        assert baseline.trend <= 0


def test_scale_of_a_baseline_is_the_deviation_of_its_noise_from_the_start():
    at_first = [fed(noisy(32, seed, 1.0, 0.1)).scale for seed in range(40)]
    later = [fed(noisy(500, seed, 1.0, 0.1)).scale for seed in range(40)]
    assert np.median(at_first) == pytest.approx(0.1, rel=0.2)
    assert np.median(later) == pytest.approx(0.1, rel=0.15)
    assert max(later) < 0.2


def test_limits_reach_farther_while_the_scale_is_known_from_few_values():
    baselines = [fed(noisy(count, 1)) for count in (32, 64, 400, 4000)]
    shares = [c.threshold_distance(1.0) / c.scale / max(1.0, c.tail / NORMAL_TAIL) for c in baselines]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 1.01


def test_tail_grows_where_single_values_are_out_again_and_again_and_not_for_one():
    random = np.random.default_rng(0)
    normal, heavy = fed(2 + 0.05 * random.normal(size=3000)), fed(2 + 0.05 * random.standard_t(2, size=3000))
    assert normal.tail < 3.0 < heavy.tail
    normal.add_outlier(40.0)
    assert normal.tail <= 4.5
    for _ in range(4):
        normal.add_outlier(40.0)
    assert normal.tail > 20.0


@pytest.mark.parametrize(("rho", "low", "high"), [(0.0, 0.0, 0.2), (0.8, 0.4, 0.95)])
def test_autocorrelation_is_estimated_within_its_bounds(rho, low, high):
    seen = [fed(2.2 + 0.05 * ar1(3000, seed, rho)).autocorrelation for seed in range(8)]
    assert low <= np.median(seen) <= high


def test_value_far_out_moves_it_no_more_than_one_two_deviations_out():
    near, far = fed(noisy(64)), fed(noisy(64))
    near.update(near.expected() + 3.0 * near.scale)
    far.update(far.expected() + 1e6 * far.scale)
    assert far.level == pytest.approx(near.level)


def test_level_that_dropped_is_followed_in_a_few_blocks():
    baseline = fed(noisy(2000) + noisy(48, 1, level=1.0))
    assert baseline.expected() == pytest.approx(1.0, abs=0.1)
    assert abs(baseline.trend) < 0.01


def test_restarted_baseline_learns_anew_and_remembers_how_long_to():
    baseline = fed(noisy(100), 20)
    baseline.restart(5)
    for value in noisy(5, level=50.0):
        assert not baseline.ready
        baseline.update(value)
    assert baseline.expected() == pytest.approx(50.0, rel=0.1)
    again = Baseline(20)
    again.load_state_dict(json.loads(json.dumps(baseline.state_dict())))
    again.restart()
    for value in noisy(5):
        assert not again.ready
        again.update(value)
    assert again.ready
