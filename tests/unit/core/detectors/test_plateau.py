"""A plateau is on record once, and only where nothing improved for long."""

from __future__ import annotations

import numpy as np
import pytest
from feeding import noisy, watch

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Kind, Severity
from holdfast.core.detectors import Plateau


@pytest.mark.parametrize("offset", [0.0, -10.0])
def test_loss_that_stopped_falling_is_noted_once(offset):
    (found,) = watch(Plateau(DetectSection(plateau_steps=1000)), [v + offset for v in noisy(5000, 1)])
    assert (found.kind, found.severity) == (Kind.PLATEAU, Severity.NOTE)
    assert found.step - found.onset == found.evidence["steps"] >= 1000
    assert found.evidence["best"] == pytest.approx(2.2 + offset, abs=0.05)


def test_plateau_that_ended_is_followed_by_another_one():
    losses = noisy(2500, 1) + noisy(2500, 2, level=1.1)
    found = watch(Plateau(DetectSection(plateau_steps=1000)), losses)
    assert [f.step > 2500 for f in found] == [False, True]


def test_loss_that_falls_slowly_is_no_plateau():
    losses = 10 * np.arange(1, 8000) ** -0.3 * np.array(noisy(7999, level=1.0, noise=0.01))
    assert watch(Plateau(DetectSection(plateau_steps=1500)), losses) == []


def test_plateau_takes_as_many_steps_as_configured():
    losses = noisy(700, 3)
    assert watch(Plateau(DetectSection(plateau_steps=2000)), losses) == []
    assert len(watch(Plateau(DetectSection(plateau_steps=300)), losses)) == 1


def test_declared_shift_begins_to_count_anew():
    detector = Plateau(DetectSection(plateau_steps=1000))
    for first in range(1, 4001, 800):
        assert watch(detector, noisy(800, first), first) == []
        detector.rebaseline()


def test_empty_stretch_of_steps_counts_as_steps():
    """Records averaged over a log interval: the plateau is counted in steps, not in records."""
    detector = Plateau(DetectSection(plateau_steps=1000))
    found = [f for n, v in enumerate(noisy(200, 1)) for f in watch(detector, [v], first=20 * n)]
    assert len(found) == 1
