"""The course of a series: level, trend, scale and tail, and what does not move them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from feeding import ar1, noisy
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.detectors.baseline import NORMAL_TAIL, Course


def fed(values, start: int = 32, *, falling: bool = True) -> Course:
    course = Course(start, falling=falling)
    for value in values:
        course.update(float(value))
    return course


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(-1e6, 1e6) | st.sampled_from([1e149, -1e149, 0.0]), min_size=1, max_size=120),
    st.integers(1, 20),
    st.booleans(),
)
def test_course_is_finite_and_has_a_scale_whatever_it_is_fed(values, start, falling):
    course = fed(values, start, falling=falling)
    if course.ready:
        assert math.isfinite(course.expected())
        assert 0 < course.scale < math.inf
        assert 2.0 <= course.tail <= 60.0
        assert 0.0 <= course.kinship() <= 1.0
        assert math.isfinite(course.reach(8.0))
        assert course.trend <= 0 or not falling


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 1000), st.integers(1, 40), st.integers(100, 2500))
def test_values_given_together_and_one_by_one_make_the_same_course(seed, start, count):
    values = noisy(count, seed, noise=0.1)
    one_by_one, together = fed(values, start), Course(start)
    at = 0
    while at < count:
        if together.ready:
            some = values[at : at + together.room()]
            together.extend(some)
            at += len(some)
        else:
            together.update(values[at])
            at += 1
    assert json.dumps(together.state_dict()) == json.dumps(one_by_one.state_dict())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, -1e308, 1e150])
def test_course_takes_in_nothing_that_is_not_finite_or_beyond_arithmetic(value):
    clean, dirty = fed(noisy(100), 20), Course(20)
    for one in noisy(100):
        dirty.update(value)
        dirty.update(one)
    assert dirty.state_dict() == clean.state_dict()


def test_course_goes_on_along_a_falling_line_and_is_level_on_a_rising_one():
    falling, rising = fed(10 - 0.1 * np.arange(32)), fed(10 + 0.1 * np.arange(32))
    assert falling.expected() == pytest.approx(10 - 0.1 * 32)
    assert rising.expected() == pytest.approx(10 + 0.1 * 31)
    assert falling.scale == pytest.approx(1e-3 * falling.level, rel=1e-3), "there is no noise around the line"


def test_rise_is_never_learned_as_a_trend():
    course = fed(noisy(300))
    for value in 2.2 + 0.01 * np.arange(200):
        course.update(float(value))
        assert course.trend <= 0


def test_scale_of_a_course_is_the_deviation_of_its_noise_from_the_start():
    at_first = [fed(noisy(32, seed, 1.0, 0.1)).scale for seed in range(40)]
    later = [fed(noisy(500, seed, 1.0, 0.1)).scale for seed in range(40)]
    assert np.median(at_first) == pytest.approx(0.1, rel=0.2)
    assert np.median(later) == pytest.approx(0.1, rel=0.15)
    assert max(later) < 0.2


def test_limits_reach_farther_while_the_scale_is_known_from_few_values():
    courses = [fed(noisy(count, 1)) for count in (32, 64, 400, 4000)]
    shares = [c.reach(1.0) / c.scale / max(1.0, c.tail / NORMAL_TAIL) for c in courses]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 1.01


def test_tail_grows_where_single_values_are_out_again_and_again_and_not_for_one():
    random = np.random.default_rng(0)
    normal, heavy = fed(2 + 0.05 * random.normal(size=3000)), fed(2 + 0.05 * random.standard_t(2, size=3000))
    assert normal.tail < 3.0 < heavy.tail
    normal.outlier(40.0)
    assert normal.tail <= 4.5
    for _ in range(4):
        normal.outlier(40.0)
    assert normal.tail > 20.0


@pytest.mark.parametrize(("rho", "low", "high"), [(0.0, 0.0, 0.2), (0.8, 0.4, 0.95)])
def test_kinship_tells_neighbours_that_are_alike_from_those_that_are_not(rho, low, high):
    seen = [fed(2.2 + 0.05 * ar1(3000, seed, rho)).kinship() for seed in range(8)]
    assert low <= np.median(seen) <= high


def test_value_far_out_moves_it_no_more_than_one_two_deviations_out():
    near, far = fed(noisy(64)), fed(noisy(64))
    near.update(near.expected() + 3.0 * near.scale)
    far.update(far.expected() + 1e6 * far.scale)
    assert far.level == pytest.approx(near.level)


def test_level_that_dropped_is_followed_in_a_few_blocks():
    course = fed(noisy(2000) + noisy(48, 1, level=1.0))
    assert course.expected() == pytest.approx(1.0, abs=0.1)
    assert abs(course.trend) < 0.01


def test_restarted_course_learns_anew_and_remembers_how_long_to():
    course = fed(noisy(100), 20)
    course.restart(5)
    for value in noisy(5, level=50.0):
        assert not course.ready
        course.update(value)
    assert course.expected() == pytest.approx(50.0, rel=0.1)
    again = Course(20)
    again.load_state_dict(json.loads(json.dumps(course.state_dict())))
    again.restart()
    for value in noisy(5):
        assert not again.ready
        again.update(value)
    assert again.ready
