"""Learning rates: a jump, a restart, a freeze in mid-decay, zero; and the schedules that are healthy."""

from __future__ import annotations

import math

import pytest
from feeding import watch_field

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Flag, Kind, Severity
from holdfast.core.detectors import LearningRate


def watch_rates(rates, **more) -> list[Finding]:
    return watch_field(LearningRate(DetectSection()), "lr", rates, **more)


def cosine(n: int, total: int = 2000, warmup: int = 100, floor: float = 0.1) -> float:
    if n < warmup:
        return 1e-3 * (n + 1) / warmup
    return 1e-3 * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, (n - warmup) / (total - warmup)))))


HEALTHY = {
    "constant": [1e-3] * 3000,
    "warm-up, then constant": [1e-3 * min(1.0, (n + 1) / 200) for n in range(3000)],
    "cosine to a tenth, and on": [cosine(n) for n in range(4000)],
    "cosine to zero": [cosine(n, floor=0.0) for n in range(2000)],
    "warm-up, stable, decay": [
        1e-3 * min(1.0, (n + 1) / 200) * (1.0 if n < 2000 else max(0.05, 1 - (n - 2000) / 500)) for n in range(3000)
    ],
    "inverse square root": [1e-3 * min((n + 1) / 200, (200 / (n + 1)) ** 0.5) for n in range(3000)],
    "steps down": [1e-3 * 0.1 ** (n // 1000) for n in range(4000)],
    "fast exponential warm-up": [1e-6 * 1.4 ** min(n, 20) for n in range(1000)],
    "cycle": [1e-3 * (0.1 + 0.9 * abs(1 - (n % 600) / 300)) for n in range(3000)],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_schedule_is_left_alone(name):
    assert watch_rates(HEALTHY[name]) == []


def test_jump_above_anything_before_is_noted():
    (found,) = watch_rates([1e-3] * 100 + [1e-2] * 100)
    assert (found.kind, found.severity, found.step, found.onset) == (Kind.LR_JUMP, Severity.NOTE, 101, 101)
    assert found.evidence == {"lr": 1e-2, "before": 1e-3, "ratio": pytest.approx(10), "peak": 1e-3, "restart": False}


def test_jump_back_towards_the_peak_is_told_apart_as_a_restart():
    rates = [1e-3 * (0.5 + 0.5 * math.cos(math.pi * (n % 500) / 500)) for n in range(1200)]
    found = watch_rates(rates)
    assert [(f.step, f.evidence["restart"]) for f in found] == [(501, True), (1001, True)]


def test_growth_step_by_step_is_no_jump():
    assert watch_rates([1e-3] * 100 + [1e-3 * 1.04**n for n in range(1, 100)]) == []


def test_rate_that_stops_in_the_middle_of_its_decay_is_noted_once():
    decaying = [cosine(n) for n in range(1000)]
    (found,) = watch_rates(decaying + decaying[-1:] * 1000)
    assert (found.kind, found.severity) == (Kind.LR_FROZEN, Severity.NOTE)
    assert found.onset == 1001
    assert found.step == 1200
    assert found.evidence["lr"] == decaying[-1]


def test_rate_that_stops_at_the_end_of_its_decay_is_not_frozen():
    assert watch_rates([cosine(n) for n in range(2000)] + [1e-4] * 1000) == []


def test_rate_that_is_zero_for_long_is_noted_and_zero_from_the_first_is_not():
    (found,) = watch_rates([1e-3] * 50 + [0.0] * 300)
    assert (found.kind, found.step) == (Kind.LR_FROZEN, 101)
    assert watch_rates([0.0] * 300) == []


def test_rate_that_moves_on_after_a_freeze_may_freeze_again():
    decaying = [cosine(n) for n in range(600)]
    later = [cosine(n) for n in range(600, 900)]
    found = watch_rates(decaying + decaying[-1:] * 300 + later + later[-1:] * 300)
    assert [f.kind for f in found] == [Kind.LR_FROZEN, Kind.LR_FROZEN]


def test_declared_shift_may_move_the_rate():
    detector = LearningRate(DetectSection())
    watch_field(detector, "lr", [1e-3] * 100)
    detector.rebaseline()
    assert watch_field(detector, "lr", [1e-2] * 100, first=101) == []


@pytest.mark.parametrize("junk", [None, math.nan, math.inf, -1.0])
def test_rate_that_is_no_rate_is_passed_over(junk):
    assert watch_rates([1e-3, junk] * 100 + [1e-3] * 50) == []


def test_steps_that_did_not_land_are_passed_over():
    detector = LearningRate(DetectSection())
    watch_field(detector, "lr", [1e-3] * 100)
    assert watch_field(detector, "lr", [1.0], first=101, overflow=True) == []
    assert watch_field(detector, "lr", [1.0], first=101, flags=int(Flag.GRAD_HIGH)) == []
    assert watch_field(detector, "lr", [1e-3] * 10, first=101) == []
