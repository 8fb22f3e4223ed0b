"""fp16: a scale that collapses, overflows that do not end, a scaler that was never engaged; and the sawtooth of health."""

from __future__ import annotations

import math

import pytest
from feeding import signal, watch_field

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Kind, Severity
from holdfast.core.detectors import LossScale


def overflow(detector: LossScale, step: int, scale: float | None = None) -> Finding | None:
    return detector.observe(signal(step, 2.0, math.inf, overflow=True, loss_scale=scale))


def test_sawtooth_of_a_dynamic_scale_is_healthy():
    """Doubled after 2000 good steps, halved by an overflow, for 20,000 steps; and the first steps, which find the level."""
    detector, scale, good = LossScale(DetectSection()), 2.0**24, 0
    for step in range(1, 20_001):
        if scale > 65536.0:
            assert overflow(detector, step, scale) is None
            scale, good = scale / 2, 0
            continue
        assert detector.observe(signal(step, loss_scale=scale)) is None
        good += 1
        if good == 2000:
            scale, good = scale * 2, 0


def test_overflows_are_no_finding_until_they_are_a_streak():
    detector = LossScale(DetectSection(overflow_streak=32))
    seen = [overflow(detector, n, 65536.0) for n in range(1, 66)]
    assert [n for n, f in enumerate(seen, 1) if f is not None] == [32, 64]
    found = seen[31]
    assert (found.kind, found.severity, found.onset) == (Kind.SCALE_COLLAPSE, Severity.ROLLBACK, 1)
    assert found.evidence == {"overflows_in_a_row": 32, "loss_scale": 65536.0}


def test_one_good_step_ends_the_streak():
    detector = LossScale(DetectSection(overflow_streak=4))
    for first in (1, 5, 9):
        assert all(overflow(detector, first + n) is None for n in range(3))
        assert detector.observe(signal(first + 3)) is None
    assert [overflow(detector, 20 + n) is not None for n in range(4)] == [False, False, False, True]


def test_declared_shift_does_not_end_a_streak():
    detector = LossScale(DetectSection(overflow_streak=4))
    for n in range(3):
        overflow(detector, n)
    detector.rebaseline()
    assert overflow(detector, 3) is not None


def test_scale_under_one_is_noted_once_until_it_has_recovered():
    detector = LossScale(DetectSection())
    assert overflow(detector, 5, 1.0) is None
    noted = overflow(detector, 6, 0.5)
    assert (noted.kind, noted.severity, noted.onset) == (Kind.SCALE_COLLAPSE, Severity.NOTE, 5)
    assert overflow(detector, 7, 0.25) is None
    assert detector.observe(signal(8, loss_scale=0.25)) is None
    assert overflow(detector, 9, 0.125) is None, "it has not been back at one"
    assert detector.observe(signal(10, loss_scale=1.0)) is None
    assert overflow(detector, 11, 0.5) is not None


def test_collapse_is_seen_in_a_log_that_has_only_the_scale():
    found = watch_field(LossScale(DetectSection()), "loss_scale", [4.0, 2.0, 1.0, 0.5, 0.25])
    assert [(f.step, f.kind) for f in found] == [(4, Kind.SCALE_COLLAPSE)]


def test_scale_that_never_moves_is_noted_as_not_engaged():
    found = watch_field(LossScale(DetectSection()), "loss_scale", [1024.0] * 8000)
    assert [(f.step, f.onset, f.kind, f.severity) for f in found] == [(6001, 1, Kind.SCALE_STUCK, Severity.NOTE)]
    assert found[0].evidence["loss_scale"] == 1024.0


@pytest.mark.parametrize("scales", [[1.0] * 8000, [None] * 8000, [2.0 ** (n // 5000) for n in range(20_000)]])
def test_scale_of_one_no_scale_and_one_that_grows_now_and_then_are_not_stuck(scales):
    assert watch_field(LossScale(DetectSection()), "loss_scale", scales) == []


def test_scale_that_is_not_a_number_is_not_a_scale():
    assert watch_field(LossScale(DetectSection()), "loss_scale", [1024.0, math.nan, 1024.0]) == []
