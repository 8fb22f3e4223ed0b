"""The norm of the weights, over two hundred steps."""

from __future__ import annotations

import json
import math

import pytest
from feeding import watch_field

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Flag, Kind, Severity
from holdfast.core.detectors import WeightNorm


def watch_weights(norms, first: int = 1, **more):
    return watch_field(WeightNorm(DetectSection()), "weight_norm", norms, first, **more)


@pytest.mark.parametrize(("rate", "way"), [(1.01, "grew"), (0.99, "shrank")])
def test_norm_that_doubles_or_halves_in_two_hundred_steps_is_noted_once(rate, way):
    (found,) = watch_weights([50.0] * 300 + [50.0 * rate**n for n in range(300)] + [50.0 * rate**300] * 10)
    assert (found.kind, found.severity) == (Kind.WEIGHT_NORM, Severity.NOTE)
    assert way in found.message
    assert found.evidence["steps"] == found.step - found.onset <= 200
    ratio = found.evidence["ratio"]
    assert max(ratio, 1 / ratio) == pytest.approx(2.0, rel=0.02)


def test_slow_growth_is_left_alone():
    assert watch_weights([50.0 * 1.003**n for n in range(2000)]) == []


def test_early_growth_counts_from_the_warm_up_on():
    norms = [1.0 + n for n in range(40)] + [41.0] * 300
    assert watch_weights(norms) == []
    assert watch_field(WeightNorm(DetectSection(warmup_steps=1)), "weight_norm", norms) != []


def test_norm_that_settled_may_be_noted_again():
    found = watch_weights([10.0] * 100 + [30.0] * 400 + [90.0] * 400)
    assert [f.step for f in found] == [101, 501]


def test_norms_measured_now_and_then_are_compared_within_two_hundred_steps():
    detector = WeightNorm(DetectSection())
    found = [f for n in range(40) for f in watch_field(detector, "weight_norm", [10.0 * 1.2**n], first=100 + 50 * n)]
    assert [f.evidence["steps"] for f in found] == [200]
    detector = WeightNorm(DetectSection())
    assert [f for n in range(9) for f in watch_field(detector, "weight_norm", [10.0 * 3**n], first=100 + 201 * n)] == []


@pytest.mark.parametrize("junk", [None, 0.0, -3.0])
def test_norm_that_is_none_is_passed_over(junk):
    detector = WeightNorm(DetectSection())
    watch_field(detector, "weight_norm", [50.0] * 100)
    before = json.dumps(detector.state_dict())
    assert watch_field(detector, "weight_norm", [junk], first=101) == []
    assert watch_field(detector, "weight_norm", [500.0], first=101, flags=int(Flag.LOSS_HIGH)) == []
    assert json.dumps(detector.state_dict()) == before


@pytest.mark.parametrize("norm", [500.0, 1e30, math.inf, math.nan])
def test_norm_that_no_update_could_have_made_asks_for_a_return(norm):
    detector = WeightNorm(DetectSection())
    watch_field(detector, "weight_norm", [50.0] * 100)
    before = json.dumps(detector.state_dict())
    (found,) = watch_field(detector, "weight_norm", [norm], first=150)
    assert (found.kind, found.severity, found.step, found.onset) == (Kind.STATE_JUMP, Severity.ROLLBACK, 150, 101)
    assert (found.evidence["before"], found.evidence["steps"]) == (50.0, 50)
    assert repr(found.evidence["weight_norm"]) == repr(norm)
    assert json.dumps(detector.state_dict()) == before, "it is not learned: it is found again until it is gone"


def test_norm_under_ten_times_the_last_one_is_only_noted():
    (found,) = watch_weights([50.0] * 100 + [499.0])
    assert (found.kind, found.severity) == (Kind.WEIGHT_NORM, Severity.NOTE)


def test_jump_is_measured_against_the_last_measurement_and_not_before_the_warm_up():
    assert watch_weights([10.0, 1e4] * 20) == [], "the warm-up is 40 steps"
    grew = [10.0 * 3**n for n in range(20)]
    assert Severity.ROLLBACK not in {f.severity for f in watch_weights(grew, first=100)}


@pytest.mark.parametrize("norms", [[1e300, 1e-300], [1.0, 5e-324]])
def test_fall_beyond_arithmetic_is_noted_and_breaks_nothing(norms):
    (found,) = watch_weights(norms, first=100)
    assert found.severity is Severity.NOTE
    assert (found.evidence["before"], found.evidence["weight_norm"]) == tuple(norms)
    assert json.dumps(found.evidence, allow_nan=False)


@pytest.mark.parametrize("norms", [[1e-300, 1e300], [5e-324, 1.0]])
def test_rise_beyond_arithmetic_is_a_jump_and_breaks_nothing(norms):
    (found,) = watch_weights(norms, first=100)
    assert (found.kind, found.severity) == (Kind.STATE_JUMP, Severity.ROLLBACK)
    assert (found.evidence["before"], found.evidence["weight_norm"]) == tuple(norms)
    assert json.dumps(found.evidence, allow_nan=False)


def test_declared_shift_forgets_the_norms():
    detector = WeightNorm(DetectSection())
    watch_field(detector, "weight_norm", [10.0] * 100)
    detector.rebaseline()
    assert watch_field(detector, "weight_norm", [30.0] * 100, first=101) == []
