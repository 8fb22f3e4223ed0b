"""The published rules: as written, step by step, against the text they come from; and their defects, there and fixed."""

from __future__ import annotations

import collections
import json
import math
from random import Random

import numpy as np
import pytest
from feeding import costly, noisy, signal, watch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Kind, Severity
from holdfast.core.detectors import CurryTrain, Monotone, ThreeSigma, build

SOME = settings(max_examples=25, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
UNIFORM = math.log(50257)


# ---- the rules, written down from their texts


class LossSpikeWatchdog:
    """The recipe's own class."""

    def __init__(self, *, threshold_ratio=5.0, sustain_steps=100, min_history=1000):
        self.recent = collections.deque(maxlen=min_history)
        self.threshold_ratio = threshold_ratio
        self.sustain_steps = sustain_steps
        self._spike_start = None

    def update(self, loss, step):
        self.recent.append(loss)
        if len(self.recent) < self.recent.maxlen:
            return None
        rolling_min = min(self.recent)
        if loss > self.threshold_ratio * rolling_min:
            self._spike_start = self._spike_start or step
            if step - self._spike_start >= self.sustain_steps:
                return {
                    "rollback_to_step": max(0, self._spike_start - 100),
                    "skip_batches": 200,
                    "reason": "loss_spike_sustained",
                }
        else:
            self._spike_start = None
        return None


def three_sigma_spikes(losses, window=100):
    """Q2.1: mean and deviation of loss[t-100:t] for t > 100; a spike is loss[t] > mean + 3 deviations."""
    said = []
    for t in range(window, len(losses)):
        before = losses[t - window : t]
        mean = sum(before) / window
        deviation = (
            math.sqrt(sum((v - mean) * (v - mean) for v in before) / window) if math.isfinite(mean) else math.nan
        )
        if losses[t] > mean + 3 * deviation:
            said.append(t)
    return said


def monotone_rises(losses, steps=200):
    """Q4.1: the loss has increased at each of the last 200 steps."""
    return [t for t in range(steps, len(losses)) if all(losses[i] > losses[i - 1] for i in range(t - steps + 1, t + 1))]


def random_losses(seed: int, count: int, broken: float = 0.01) -> list[float]:
    """Stretches of noise, spikes, plateaus up high, rises; NaN and Inf among them."""
    random, losses, level, rising = Random(seed), [], 2.0, 0.0
    for _ in range(count):
        if random.random() < 0.02:
            level = random.choice([2.0, 2.0, 2.0, 0.3, 12.0, 30.0])
            rising = random.choice([0.0, 0.0, 0.05])
        level += rising
        noise = 0.0 if rising else 0.05 * random.gauss(0, 1)
        losses.append(random.choice([math.nan, math.inf, 1e4]) if random.random() < broken else level * (1 + noise))
    return losses


# ---- as written, they say what the text says


@SOME
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(2, 60), st.sampled_from([0, 1]))
def test_curry_train_as_written_alarms_where_the_recipe_does(seed, sustain, history, first):
    ours = CurryTrain(False, sustain=sustain, history=history)
    theirs = LossSpikeWatchdog(sustain_steps=sustain, min_history=history)
    for step, loss in enumerate(random_losses(seed, 400), first):
        found, expected = ours.observe(signal(step, loss, None)), theirs.update(loss, step)
        assert (found is None) == (expected is None)
        if expected is not None:
            assert found.severity is Severity.ROLLBACK
            assert {key: found.evidence[key] for key in ("rollback_to_step", "skip_batches")} == {
                key: expected[key] for key in ("rollback_to_step", "skip_batches")
            }


def test_curry_train_as_written_alarms_where_the_recipe_does_with_its_own_numbers():
    ours, theirs = CurryTrain(False), LossSpikeWatchdog()
    losses = noisy(1100) + [15.0] * 300 + noisy(100)
    pairs = [(ours.observe(signal(n, x, None)), theirs.update(x, n)) for n, x in enumerate(losses, 1)]
    assert [a is None for a, _ in pairs] == [b is None for _, b in pairs]
    assert sum(b is not None for _, b in pairs) == 200


@SOME
@given(st.integers(0, 10**6), st.integers(10, 100))
def test_three_sigma_as_written_alarms_where_the_tree_does(seed, window):
    losses = random_losses(seed, 400, broken=0.0)
    found = watch(ThreeSigma(False, window=window), losses, first=0)
    assert [f.step for f in found] == three_sigma_spikes(losses, window)


@pytest.mark.parametrize("junk", [math.nan, math.inf, 1e200])
def test_three_sigma_as_written_sees_again_once_the_value_has_left_the_window(junk):
    losses = noisy(500)
    losses[150], losses[200], losses[400] = junk, 9.0, 9.0
    found = watch(ThreeSigma(False), losses, first=0)
    assert [f.step for f in found] == three_sigma_spikes(losses)
    assert 400 in [f.step for f in found]


@SOME
@given(st.integers(0, 10**6), st.integers(1, 25))
def test_monotone_as_written_alarms_where_the_tree_does(seed, steps):
    losses = random_losses(seed, 400)
    found = watch(Monotone(False, steps=steps), losses, first=0)
    assert [f.step for f in found] == monotone_rises(losses, steps)


def test_monotone_as_written_needs_all_of_its_two_hundred_rises():
    losses = [2.0 + 0.001 * n for n in range(202)]
    assert [f.step for f in watch(Monotone(False), losses, first=0)] == [200, 201] == monotone_rises(losses)
    losses[100] = losses[99]
    assert watch(Monotone(False), losses, first=0) == []


# ---- the defects: there as written, gone fixed


def test_nan_ends_a_spike_for_curry_train_as_written_and_not_fixed():
    """Every comparison with it is false, and so the count starts over."""
    losses = noisy(1000) + ([50.0] * 90 + [math.nan]) * 5
    assert watch(CurryTrain(False), losses) == []
    assert [(f.onset, f.step) for f in watch(CurryTrain(True), losses)] == [(1001, 1101)]


def test_nan_at_the_front_of_the_window_blinds_curry_train_as_written():
    detector = CurryTrain(False, sustain=0, history=10)
    found = watch(detector, [math.nan, *[1.0] * 8, 50.0, 50.0])
    assert [f.step for f in found] == [11], "at step 10 the smallest of the window is not a number"


def test_nan_in_the_window_blinds_three_sigma_as_written_and_not_fixed():
    losses = noisy(200)
    losses[150] = math.nan
    losses[190] = 50.0
    assert [f.step for f in watch(ThreeSigma(False), losses) if f.step > 151] == []
    assert 191 in [f.step for f in watch(ThreeSigma(True), losses)]


def test_nan_stops_the_count_of_monotone_as_written_and_leaves_no_trace_fixed():
    rising = [2.0 + 0.01 * n for n in range(400)]
    broken = [*rising[:150], math.nan, *rising[150:]]
    assert watch(Monotone(False), broken)[0].step > watch(Monotone(False), rising)[0].step
    assert len(watch(Monotone(True), broken)) == len(watch(Monotone(True), rising)) == 1


def test_spike_enters_the_window_of_three_sigma_as_written_and_hides_the_next_and_not_fixed():
    losses = [min(v, 2.26) for v in noisy(300)]
    losses[200], losses[220] = 30.0, 10.0
    assert 221 not in [f.step for f in watch(ThreeSigma(False), losses)]
    spikes = [f.step for f in watch(ThreeSigma(True), losses) if f.new]
    assert 201 in spikes
    assert 221 in spikes


def test_one_spike_fires_899_times_as_written_and_once_fixed():
    """No latch: 999 steps up high, of which all but the first hundred fire, until the last good loss leaves the window."""
    losses = noisy(1000) + [50.0] * 1500
    assert len(watch(CurryTrain(False), losses)) == 899
    assert len(watch(CurryTrain(True), losses)) == 1


def test_three_sigma_fires_at_every_step_of_a_spike_as_written_and_once_fixed():
    losses = noisy(200) + [2.2 * 1.2**n for n in range(1, 20)] + noisy(100, 1)
    as_written = [f.step for f in watch(ThreeSigma(False), losses) if 200 < f.step <= 219]
    fixed = [f.step for f in watch(ThreeSigma(True), losses) if 200 < f.step <= 219 and f.new]
    assert len(as_written) > 10
    assert len(fixed) == 1


def test_collapse_to_uniform_is_unseen_as_written_and_seen_fixed():
    """ln 50257 = 10.8 is under 5 times 2.2."""
    losses = [2.2 + 8.8 * math.exp(-n / 100) for n in range(1200)] + [UNIFORM] * 400
    assert UNIFORM < 5 * 2.2
    assert watch(CurryTrain(False), losses) == []
    (found,) = watch(CurryTrain(True), losses)
    assert (found.kind, found.severity, found.onset) == (Kind.LOSS_SPIKE, Severity.ROLLBACK, 1201)
    assert found.step == 1301


def test_spike_that_starts_at_step_zero_starts_again_at_each_step_as_written():
    """`self._spike_start or step`: a start of 0 is none."""
    losses = [1.0, 10.0, 10.0]
    assert [f.onset for f in watch(CurryTrain(False, sustain=0, history=1, ratio=0.5), losses, first=0)] == [0, 1, 1]


def test_curry_train_as_written_is_blind_for_its_first_thousand_steps_and_fixed_for_a_hundred():
    losses = noisy(200) + [50.0] * 300
    assert watch(CurryTrain(False), losses) == []
    assert [f.step for f in watch(CurryTrain(True), losses)] == [301]


def test_noisy_rise_is_never_monotone_as_written_and_is_a_trend_fixed():
    for seed in range(3):
        losses = np.array(noisy(1000, seed))
        losses[500:] *= 1 + 0.001 * np.arange(500)
        assert watch(Monotone(False), losses) == []
        found = watch(Monotone(True), losses)
        assert [f.kind for f in found] == [Kind.DIVERGENCE]
        assert 500 < found[0].step <= 800
        assert found[0].evidence["trend_z"] > 4.5


def test_monotone_fixed_leaves_healthy_losses_alone():
    for seed in range(3):
        assert watch(Monotone(True), noisy(3000, seed)) == []
        falling = np.array(noisy(3000, seed)) * (1 + 4 * np.exp(-np.arange(3000) / 500))
        assert watch(Monotone(True), falling) == []


def test_three_sigma_alarms_about_once_in_740_healthy_steps_as_written_and_fixed_asks_for_nothing_costly():
    """Mended, the chance is on record as a spike that recovered; only one that persists asks for a rollback."""
    losses = noisy(74_000, 5)
    as_written, fixed = watch(ThreeSigma(False), losses), watch(ThreeSigma(True), losses)
    assert 74_000 / 1000 < len(as_written) < 74_000 / 400
    assert {f.severity for f in as_written} == {Severity.ROLLBACK}
    assert costly(fixed) == []
    spikes, ends = [f for f in fixed if f.new], [f for f in fixed if not f.new]
    assert {f.evidence["outcome"] for f in ends} == {"recovered"}
    assert len(spikes) - len(ends) in (0, 1)


def test_three_sigma_fixed_tells_recovered_from_persistent_after_50_steps():
    healthy = [v for v in noisy(150, 1) if v < 2.25]
    at = len(healthy) + 1
    recovered = watch(ThreeSigma(True), healthy + [4.0] * 10 + noisy(20, 2))
    assert [(f.step, f.severity) for f in recovered[:1]] == [(at, Severity.NOTE)]
    assert recovered[1].evidence["outcome"] == "recovered"
    assert at + 10 <= recovered[1].step < at + 20
    spike, end = watch(ThreeSigma(True), healthy + [4.0] * 120)
    assert (end.step, end.onset, end.severity) == (at + 50, at, Severity.ROLLBACK)
    assert end.evidence["outcome"] == "persistent"
    assert end.evidence["mean"] == spike.evidence["mean"], "mean and sigma stand still meanwhile"


@pytest.mark.parametrize(
    "junk",
    [
        1e6,
        1e12,
        1e100,
    ],
)
def test_three_sigma_fixed_is_not_spoilt_by_one_large_value_in_its_first_window(junk):
    """Running sums lose what is small beside it, and never get it back."""
    losses = noisy(600)
    losses[50] = junk
    losses[500] = 3.0
    found = [f.step for f in watch(ThreeSigma(True), losses) if f.new]
    assert 501 in found
    assert len(found) < 10


def test_curry_train_fixed_has_only_finite_numbers_in_its_evidence():
    losses = [2.0] * 200
    losses[150] = 5e-324
    (found,) = watch(CurryTrain(True, sustain=3), losses)
    assert found.evidence["ratio"] is None
    assert json.dumps(found.evidence, allow_nan=False)


@pytest.mark.parametrize("kind", [CurryTrain, ThreeSigma, Monotone])
def test_fixed_rules_pass_over_what_did_not_land(kind):
    clean, dirty = kind(True), kind(True)
    for step, loss in enumerate(noisy(300), 1):
        for junk in (signal(step, 90.0, overflow=True), signal(step, 90.0, flags=4), signal(step, math.nan)):
            assert dirty.observe(junk) is None
        assert dirty.observe(signal(step, loss)) == clean.observe(signal(step, loss))
    assert dirty.state_dict() == clean.state_dict()


@pytest.mark.parametrize("kind", [CurryTrain, ThreeSigma, Monotone])
def test_declared_shift_is_a_new_beginning_for_a_published_rule(kind):
    detector = kind(True)
    watch(detector, noisy(1200))
    detector.rebaseline()
    assert costly(watch(detector, noisy(400, 1, level=13.0), first=1201)) == []


# ---- selected by the configuration


@pytest.mark.parametrize(
    ("preset", "kind"),
    [("curry-train", CurryTrain), ("three-sigma", ThreeSigma), ("monotone-200", Monotone)],
)
def test_preset_puts_the_published_rule_in_place_of_our_own_on_the_loss(preset, kind):
    default = [d.name for d in build(DetectSection())]
    for name in (preset, f"{preset}-as-written"):
        built = build(DetectSection(preset=name))
        (rule,) = [d for d in built if isinstance(d, kind)]
        assert [d.name for d in built if d is not rule] == [
            d for d in default if d not in ("loss_spike", "divergence")
        ], "everything that is not about the loss stays"
        assert built.index(rule) == 2


def test_preset_as_written_and_fixed_are_two():
    losses = noisy(1000) + [50.0] * 1500
    for preset, expected in (("curry-train", 1), ("curry-train-as-written", 899)):
        (rule,) = [d for d in build(DetectSection(preset=preset)) if d.name == "curry_train"]
        assert len(watch(rule, losses)) == expected
