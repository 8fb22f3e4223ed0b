"""The size of the update: the earliest sign of a spike, on record only; and second moments that no update made."""

from __future__ import annotations

import json

import numpy as np
import pytest
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


# ---- second moments


def adam_sizes(norms, beta2: float = 0.999, scaled_at: int | None = None, scale: float = 1.0) -> list[float]:
    """Return the size of Adam's update for each gradient norm. `scaled_at`: something multiplies the second moment there."""
    moment, sizes = 0.0, []
    for step, norm in enumerate(norms, 1):
        moment = moment * (scale if step == scaled_at else 1.0)
        moment = beta2 * moment + (1 - beta2) * norm**2
        sizes.append(float(norm / np.sqrt(moment / (1 - beta2**step))))
    return sizes


def watch_adam(detector: UpdateSpike, norms, **more):
    sizes = adam_sizes(norms, **more)
    said = [
        detector.observe(signal(n, 2.0, float(norm), update_rms=size))
        for n, (norm, size) in enumerate(zip(norms, sizes, strict=True), 1)
    ]
    return [f for f in said if f is not None and f.kind == Kind.STATE_JUMP]


NORMS = np.exp(0.1 * np.random.default_rng(3).normal(size=600))


@pytest.mark.parametrize("scale", [1e4, 1e8, 1e30])
def test_second_moment_that_no_update_made_asks_for_a_return_to_before_it(scale):
    (found, *_) = watch_adam(UpdateSpike(DetectSection()), NORMS, scaled_at=400, scale=scale)
    assert (found.severity, found.onset, found.step) == (Severity.ROLLBACK, 400, 408)
    assert found.evidence["ratio"] == pytest.approx(np.sqrt(scale), rel=0.5)


@pytest.mark.parametrize("beta2", [0.9, 0.95, 0.999])
@pytest.mark.parametrize("steps", [1, 3, 8, 40])
@pytest.mark.parametrize("times", [3.0, 30.0, 300.0, 3000.0])
def test_surge_of_the_gradient_is_no_jump_of_the_second_moment(beta2, steps, times):
    """A gradient of 300 times lifts the second moment as far as it can, and stays there for long."""
    norms = NORMS.copy()
    norms[400 : 400 + steps] *= times
    assert watch_adam(UpdateSpike(DetectSection()), norms, beta2=beta2) == []


def test_gradient_that_rises_for_good_is_no_jump_of_the_second_moment():
    norms = NORMS * np.where(np.arange(600) < 400, 1.0, 300.0)
    assert watch_adam(UpdateSpike(DetectSection()), norms) == []


def test_second_moment_that_is_back_within_eight_steps_is_left_alone():
    detector = UpdateSpike(DetectSection())
    sizes = adam_sizes(NORMS)
    sizes[400:407] = [size / 1e3 for size in sizes[400:407]]
    said = [
        detector.observe(signal(n, 2.0, float(norm), update_rms=size))
        for n, (norm, size) in enumerate(zip(NORMS, sizes, strict=True), 1)
    ]
    assert Kind.STATE_JUMP not in {f.kind for f in said if f is not None}


def test_jump_of_the_second_moment_is_found_after_a_restart_in_the_middle():
    detector = UpdateSpike(DetectSection())
    found, sizes = [], adam_sizes(NORMS, scaled_at=400, scale=1e8)
    for n, (norm, size) in enumerate(zip(NORMS, sizes, strict=True), 1):
        if n == 404:
            state = json.loads(json.dumps(detector.state_dict()))
            detector = UpdateSpike(DetectSection())
            detector.load_state_dict(state)
        found += [detector.observe(signal(n, 2.0, float(norm), update_rms=size))]
    assert [(f.step, f.onset) for f in found if f is not None and f.kind == Kind.STATE_JUMP][:1] == [(408, 400)]
