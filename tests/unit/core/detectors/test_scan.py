"""Over a log the findings are those of `observe`, row by row, one by one."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
from feeding import ar1, noisy, same
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Kind, Severity, Signal
from holdfast.core.detectors import LossSpike, build
from holdfast.core.detectors import scan as scanning
from holdfast.core.detectors.expected_shifts import ExpectedShifts


def scan(*arguments: Any, **options: Any) -> list[Finding]:
    return [finding for _, finding in scanning.scan(*arguments, **options)]


SIGNAL_NAMES = {"batch_size": "samples", "sequence_length": "length"}
SOME = settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])


@dataclass
class Log:
    """A log in columns, as an importer makes one."""

    step: np.ndarray
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    present: dict[str, np.ndarray] = field(default_factory=dict)


def log_of(rows: list[dict[str, float | None]], steps: list[int] | None = None) -> Log:
    names = dict.fromkeys(name for row in rows for name in row)
    log = Log(np.array(steps if steps is not None else range(1, len(rows) + 1), dtype=float))
    for name in names:
        values = [row.get(name) for row in rows]
        log.present[name] = np.array([v is not None for v in values])
        log.columns[name] = np.array([-1.0 if v is None else v for v in values])
    return log


def row_by_row(log: Log, config: DetectSection, shifts: set[int] = frozenset()) -> list[Finding]:
    """What a run would have said: shifts recognised first, then every detector in its order."""
    detectors, recognised, found = build(config), ExpectedShifts(by_lr=True), []
    declared = False
    for i, step in enumerate(log.step.tolist()):
        declared = declared or i in shifts
        values: dict[str, Any] = {
            SIGNAL_NAMES.get(name, name): float(log.columns[name][i]) for name in log.columns if log.present[name][i]
        }
        if "loss" not in values:
            continue
        for name in ("samples", "length"):
            if name in values:
                values[name] = int(values[name]) if math.isfinite(values[name]) else None
        seen = Signal(step=int(step), **values)
        if recognised.observe(seen) is not None or declared:
            declared = False
            for detector in detectors:
                detector.rebaseline()
        found += [f for d in detectors if (f := d.observe(seen)) is not None]
    return found


@functools.cache
def random_rows(seed: int, count: int) -> list[dict[str, float | None]]:
    """A run in stretches: noise of several kinds, spikes, bursts, a rise, gaps, values that are none, restarts of the
    learning rate, batch sizes that change."""
    random, rows = Random(seed), []
    falling = random.random() < 0.5
    sizes = random.choice([[32], [32, 64], [32, 64, 16]])
    gaps, broken = random.choice([0.0, 0.0, 0.1]), random.choice([0.0, 0.0, 0.02])
    bare = random.random() < 0.2
    rho = random.choice([0.0, 0.5, 0.9])
    wide = random.choice([0.0, 0.01, 0.05, 0.3])
    shift = random.choice([0.0, 0.0, 0.0, -4.0])
    level, noise, left, mood, size = 3.0, 0.0, 0, "calm", 32
    cycle = random.choice([150, 400, 10_000])
    for n in range(count):
        if left == 0:
            mood = random.choice(["calm", "calm", "calm", "burst", "rise", "drop", "constant", "zero"])
            left = random.randint(1, 40) if mood in ("burst", "zero") else random.randint(20, 300)
            size = random.choice(sizes)
        left -= 1
        level *= 1.003 if mood == "rise" else 0.999 if falling else 1.0
        if mood == "drop":
            level, mood = max(0.2, 0.7 * level), "calm"
        noise = rho * noise + math.sqrt(1 - rho * rho) * random.gauss(0, 1)
        loss = level * (1 + (0.0 if mood == "constant" else wide * noise)) + shift
        norm = math.exp(0.3 * random.gauss(0, 1))
        if random.random() < 0.01 or (mood == "burst" and random.random() < 0.5):
            loss, norm = loss + abs(level) * random.choice([0.2, 0.5, 3.0]), norm * random.choice([1.0, 20.0])
        if mood == "zero":
            loss, norm = 0.0, 0.0
        lr = 1e-3 * min(1.0, (n + 1) / 30) * (0.55 + 0.45 * math.cos(math.pi * (n % cycle) / cycle))
        row: dict[str, float | None] = {"loss": loss}
        if not bare:
            row |= {"grad_norm": norm, "lr": lr, "update_rms": norm**0.5, "weight_norm": 30.0 + 0.01 * n}
            row |= {"loss_scale": 65536.0, "batch_size": float(size if random.random() > 0.01 else 7)}
        for name in list(row):
            if random.random() < broken:
                row[name] = random.choice([math.nan, math.inf, -math.inf, 0.0, -1.0, 1e30])
            if random.random() < gaps:
                row[name] = None
        rows.append(row)
    return rows


def assert_same(log: Log, config: DetectSection, shifts: set[int] = frozenset(), of: str = "") -> list[Finding]:
    expected, got = row_by_row(log, config, shifts), scan(log, config, shifts=shifts)
    if of:
        expected, got = [f for f in expected if f.detector == of], [f for f in got if f.detector == of]
    assert [(f.detector, f.step) for f in got] == [(f.detector, f.step) for f in expected]
    assert same(got, expected)
    return got


@SOME
@given(st.integers(0, 10**6), st.lists(st.integers(0, 1199), max_size=3), st.sampled_from([1, 5, 40]))
def test_scan_finds_what_observe_finds_row_by_row(seed, shifts, warmup):
    rows = random_rows(seed, 1200)
    declared = {row for row in shifts if rows[row]["loss"] is not None}
    assert_same(log_of(rows), DetectSection(warmup_steps=warmup, plateau_steps=200), declared)


def test_scan_finds_what_observe_finds_after_a_jump_among_losses_that_are_alike():
    assert_same(log_of(random_rows(354, 1200)), DetectSection(warmup_steps=5, plateau_steps=200), {354, 883, 316})


@pytest.mark.parametrize("preset", ["curry-train", "three-sigma", "monotone-200", "curry-train-as-written"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_scan_finds_what_observe_finds_with_any_preset(preset, seed):
    assert_same(log_of(random_rows(seed, 1500)), DetectSection(preset=preset))


@pytest.mark.parametrize(
    "value",
    [
        -1e149,
        *(v for v in (-1e151, -1e300)),
    ],
)
def test_scan_takes_in_no_value_beyond_arithmetic_either(value):
    losses = [v - 4.0 for v in noisy(600)]
    losses[400] = value
    losses[500] = 1e38
    assert_same(log_of([{"loss": loss} for loss in losses]), DetectSection())


@SOME
@given(st.integers(0, 10**6))
def test_scan_of_values_of_any_size_finds_what_observe_finds(seed):
    random = Random(seed)
    odd = [0.0, -1.0, 1e-300, 1e38, 1e149, 1e151, 1e300, -1e149, -1e151, -1e300, math.nan, math.inf]
    sign = random.choice([1.0, -1.0])
    rows = [
        {
            name: random.choice(odd) if random.random() < 0.01 else sign * 2.0 + 0.1 * random.gauss(0, 1)
            for name in ("loss", "grad_norm", "update_rms", "lr")
        }
        for _ in range(800)
    ]
    assert_same(log_of(rows), DetectSection())


@pytest.mark.parametrize("rho", [0.5, 0.8, 0.9, 0.95])
def test_scan_finds_what_observe_finds_where_neighbours_are_alike(rho):
    """There chance lasts, more of it counts as calm, and a jump counts extra."""
    for seed in range(4):
        random = np.random.default_rng(seed)
        losses = 3.0 + 0.05 * ar1(2000, seed, rho)
        losses[random.integers(300, 2000, 60)] += random.uniform(0.1, 0.4, 60)
        for first in random.integers(300, 1990, 8):
            losses[first : first + 6] += 0.3
        assert_same(log_of([{"loss": float(loss)} for loss in losses]), DetectSection(), of="loss_spike")


def test_findings_come_in_the_order_of_the_rows_and_within_a_row_in_the_order_of_the_detectors():
    rows = [{"loss": loss, "grad_norm": 1.0} for loss in noisy(300)]
    rows[250] = {"loss": 9.0, "grad_norm": 40.0}
    rows[270] = {"loss": math.nan, "grad_norm": math.nan}
    found = scan(log_of(rows))
    assert [(f.step, f.kind) for f in found] == [
        (251, Kind.LOSS_SPIKE),
        (251, Kind.GRAD_SPIKE),
        (254, Kind.LOSS_SPIKE),
        (271, Kind.NONFINITE_LOSS),
    ]


def test_steps_are_those_of_the_log_and_rows_without_a_loss_are_not_there():
    rows: list[dict[str, float | None]] = [{"loss": loss} for loss in noisy(300)]
    rows[200] = {"loss": 9.0}
    for i in range(0, 300, 7):
        rows[i] = {"loss": None, "grad_norm": 1e9}
    found = scan(log_of(rows, steps=[10 * i for i in range(300)]))
    assert found[0].step == found[0].onset == 2000
    assert found[0].severity is Severity.SKIP


def test_level_shift_that_was_declared_by_its_row_is_no_spike():
    log = log_of([{"loss": loss} for loss in noisy(300) + noisy(300, 1, level=3.3)])
    undeclared, declared = scan(log), scan(log, shifts=[300])
    assert any(f.kind == Kind.LOSS_SPIKE for f in undeclared)
    assert not any(f.kind == Kind.LOSS_SPIKE for f in declared)


def test_shift_declared_at_a_row_without_a_loss_counts_from_the_next_that_has_one():
    rows: list[dict[str, float | None]] = [{"loss": loss} for loss in noisy(300) + noisy(300, 1, level=3.3)]
    rows[300] = {"loss": None, "lr": 1e-3}
    assert not any(f.kind == Kind.LOSS_SPIKE for f in scan(log_of(rows), shifts=[300]))


@pytest.mark.parametrize("column", ["batch_size", "sequence_length"])
def test_change_of_batch_size_or_sequence_length_is_recognised(column):
    rows = [{"loss": loss, column: 32.0} for loss in noisy(300)]
    rows += [{"loss": loss, column: 64.0} for loss in noisy(300, 1)]
    rows[301]["loss"] = rows[302]["loss"] = rows[303]["loss"] = 3.3
    assert not any(f.kind == Kind.LOSS_SPIKE and f.severity is Severity.ROLLBACK for f in scan(log_of(rows)))


def test_batch_size_and_sequence_length_that_change_together_are_one_shift_as_online():
    rows = [{"loss": loss, "batch_size": 32.0, "sequence_length": 512.0} for loss in noisy(300)]
    rows += [{"loss": loss, "batch_size": 16.0, "sequence_length": 1024.0} for loss in noisy(200, 1, level=3.3)]
    rows[401]["loss"] = 5.0
    log = log_of(rows)
    recognised = ExpectedShifts(by_lr=True)
    told = [
        recognised.observe(
            Signal(step=n, loss=row["loss"], samples=int(row["batch_size"]), length=int(row["sequence_length"]))
        )
        for n, row in enumerate(rows, 1)
    ]
    assert sum(t is not None for t in told) == 1
    assert_same(log, DetectSection())


def test_log_without_rows_or_without_a_single_loss_has_no_findings():
    assert scan(Log(np.array([]))) == []
    assert scan(log_of([{"loss": None, "grad_norm": math.nan}] * 10)) == []


def test_log_without_a_column_for_the_loss_has_no_findings():
    assert scan(log_of([{"grad_norm": 1.0, "lr": 1e-3}] * 10)) == []


def test_only_the_detectors_that_were_given_are_asked():
    rows = [{"loss": loss} for loss in noisy(200)] + [{"loss": 9.0}, {"loss": math.nan}]
    assert {f.detector for f in scan(log_of(rows))} == {"loss_spike", "nonfinite"}
    assert {f.detector for f in scan(log_of(rows), detectors=[LossSpike(DetectSection())])} == {"loss_spike"}


def test_every_finding_of_a_scan_has_the_position_of_its_row_among_those_with_a_loss():
    rows = random_rows(11, 1500)
    steps = [10 * i for i, row in enumerate(rows) if row["loss"] is not None]
    found = scanning.scan(log_of(rows, steps=[10 * i for i in range(len(rows))]))
    assert found and [steps[position] for position, _ in found] == [finding.step for _, finding in found]
