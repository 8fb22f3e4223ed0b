"""What holds for every detector, whatever it is fed: it can be stopped and gone on with, and it never chokes."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from random import Random
from statistics import median

import msgspec
import numpy as np
import pytest
from feeding import AS_WRITTEN, BROKEN, DEFAULT, MADE, ODD, finite, play, same, stream
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Flag, Severity, Signal
from holdfast.core.detectors import CurryTrain, Monotone, ThreeSigma, build
from holdfast.core.detectors.base import Detector
from holdfast.core.record.journal import dumps

SOME = settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
CONFIGS = st.builds(
    DetectSection, warmup_steps=st.integers(1, 40), overflow_streak=st.integers(1, 4), plateau_steps=st.integers(1, 50)
)
SEEDS = st.integers(0, 30)
NAMES = list(MADE)


def again(kind, config, detector):
    """The same detector after its state has been text."""
    back = kind(config)
    back.load_state_dict(json.loads(json.dumps(detector.state_dict())))
    return back


@pytest.mark.parametrize("name", NAMES)
@SOME
@given(SEEDS, CONFIGS)
def test_state_through_json_text_at_every_step_gives_the_same_findings_and_limits(name, seed, config):
    kind = MADE[name]
    whole, broken = kind(config), kind(config)
    for event in stream(seed, 150):
        broken = again(kind, config, broken)
        assert broken.limits() == whole.limits()
        assert same(play(broken, event), play(whole, event))
    assert same(broken.state_dict(), whole.state_dict())
    assert broken.limits() == whole.limits()


@pytest.mark.parametrize("name", list(AS_WRITTEN))
@SOME
@given(SEEDS)
def test_state_of_a_rule_as_written_goes_through_json_text_at_every_step(name, seed):
    kind = AS_WRITTEN[name]
    whole, broken = kind(DetectSection()), kind(DetectSection())
    for event in stream(seed, 150):
        broken = again(kind, DetectSection(), broken)
        assert same(play(broken, event), play(whole, event))


@pytest.mark.parametrize("name", NAMES)
@SOME
@given(SEEDS, CONFIGS)
def test_limits_are_never_nan_and_state_and_evidence_are_plain_json_after_anything(name, seed, config):
    detector = MADE[name](config)
    for event in stream(seed, 200):
        found = play(detector, event)
        assert not any(math.isnan(limit) for limit in detector.limits().values())
        if found is not None:
            assert found.onset <= found.step == event.step
            assert found.detector == detector.name
            assert any(isinstance(v, int | float) for v in found.evidence.values())
            json.loads(dumps({"event": "finding", "finding": found}))
    json.dumps(detector.state_dict(), allow_nan=False)


@pytest.mark.parametrize("name", NAMES)
@SOME
@given(SEEDS)
def test_number_that_is_none_never_enters_nor_shows_in_the_evidence(name, seed):
    detector = MADE[name](DetectSection(warmup_steps=5, plateau_steps=50))
    for event in stream(seed, 200, rare=BROKEN, share=0.2):
        found = play(detector, event)
        assert finite(detector.state_dict()) or name == "dead_run", "the norm it saw: see test_dead_run.py"
        if found is not None and name != "nonfinite":
            numbers = {k: v for k, v in found.evidence.items() if k not in ("lr", "grad_norm", "weight_norm", "limit")}
            assert finite(numbers)


@pytest.mark.parametrize("name", NAMES)
@SOME
@given(SEEDS)
def test_evidence_is_finite_wherever_the_values_are(name, seed):
    detector = MADE[name](DetectSection(warmup_steps=5, plateau_steps=50))
    for event in stream(seed, 200, rare=ODD, share=0.1):
        found = play(detector, event)
        assert found is None or finite(found.evidence)


@pytest.mark.parametrize("name", NAMES)
@SOME
@given(SEEDS, CONFIGS)
def test_asking_for_limits_or_state_changes_nothing(name, seed, config):
    asked, silent = MADE[name](config), MADE[name](config)
    for event in stream(seed, 150):
        assert asked.limits() == asked.limits()
        asked.state_dict()
        assert same(play(asked, event), play(silent, event))
    assert same(asked.state_dict(), silent.state_dict())


@pytest.mark.parametrize("name", NAMES)
@SOME
@given(SEEDS, CONFIGS)
def test_state_that_was_taken_stays_as_it_was_while_the_run_goes_on(name, seed, config):
    detector = MADE[name](config)
    events = stream(seed, 100)
    for event in events[:50]:
        play(detector, event)
    taken = detector.state_dict()
    text = json.dumps(taken)
    for event in events[50:]:
        play(detector, event)
    assert json.dumps(taken) == text


@pytest.mark.parametrize("name", ["loss_spike", "divergence", "plateau", "dead_run", "curry_train", "monotone"])
@SOME
@given(SEEDS)
def test_nonfinite_losses_in_between_leave_no_trace(name, seed):
    clean, dirty = MADE[name](DetectSection(warmup_steps=5)), MADE[name](DetectSection(warmup_steps=5))
    random = Random(seed)
    for event in stream(seed, 150, rare=ODD):
        if not isinstance(event, str) and random.random() < 0.5:
            broken = msgspec.structs.replace(event, loss=random.choice(BROKEN), flags=0, overflow=False)
            assert play(dirty, broken) is None
        assert same(play(dirty, event), play(clean, event))
    assert same(dirty.state_dict(), clean.state_dict())


@SOME
@given(SEEDS, st.integers(1, 40))
def test_step_that_the_gate_vetoes_at_the_limit_handed_out_is_found_and_leaves_no_trace(seed, warmup):
    detector = MADE["grad_spike"](DetectSection(warmup_steps=warmup))
    for event in stream(seed, 200):
        if isinstance(event, str):
            play(detector, event)
            continue
        plain = msgspec.structs.replace(event, flags=0, grad_limit=detector.limits().get("grad_norm"))
        limit, norm = plain.grad_limit, plain.grad_norm
        if limit is None or norm is None or not limit < norm < math.inf or not math.isfinite(plain.loss):
            detector.observe(plain)
            continue
        before = detector.state_dict()
        found = detector.observe(msgspec.structs.replace(plain, flags=int(Flag.GRAD_HIGH), overflow=False))
        assert (found.severity, found.onset, found.evidence["limit"]) == (Severity.SKIP, plain.step, limit)
        assert same(detector.state_dict(), before)


@pytest.fixture(scope="module")
def long_run() -> list[Signal]:
    """A hundred thousand steps, a spike now and then."""
    random = np.random.default_rng(3)
    losses, norms = 2.2 + 0.05 * random.normal(size=100_000), random.lognormal(0, 0.2, 100_000)
    losses[996::997], norms[996::997] = 50.0, 900.0
    return [
        Signal(step=n, loss=loss, grad_norm=norm, lr=1e-3, update_rms=norm, weight_norm=40 + loss, batch=n)
        for n, (loss, norm) in enumerate(zip(losses.tolist(), norms.tolist(), strict=True), 1)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_state_stays_small_over_a_hundred_thousand_steps(name, long_run):
    """A state is what a snapshot carries: bounded by a window, not by the run."""
    make = {"curry_train": CurryTrain, "three_sigma": ThreeSigma, "monotone": Monotone}
    detector: Detector = make[name]() if name in make else MADE[name](DetectSection())
    observe, longest = detector.observe, 0
    for first in range(0, 100_000, 9_973):
        for one in long_run[first : first + 9_973]:
            observe(one)
        longest = max(longest, len(json.dumps(detector.state_dict())))
    assert longest < {"duplicate_batch": 12_000, "weight_norm": 8_000, "curry_train": 40_000}.get(name, 4_000)


@pytest.mark.parametrize("kind", DEFAULT)
@pytest.mark.parametrize("warmup", [1, 5, 40])
def test_no_skip_and_no_rollback_for_finite_values_before_the_warm_up_is_over(kind, warmup):
    for seed in range(20):
        random = np.random.default_rng(seed)
        detector = kind(DetectSection(warmup_steps=warmup))
        for step in range(1, warmup + 1):
            value = float(random.choice([2.0, 2.1, 1e-3, 1e6, 1e30]))
            found = detector.observe(
                Signal(step=step, loss=value, grad_norm=value, lr=value, update_rms=value, weight_norm=value)
            )
            assert found is None


def test_every_detector_of_the_configuration_is_built_in_its_order_and_no_other():
    watching = ["plateau", "learning_rate", "duplicate_batch", "weight_norm", "zero_gradient", "dead_run"]
    spikes = ["loss_spike", "divergence", "grad_spike", "update_spike"]
    assert [d.name for d in build(DetectSection())] == ["nonfinite", "loss_scale", *spikes, *watching]
    assert [d.name for d in build(DetectSection(advisory=False, nonfinite=False))] == spikes
    for name in spikes:
        assert [d.name for d in build(DetectSection(advisory=False, nonfinite=False, **{name: False}))] == [
            s for s in spikes if s != name
        ]
    none = dict.fromkeys(["nonfinite", "loss_spike", "grad_spike", "divergence", "update_spike", "advisory"], False)
    assert build(DetectSection(**none)) == []


@pytest.mark.parametrize("preset", ["default", "curry-train", "three-sigma-as-written", "monotone-200"])
def test_whatever_is_built_is_a_detector_with_a_name_of_its_own(preset):
    built = build(DetectSection(preset=preset))
    assert all(isinstance(d, Detector) for d in built)
    assert len({d.name for d in built}) == len(built)


def test_whole_online_set_costs_less_than_a_few_thousand_appends():
    """A bound against a gross mistake, taken beside the appends it is measured in; the benchmark has the numbers."""
    random = np.random.default_rng(0)
    signals = [
        Signal(
            step=n, loss=float(loss), grad_norm=float(norm), lr=1e-3, update_rms=float(norm), weight_norm=40.0, batch=n
        )
        for n, (loss, norm) in enumerate(
            zip(2.2 + 0.05 * random.normal(size=4000), random.lognormal(0, 0.2, 4000), strict=True), 1
        )
    ]
    detectors, kept = build(DetectSection()), deque(maxlen=1000)
    sets, appends = [], []
    for first in range(0, 4000, 200):
        begun = time.perf_counter()
        for one in signals[first : first + 200]:
            for detector in detectors:
                detector.observe(one)
        between = time.perf_counter()
        for one in signals[first : first + 200]:
            kept.append(one)
        appends.append(time.perf_counter() - between)
        sets.append(between - begun)
    assert median(sets) < 5000 * median(appends)
