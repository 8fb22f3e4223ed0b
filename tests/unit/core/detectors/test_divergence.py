"""Silent divergence: fast, slow, forgiven, expected; and what it says of losses under zero."""

from __future__ import annotations

import math

import numpy as np
import pytest
from feeding import ar1, costly, noisy, signal, watch

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Flag, Kind, Severity
from holdfast.core.detectors import Divergence


def fresh(**config) -> Divergence:
    return Divergence(DetectSection(**config))


def with_lr(losses, rates) -> list[Finding]:
    detector = fresh()
    said = [
        detector.observe(signal(n, float(loss), None, lr=float(lr)))
        for n, (loss, lr) in enumerate(zip(losses, rates, strict=True), 1)
    ]
    return [f for f in said if f is not None]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [1.1, 1.5, 5.0])
def test_fast_divergence_is_found_within_eighty_steps_and_said_once(seed, size):
    losses = np.array(noisy(2000, seed))
    losses[1200:] *= size
    (found,) = watch(fresh(), losses)
    assert (found.kind, found.severity, found.new) == (Kind.DIVERGENCE, Severity.ROLLBACK, True)
    assert 1200 < found.step <= 1280
    assert 1200 - 32 <= found.onset <= 1216
    assert found.evidence["level"] > found.evidence["limit"] > found.evidence["best"]
    assert found.evidence["blocks_above"] == 3


@pytest.mark.parametrize("seed", range(4))
def test_slow_divergence_is_found_before_it_has_cost_a_tenth(seed):
    losses = np.array(noisy(4000, seed)) * (1 + np.maximum(0, np.arange(4000) - 1500) * 5e-5)
    found = watch(fresh(), losses)
    assert found[0].severity is Severity.ROLLBACK
    assert 1500 < found[0].step < 3500


@pytest.mark.parametrize(
    "seed",
    [
        0,
        1,
        2,
        3,
    ],
)
def test_divergence_is_said_once_until_there_is_a_new_best_level(seed):
    """A slow one hovers about the limit at first."""
    losses = np.array(noisy(4000, seed)) * (1 + np.maximum(0, np.arange(4000) - 1500) * 5e-5)
    assert len(watch(fresh(), losses)) == 1


def test_slow_divergence_in_noise_wider_than_its_rise_a_block_is_found():
    losses = np.array(noisy(8000, 3, noise=0.15)) * (1 + np.maximum(0, np.arange(8000) - 3000) * 1e-4)
    assert len(costly(watch(fresh(), losses))) == 1


@pytest.mark.parametrize("size", [1.02, 0.9])
def test_level_a_little_higher_or_lower_is_left_alone(size):
    losses = np.array(noisy(2000, 1))
    losses[1000:] *= size
    assert watch(fresh(), losses) == []


def test_single_outliers_are_not_seen_however_large():
    losses = np.array(noisy(2000, 1))
    losses[::20] *= 100
    assert watch(fresh(), losses) == []


def test_early_it_takes_more_to_be_sure():
    rises = []
    for first in (100, 1500):
        losses = np.array(noisy(3000, 2))
        losses[first:] *= 1 + 0.0004 * np.arange(3000 - first)
        rises.append(watch(fresh(), losses)[0].step - first)
    assert rises[0] > rises[1]


def test_losses_under_zero_that_rise_are_on_record_only():
    """A reward, or a bound: it may rise and mean no harm."""
    losses = np.array(noisy(1000, 1)) - 4
    losses[600:] += 1.5
    (found,) = watch(fresh(), losses)
    assert found.severity is Severity.NOTE


def test_learning_rate_that_restarts_lifts_the_loss_as_expected():
    n = np.arange(4000)
    rates = 1e-3 * (0.5 + 0.5 * np.cos(np.pi * (n % 1000) / 1000))
    losses = 2.2 * (1 + 0.15 * rates / 1e-3) * np.array(noisy(4000, 1, level=1.0))
    assert with_lr(losses, rates) == []


def test_learning_rate_that_climbs_back_in_a_cycle_lifts_the_loss_as_expected():
    n = np.arange(4000)
    rates = 1e-3 * (0.1 + 0.9 * np.abs(1 - (n % 1000) / 500))
    for seed in range(3):
        losses = 2.2 * (1 + 0.15 * rates / 1e-3) * np.array(noisy(4000, seed, level=1.0))
        assert with_lr(losses, rates) == []


def test_learning_rate_above_all_that_has_been_excuses_nothing():
    n = np.arange(3000)
    rates = 1e-3 * np.where(n < 1500, 1.0, 1 + 0.002 * (n - 1500))
    losses = np.array(noisy(3000, 1))
    losses[1500:] *= 1 + 0.0005 * np.arange(1500)
    assert len(costly(with_lr(losses, rates))) == 1


def test_staircase_of_epochs_is_forgiven_and_a_divergence_after_it_is_not():
    """Within an epoch the loss creeps up, and at its border it drops to a new best."""
    n = np.arange(5000)
    stairs = 2.0 * 0.85 ** (n // 500) * (1 + 0.04 * (n % 500) / 500) * np.array(noisy(5000, 2, level=1.0, noise=0.01))
    assert watch(fresh(), stairs) == []
    stairs[4500:] = stairs[4499] * (1 + 0.5 * np.linspace(0, 1, 500))
    assert [f.step > 4500 for f in costly(watch(fresh(), stairs))] == [True]


def test_after_a_new_best_it_may_be_said_again():
    losses = np.array(noisy(2000, 1))
    losses[600:900] *= 1.5
    losses[900:1300] *= 0.9
    losses[1300:] *= 1.5
    assert [f.step for f in costly(watch(fresh(), losses))] == [640, 1344]


def test_declared_shift_is_a_new_beginning():
    detector = fresh()
    watch(detector, noisy(1000, 1))
    detector.rebaseline()
    assert watch(detector, noisy(1000, 2, level=3.3), first=1001) == []
    assert costly(watch(detector, noisy(300, 3, level=6.6), first=2001)) != []


@pytest.mark.parametrize(
    "losses",
    [
        np.array(noisy(4000, 1)) * (1 + 8 * np.exp(-np.arange(4000) / 200)),
        2.2 + 0.05 * ar1(4000, 1, 0.8),
        2.0 + 0.1 * np.random.default_rng(3).standard_t(2, 4000),
        np.where(np.random.default_rng(4).random(4000) < 0.3, 3.0, 2.0),
        np.round(noisy(4000, 5), 1),
        np.full(4000, 2.0),
        0.01 * np.random.default_rng(6).lognormal(0, 1, 4000),
    ],
    ids=["falling", "alike", "heavy", "bimodal", "quantised", "constant", "near zero"],
)
def test_healthy_losses_are_never_called_diverged(losses):
    assert watch(fresh(), losses) == []


def test_steps_that_were_vetoed_overflowed_zero_or_not_finite_do_not_count():
    clean, dirty = fresh(), fresh()
    for step, loss in enumerate(noisy(200), 1):
        for junk in (
            signal(step, math.nan),
            signal(step, 0.0),
            signal(step, 90.0, overflow=True),
            signal(step, 90.0, flags=int(Flag.LOSS_HIGH)),
        ):
            assert dirty.observe(junk) is None
        dirty.observe(signal(step, loss))
        clean.observe(signal(step, loss))
    assert dirty.state_dict() == clean.state_dict()
