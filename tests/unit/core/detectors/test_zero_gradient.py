"""Gradients that are exactly zero for several steps, and losses that are zero by nature."""

from __future__ import annotations

import math

import numpy as np
import pytest
from feeding import noisy, signal
from test_scan import Log, row_by_row, scan

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Kind, Severity
from holdfast.core.detectors import ZeroGradient


def found(norms, losses=None, **more):
    detector, losses = ZeroGradient(DetectSection()), losses or [2.0] * len(norms)
    pairs = enumerate(zip(losses, norms, strict=True), 1)
    return [f for n, (x, g) in pairs if (f := detector.observe(signal(n, x, g, **more))) is not None]


def test_zero_norms_are_noted_once_after_8_records():
    (finding,) = found([0.0] * 1000, noisy(1000))
    assert (finding.kind, finding.severity) == (Kind.ZERO_GRADIENT, Severity.NOTE)
    assert (finding.step, finding.onset, finding.evidence["records"]) == (8, 1, 8)


def test_zero_norms_later_in_a_run_are_noted_from_where_they_began():
    (finding,) = found([1.0] * 50 + [0.0] * 20)
    assert (finding.step, finding.onset) == (58, 51)


@pytest.mark.parametrize("norms", [[1.0, *[0.0] * 7] * 20, noisy(100), [None] * 100])
def test_fewer_zeros_in_a_row_and_missing_norms_are_left_alone(norms):
    assert found(norms) == []


def test_a_loss_of_zero_counts_only_until_the_first_gradient():
    assert [f.step for f in found([0.0] * 100, [0.0] * 100)] == [8]
    assert found([1.0] * 5 + [0.0] * 95, [1.0] * 5 + [0.0] * 95) == []


def test_steps_that_were_not_applied_do_not_count():
    assert found([0.0] * 100, flags=1) == found([0.0] * 100, overflow=True) == []


def test_a_norm_that_is_no_number_neither_counts_nor_interrupts():
    (finding,) = found([0.0] * 4 + [math.nan, math.inf] + [0.0] * 4)
    assert (finding.step, finding.evidence["records"]) == (10, 8)


def test_declared_shift_begins_to_count_again():
    detector = ZeroGradient(DetectSection())
    for first in (1, 8, 15):
        assert [f for n in range(7) if (f := detector.observe(signal(first + n, 2.0, 0.0)))] == []
        detector.rebaseline()


@pytest.mark.parametrize("norms", [[0.0] * 30, [1.0] * 20 + [0.0] * 10, [0.0] * 7 + [1.0] + [0.0] * 9])
def test_a_log_is_judged_as_the_run_was(norms):
    log = Log(np.arange(1.0, len(norms) + 1))
    log.columns = {"loss": np.array(noisy(len(norms))), "grad_norm": np.array(norms)}
    log.present = {name: np.ones(len(norms), bool) for name in log.columns}
    kinds = [
        [f for f in each if f.kind == Kind.ZERO_GRADIENT] for each in (scan(log), row_by_row(log, DetectSection()))
    ]
    assert kinds[0] == kinds[1] and len(kinds[0]) == 1
