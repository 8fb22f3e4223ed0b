"""The loss-spike watchdog: what it reports, when, and that it lacks the defects of the published one."""

from __future__ import annotations

import math

import pytest

from holdfast.resilience import LossSpikeWatchdog


def feed(watchdog, losses, start=0):
    """Return the reports by step."""
    reports = {step: watchdog.update(loss, step) for step, loss in enumerate(losses, start)}
    return {step: report for step, report in reports.items() if report is not None}


def test_a_sustained_spike_is_reported_once_with_what_to_do():
    watchdog = LossSpikeWatchdog(threshold_ratio=5.0, sustain_steps=10, min_history=200)
    reports = feed(watchdog, [1.0] * 300 + [6.0] * 100 + [1.0] * 20 + [6.0] * 20)
    report = {"rollback_to_step": 200, "skip_batches": 200, "reason": "loss_spike_sustained"}
    assert reports == {310: report, 430: {**report, "rollback_to_step": 320}}


@pytest.mark.parametrize("spike", [[6.0] * 10, [4.9] * 100, [6.0] * 9 + [1.0] + [6.0] * 9])
def test_a_short_or_small_spike_is_not_reported(spike):
    watchdog = LossSpikeWatchdog(threshold_ratio=5.0, sustain_steps=10, min_history=50)
    assert feed(watchdog, [1.0] * 60 + spike + [1.0] * 20) == {}


def test_nothing_is_judged_before_min_history():
    watchdog = LossSpikeWatchdog(threshold_ratio=5.0, sustain_steps=3, min_history=50)
    assert feed(watchdog, [1.0] * 20 + [9.0] * 29) == {}


def test_nan_neither_hides_a_spike_nor_enters_the_minimum():
    watchdog = LossSpikeWatchdog(threshold_ratio=5.0, sustain_steps=5, min_history=10)
    losses = [1.0] * 5 + [math.nan, -math.inf] + [1.0] * 10 + [6.0, 6.0, math.nan, 6.0, math.inf, 6.0, 6.0]
    assert list(feed(watchdog, losses)) == [22]


def test_a_spike_longer_than_the_history_is_still_one():
    watchdog = LossSpikeWatchdog(threshold_ratio=5.0, sustain_steps=50, min_history=5)
    assert list(feed(watchdog, [1.0] * 5 + [6.0] * 60)) == [55]


def test_after_a_rollback_that_did_not_help_it_is_reported_again():
    watchdog = LossSpikeWatchdog(threshold_ratio=5.0, sustain_steps=5, min_history=10)
    assert list(feed(watchdog, [1.0] * 10 + [6.0] * 6)) == [15]
    assert list(feed(watchdog, [6.0] * 6, start=8)) == [13]


def test_its_state_is_saved_and_loaded():
    one, other = (LossSpikeWatchdog(threshold_ratio=5.0, sustain_steps=5, min_history=10) for _ in range(2))
    feed(one, [1.0] * 12 + [6.0] * 3)
    other.load_state_dict(one.state_dict())
    assert list(feed(other, [6.0] * 5, start=15)) == [17]


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="min_history=0"):
        LossSpikeWatchdog(min_history=0)
