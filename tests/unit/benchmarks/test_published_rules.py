"""The published rules, each against a case worked out by hand from its source."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.detectors.alarms import Rule, signals
from benchmarks.detectors.contenders import Contender
from benchmarks.detectors.curves import make
from benchmarks.detectors.healthy_run import Curve
from benchmarks.detectors.rules import RULES, CurryTrain, KillLossSpike, Lightning, Megatron, Sigma, SkipStep, ZClip
from benchmarks.detectors.window import Window


def alarms_of(rule: Rule, losses: list[float], norms: list[float] | None = None) -> list[int]:
    rule.reset()
    norms = norms or [1.0] * len(losses)
    return [i for i, (loss, norm) in enumerate(zip(losses, norms, strict=True)) if rule.observe(i, loss, norm)]


def test_three_sigma_is_over_the_hundred_steps_before() -> None:
    losses = [1.0, 3.0] * 50  # mean 2, deviation 1
    assert alarms_of(Sigma(), [*losses, 5.0]) == []
    assert alarms_of(Sigma(), [*losses, 5.001]) == [100]
    assert alarms_of(Sigma(), [*losses[:-1], 9.0]) == []  # not before a hundred


def test_three_sigma_is_blind_while_a_nan_is_in_its_window() -> None:
    losses = [1.0, 3.0] * 50 + [math.nan] + [1000.0] * 50
    assert alarms_of(Sigma(), losses) == [100]


def test_curry_train_needs_a_thousand_steps_and_a_hundred_more() -> None:
    losses = [1.0] * 1000 + [5.1] * 150
    assert alarms_of(CurryTrain(), losses) == list(range(1100, 1150))  # no latch
    assert alarms_of(CurryTrain(), [1.0] * 1000 + [4.9] * 150) == []
    assert alarms_of(CurryTrain(), [2.2] * 1000 + [10.82] * 500) == []  # a collapse to uniform is under 5 x 2.2


def test_curry_train_agrees_with_the_code_as_published() -> None:
    rng = np.random.default_rng(0)
    losses = np.exp(rng.normal(0, 0.3, 400)).tolist()
    losses[60], losses[150:200] = math.nan, [9.0] * 50
    recent: list[float] = []
    start, expected = None, []
    for step, loss in enumerate(losses):
        recent = [*recent, loss][-30:]
        if len(recent) < 30:
            continue
        if loss > 2.0 * min(recent):
            start = start or step
            if step - start >= 3:
                expected.append(step)
        else:
            start = None
    assert expected and alarms_of(CurryTrain(2.0, sustain=3, history=30), losses) == expected


def test_lightning_compares_with_the_mean_of_ten_and_leaves_spikes_out_of_it() -> None:
    assert alarms_of(Lightning(), [1.0] * 10 + [2.99]) == []
    assert alarms_of(Lightning(), [1.0] * 10 + [3.0, 3.0, 1.0]) == [10, 11]
    assert alarms_of(Lightning(), [1.0, math.nan, math.inf]) == [1, 2]
    assert alarms_of(Lightning(), [9.0, 1.0, 1.0]) == []  # an improvement is never a spike


def test_llm_foundry_counts_five_running_over_twice_the_mean() -> None:
    assert alarms_of(KillLossSpike(run_length=1000), [1.0] * 100 + [2.2] * 4 + [1.0]) == []
    assert alarms_of(KillLossSpike(run_length=1000), [1.0] * 100 + [2.2] * 5 + [1.0]) == [104]
    assert alarms_of(KillLossSpike(run_length=4000), [1.0] * 199 + [9.0] * 5) == []  # 5% of 4,000 is 200
    assert alarms_of(KillLossSpike(run_length=1000), [1.0] * 100 + [math.nan] * 50) == []


def test_llm_foundry_calls_a_loss_high_when_half_the_window_is_over_its_first_maximum() -> None:
    losses = [3.0] * 100 + [2.0] * 100 + [3.5] * 60
    assert alarms_of(KillLossSpike(run_length=1000), losses) == list(range(250, 260))


def test_olmo_skips_above_six_deviations_of_loss_or_norm() -> None:
    losses, spread = [1.0, 3.0] * 64, math.sqrt(128 / 127)
    assert alarms_of(SkipStep(), [*losses, 2 + 6.01 * spread]) == [128]
    assert alarms_of(SkipStep(), [*losses, 2 + 5.99 * spread]) == []
    norms = [1.0, 3.0] * 64 + [50.0]
    assert alarms_of(SkipStep(), [*losses, 2.0], norms) == [128]
    assert alarms_of(SkipStep(norms=False), [*losses, 2.0], norms) == []
    assert alarms_of(SkipStep(), [1.0, 3.0] * 31 + [100.0]) == []  # 63 losses: one too few


def test_olmo_skips_the_nan_and_the_128_steps_after() -> None:
    losses = [1.0, 3.0] * 64 + [math.nan] + [2.0] * 200
    assert alarms_of(SkipStep(norms=False), losses) == list(range(128, 257))


def test_megatron_freezes_the_largest_of_the_first_hundred() -> None:
    losses = [5.0] + [1.0] * 99
    assert alarms_of(Megatron(), [*losses, 49.9, 50.0, -50.0]) == [101, 102]
    assert alarms_of(Megatron(), [math.nan, *losses, 10.82]) == [0]


def test_zclip_clips_above_two_and_a_half_deviations_of_the_norm() -> None:
    norms = [1.0, 3.0] * 12 + [2.0]  # mean 2, variance 24 / 25
    deviation = math.sqrt(24 / 25)
    assert alarms_of(ZClip(), [1.0] * 26, [*norms, 2 + 2.51 * deviation]) == [25]
    assert alarms_of(ZClip(), [1.0] * 26, [*norms, 2 + 2.49 * deviation]) == []
    rule = ZClip()
    alarms_of(rule, [1.0] * 26, [*norms, 2 + 5 * deviation])
    taken = 2 + 2.5 * deviation / 2  # z is twice the threshold: the excess is halved
    assert rule._mean == pytest.approx(0.97 * 2 + 0.03 * taken, rel=1e-5)


def test_zclip_never_clips_again_after_a_nan_norm() -> None:
    norms = [1.0, 3.0] * 13 + [math.nan] + [1e6] * 20
    assert alarms_of(ZClip(), [1.0] * len(norms), norms) == []


def test_a_norm_that_was_not_logged_is_not_a_nan() -> None:
    loss = np.tile([2.0, 3.0], 150)
    curve = Curve("made", 0, loss, np.full(300, np.nan), np.full(300, 1e-3), absent=np.ones(300, bool))
    assert SkipStep().run(curve) == [] and ZClip().run(curve) == []
    assert signals(curve)[0].grad_norm is None


@pytest.mark.parametrize("name", RULES)
def test_every_rule_has_its_published_threshold_in_its_sweep(name: str) -> None:
    sweep = Contender(name).sweep()
    curve = make("spike_large", 5)
    assert Contender(name).build().run(curve) in [setting.build().run(curve) for setting in sweep]
    assert RULES[name]().acts and sorted(s.threshold for s in sweep) == [s.threshold for s in sweep]


def test_a_window_forgets_what_left_it() -> None:
    rng, window, values = np.random.default_rng(1), Window(50), []
    for value in [*rng.normal(1e3, 1, 300), math.inf, *rng.normal(1e3, 1, 120)]:
        values.append(float(value))
        window.push(float(value))
        last = np.array(values[-50:])
        if np.isfinite(last).all() and len(last) > 1:
            assert window.mean() == pytest.approx(last.mean())
            assert window.deviation() == pytest.approx(last.std(), rel=1e-6)
            assert window.deviation(unbiased=True) == pytest.approx(last.std(ddof=1), rel=1e-6)
        else:
            assert len(last) < 2 or math.isnan(window.mean())
