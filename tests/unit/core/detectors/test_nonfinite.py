"""NaN and Inf, by the number or by the gate's flag."""

from __future__ import annotations

import math

import pytest
from feeding import signal

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Flag, Kind, Severity
from holdfast.core.detectors import NonFinite


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_loss_is_found_by_the_number_or_by_the_flag(value):
    for seen in (
        signal(7, value, None),
        signal(7, value, 1.0, flags=int(Flag.LOSS_NONFINITE)),
        signal(7, 2.0, 1.0, flags=int(Flag.LOSS_NONFINITE)),
    ):
        found = NonFinite(DetectSection()).observe(seen)
        assert (found.kind, found.severity, found.onset) == (Kind.NONFINITE_LOSS, Severity.SKIP, 7)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_gradient_under_a_finite_loss_is_found(value):
    for seen in (signal(7, 2.0, value), signal(7, 2.0, None, flags=int(Flag.GRAD_NONFINITE))):
        found = NonFinite(DetectSection()).observe(seen)
        assert (found.kind, found.severity) == (Kind.NONFINITE_GRAD, Severity.SKIP)


def test_loss_comes_before_the_gradient():
    assert NonFinite(DetectSection()).observe(signal(7, math.nan, math.nan)).kind == Kind.NONFINITE_LOSS


def test_overflow_of_the_loss_scaler_is_no_finding():
    assert NonFinite(DetectSection()).observe(signal(7, 2.0, math.inf, overflow=True, loss_scale=65536.0)) is None
    assert NonFinite(DetectSection()).observe(signal(7, math.nan, math.inf, overflow=True)) is None


@pytest.mark.parametrize("seen", [signal(1, 2.0), signal(1, 2.0, None), signal(1, 1e308, 1e308), signal(1, 0.0, 0.0)])
def test_finite_numbers_of_any_size_are_left_alone(seen):
    assert NonFinite(DetectSection()).observe(seen) is None


def test_nonfinite_is_found_at_the_first_step_and_right_after_a_declared_shift():
    detector = NonFinite(DetectSection())
    assert detector.observe(signal(1, math.nan)) is not None
    detector.rebaseline()
    assert detector.observe(signal(2, math.nan)) is not None
    assert detector.limits() == {}
