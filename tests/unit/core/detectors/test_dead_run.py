"""A record that does not move, and one that only looks so."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from feeding import noisy, signal, watch

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Kind, Severity
from holdfast.core.detectors import DeadRun


def both(losses, norms, **more):
    detector = DeadRun(DetectSection())
    said = [detector.observe(signal(n, x, g, **more)) for n, (x, g) in enumerate(zip(losses, norms, strict=True), 1)]
    return [f for f in said if f is not None]


def test_all_zero_record_is_noted_once_after_32_records():
    (found,) = both([0.0] * 1000, [0.0] * 1000)
    assert (found.kind, found.severity, found.step, found.onset) == (Kind.DEAD_RUN, Severity.NOTE, 32, 1)
    assert found.evidence["records"] == 32


def test_constant_record_is_noted_after_200_records():
    (found,) = both([0.6931] * 1000, [0.25] * 1000)
    assert (found.step, found.onset) == (200, 1)


def test_loss_alone_takes_twice_as_long():
    assert [f.step for f in watch(DeadRun(DetectSection()), [0.0] * 1000)] == [64]
    assert [f.step for f in watch(DeadRun(DetectSection()), [2.0] * 1000)] == [400]


def test_run_that_dies_later_is_noted_from_where_it_died():
    (found,) = both(noisy(300) + [2.2] * 300, [1.0] * 600)
    assert (found.step, found.onset) == (500, 301)


def test_constant_loss_under_a_gradient_that_lives_is_left_alone():
    assert both([2.0] * 1000, noisy(1000)) == []


def test_zero_loss_under_a_gradient_that_lives_is_left_alone():
    assert both([0.0] * 1000, noisy(1000)) == []


@pytest.mark.parametrize("digits", [1, 2])
def test_quantised_record_that_is_alive_is_left_alone(digits):
    losses = np.round(noisy(5000, 1), digits)
    assert both(losses.tolist(), np.round(noisy(5000, 2, level=1.0, noise=0.2), digits).tolist()) == []
    assert watch(DeadRun(DetectSection()), losses) == []


def test_norm_that_is_no_number_does_not_pass_for_a_norm_that_stands_still():
    assert both([2.0] * 300, [math.nan] * 300) == both([2.0] * 300, [float("nan") for _ in range(300)])
    detector = DeadRun(DetectSection())
    detector.observe(signal(1, 2.0, math.nan))
    json.dumps(detector.state_dict(), allow_nan=False)


def test_declared_shift_begins_to_count_anew():
    detector = DeadRun(DetectSection())
    for first in (1, 31, 61):
        assert [f for n in range(30) if (f := detector.observe(signal(first + n, 0.0, 0.0)))] == []
        detector.rebaseline()
