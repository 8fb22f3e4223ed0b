"""The size of the update: the earliest sign of a spike, on record and never acted on."""

from __future__ import annotations

import numpy as np
from feeding import noisy, signal, watch_field

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Kind, Severity
from holdfast.core.detectors import LossSpike, UpdateSpike


def test_update_far_over_its_course_is_noted_steps_before_the_loss_spikes():
    """Adam's second moment lags behind a gradient that grows, and the loss follows a few steps later."""
    random = np.random.default_rng(0)
    losses = np.array(noisy(600, 1))
    updates = 0.2 * np.exp(0.1 * random.normal(size=600))
    updates[500:506] *= [2.0, 6.0, 9.0, 9.0, 6.0, 2.0]
    losses[505:540] *= 1.6
    precursor, spike = UpdateSpike(DetectSection()), LossSpike(DetectSection())
    noted, acted = [], []
    for step, (loss, update) in enumerate(zip(losses, updates, strict=True), 1):
        seen = signal(step, float(loss), 1.0, update_rms=float(update))
        noted += [f for f in [precursor.observe(seen)] if f is not None]
        acted += [f for f in [spike.observe(seen)] if f is not None]
    assert noted[0].step == 502
    assert acted[0].step == 506
    assert (noted[0].kind, noted[0].severity) == (Kind.UPDATE_SPIKE, Severity.NOTE)
    assert noted[0].evidence["update_rms"] > 3 * noted[0].evidence["expected"]


def test_it_sets_no_limit_for_the_gate_and_listens_to_none():
    detector = UpdateSpike(DetectSection())
    watch_field(detector, "update_rms", noisy(100, level=0.2))
    assert detector.limits() == {}
    assert watch_field(detector, "update_rms", [5.0], first=101, grad_limit=1e9) != []


def test_update_under_three_times_its_course_is_left_alone():
    detector = UpdateSpike(DetectSection())
    assert watch_field(detector, "update_rms", [*noisy(300, level=0.2), 0.55, 0.0]) == []


def test_updates_that_stay_large_under_a_normal_loss_become_the_new_course():
    detector = UpdateSpike(DetectSection())
    found = watch_field(detector, "update_rms", noisy(300, level=0.2) + noisy(200, level=2.0))
    assert [f.step for f in found] == list(range(301, 309))
    assert all(f.severity is Severity.NOTE for f in found)


def test_step_without_an_update_size_is_passed_over():
    assert watch_field(UpdateSpike(DetectSection()), "update_rms", [None] * 100) == []
