"""Slowdowns of every shape are found within 20 steps with their phase, and none in healthy steps of many kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.core.detectors.slowdown import Slowdown, SlowdownDetector
from holdfast.core.profile.verdict import explain

pytestmark = pytest.mark.finds_slowdowns
STEPS = 100_000
RECORDED = Path(__file__).parent / "step_times.json"
"""milliseconds of steps of a small model on two busy cores, with an evaluation every 200 steps"""


def watch(times: np.ndarray, phases: list[dict[str, float]] | None = None, ranks: Any = None) -> list[Slowdown]:
    detector, found = SlowdownDetector(), []
    for n, seconds in enumerate(times.tolist()):
        row = {"step": n + 1, "status": "committed", "step_seconds": seconds}
        if phases is not None:
            row["phases"] = phases[n]
        slowdown = detector.observe(row, None if ranks is None else ranks[n])
        if slowdown is not None:
            found.append(slowdown)
    return found


def correlated(rng: np.random.Generator, steps: int, memory: float, spread: float) -> np.ndarray:
    """Return autoregressive noise of order one."""
    values, value = rng.standard_normal(steps) * spread * np.sqrt(1 - memory**2), spread * rng.standard_normal()
    for n in range(steps):
        value = memory * value + values[n]
        values[n] = value
    return values


def noises(rng: np.random.Generator, steps: int) -> dict[str, np.ndarray]:
    recorded = np.array(json.loads(RECORDED.read_text())) / 1e3
    starts = rng.integers(0, len(recorded) - 50, steps // 50)
    spikes = 0.05 * (1 + 0.03 * rng.standard_normal(steps))
    spikes[rng.random(steps) < 0.05] *= 4
    events = 0.05 * (1 + 0.03 * rng.standard_normal(steps))
    events[::100] += 5.0  # evaluation
    events[::37] += 0.1
    for begin in range(500, steps, 5000):  # recompilations, five in a row
        events[begin : begin + 5] += 20.0
    for begin in range(300, steps, 1000):  # a checkpoint that slows four steps down
        events[begin : begin + 4] *= 2
    bursts = 0.05 * np.exp(0.04 * rng.standard_normal(steps))
    for begin in range(100, steps - 100, 100):  # other programs
        start = begin + rng.integers(60)
        bursts[start : start + rng.integers(1, 9)] *= 2
    growing = (
        0.05 * (1 + np.arange(steps) / 5000) * np.exp(0.05 * rng.standard_normal(steps))
    )  # sequences become longer
    return {
        "correlated over 10 steps": 0.05 * np.exp(correlated(rng, steps, 0.9, 0.15)),
        "correlated over 100 steps": 0.05 * np.exp(correlated(rng, steps, 0.99, 0.15)),
        "correlated over 200 steps": 0.05 * np.exp(correlated(rng, steps, 0.995, 0.25)),
        "bursts": bursts,
        "growing": growing,
        "two modes": 0.05 * np.where(rng.random(steps) < 0.3, 2, 1) * np.exp(0.03 * rng.standard_normal(steps)),
        "recorded": recorded[(starts[:, None] + np.arange(50)).ravel()],
        "recorded, shuffled": rng.choice(recorded, steps),
        "lognormal": 0.05 * np.exp(0.3 * rng.standard_normal(steps)),
        "pareto": 0.05 * (1 + rng.pareto(2, steps)),
        "spikes": spikes,
        "events": events,
        "drift": 0.05 * (1 + 0.1 * np.sin(np.arange(steps) / 3000)) * (1 + 0.05 * rng.standard_normal(steps)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", noises(np.random.default_rng(0), 100))
def test_nothing_is_found_in_many_healthy_steps(name):
    assert watch(noises(np.random.default_rng(7), STEPS)[name]) == []


def test_nothing_is_found_in_some_healthy_steps():
    for name, times in noises(np.random.default_rng(8), 4000).items():
        assert watch(times) == [], name


@pytest.mark.parametrize("noise", ["gauss", "lognormal", "spikes", "events", "bursts", "growing"])
@pytest.mark.parametrize(
    ("factor", "onset"), [(2.0, 130), (2.0, 200), (5.0, 200), (1.5, 1000), (2.0, 1000), (5.0, 1000)]
)
def test_a_slowdown_is_found_within_20_steps(noise, factor, onset):
    rng = np.random.default_rng(onset)
    times = {
        **noises(rng, 1500),
        "gauss": 0.05 * (1 + 0.03 * rng.standard_normal(1500)),
        "lognormal": 0.05 * np.exp(0.08 * rng.standard_normal(1500)),
    }[noise]
    times[onset:] *= factor
    found = watch(times)
    assert found and onset < found[0].step <= onset + 20 and abs(found[0].onset - onset - 1) <= 8
    assert found[0].percent == pytest.approx(100 * (factor - 1), rel=0.35)


def test_steps_that_are_slow_again_and_again_are_found():
    times = 0.05 * (1 + 0.03 * np.random.default_rng(1).standard_normal(1000))
    times[600::4] *= 4
    (found,) = watch(times)
    assert found.is_intermittent and found.step <= 640 and abs(found.onset - 601) <= 8


@pytest.mark.parametrize("rate", [0.4, 0.6, 0.8])
def test_a_few_slow_steps_at_the_start_of_each_epoch_are_healthy_and_ones_that_go_on_are_found_soon(rate):
    rng = np.random.default_rng(5)
    times = 0.05 * (1 + 0.03 * rng.standard_normal(8000))
    for begin in range(2000, 8000, 1000):  # the workers of the loader start, and their queue is empty
        times[begin] += 8.0
        times[begin + 1 : begin + 13] += np.where(np.arange(12) % 3 < 2, 0.1, 0.0)
    assert watch(times) == []
    times[7500:] += np.where(rng.random(500) < rate, 0.1, 0.0)
    (found,) = watch(times[:7560])
    assert abs(found.onset - 7501) <= 8 and found.step <= 7540


def test_a_speed_that_halves_little_by_little_is_found_with_its_phase():
    rng, steps = np.random.default_rng(2), 5000
    forward, data = 0.05 * np.exp(0.03 * rng.standard_normal((2, steps)))
    data[3000:] += 0.1 * np.minimum(1, np.arange(2000) / 1500)
    phases = [{"forward": f, "data": d} for f, d in zip(forward, data, strict=True)]
    found = watch(forward + data, phases)
    assert found and found[0].is_gradual and found[0].phase == "data" and 3000 < found[0].step < 4200
    assert found[0].onset < found[0].step - 900 and "little by little" in found[0].describe()
    assert found[0].percent == pytest.approx(58, abs=15)


def test_no_phase_is_named_that_explains_little_of_it():
    """A program that shares the core interrupts every step, each time in another phase."""
    names = ("data", "forward", "backward", "optimizer")
    phases = []
    for n in range(400):
        each = dict.fromkeys(names, 0.001)
        if n >= 300:
            each[names[n % 4]] += 0.01
        phases.append(each)
    (found,) = watch(np.array([sum(each.values()) for each in phases]), phases)
    assert found.phase == "several" and "spread over" in found.describe()
    assert explain(found).cause == "not_established"


def test_the_phase_that_has_grown_is_named():
    rng, onset = np.random.default_rng(3), 300
    for phase in ("data", "forward", "backward", "collective", "optimizer", "device", "between"):
        phases = []
        for n in range(500):
            each = {name: 0.01 * (1 + 0.05 * rng.standard_normal()) for name in ("data", "forward", "backward")}
            each[phase] = each.get(phase, 0.001) + (0.03 if n >= onset else 0.0)
            phases.append(each)
        (found,) = watch(np.array([sum(each.values()) for each in phases]), phases)
        assert found.phase == phase and phase in found.describe()


def test_evaluation_and_checkpoints_are_not_part_of_a_step():
    phases = [{"forward": 0.05, **({"eval": 0.5, "checkpoint": 0.5} if n >= 300 else {})} for n in range(500)]
    assert watch(np.array([sum(each.values()) for each in phases]), phases) == []


@pytest.mark.parametrize("slow", [0, 2])
def test_the_rank_that_has_become_slow_is_named(slow):
    rng, onset, size = np.random.default_rng(4), 300, 4
    ranks, times = [], []
    for n in range(500):
        own = np.zeros((4, size))
        own[1:3] = 0.01 * (1 + 0.05 * rng.standard_normal((2, size)))
        own[2, slow] += 0.03 if n >= onset else 0.0
        total = own.sum(axis=0)
        own[3] = total.max() - total
        ranks.append(own)
        times.append(float(total.max()))
    (found,) = watch(np.array(times), None, ranks)
    assert (found.rank, found.phase) == (slow, "compute")


def test_a_speed_that_returns_and_falls_again_is_found_twice():
    times = 0.05 * (1 + 0.03 * np.random.default_rng(5).standard_normal(1500))
    times[400:600] *= 2
    times[1000:] *= 2
    assert [round(each.onset, -1) for each in watch(times)] == [400, 1000]


def test_a_speed_that_stays_becomes_the_normal_one():
    times = 0.05 * (1 + 0.03 * np.random.default_rng(6).standard_normal(3000))
    times[400:] *= 2
    times[2000:] *= 2
    assert [round(each.onset, -1) for each in watch(times)] == [400, 2000]


def test_rows_without_times_and_other_outcomes_are_passed_over():
    detector = SlowdownDetector()
    for row in (
        {"status": "committed"},
        {"status": "skipped", "step_seconds": 9.0},
        {"status": "committed", "step_seconds": "x"},
    ):
        assert detector.observe({"step": 1, **row}) is None
    assert not detector.is_steady


def test_slowdowns_that_come_and_go_are_found_twice_and_then_only_one_that_lasts():
    times = 0.05 * (1 + 0.03 * np.random.default_rng(6).standard_normal(8500))
    for begin in range(500, 8000, 500):  # a neighbour that works for 40 steps now and then
        times[begin : begin + 40] *= 2
    times[8200:] *= 2
    onsets = [each.onset for each in watch(times)]
    assert len(onsets) == 3 and abs(onsets[-1] - 8201) <= 8
