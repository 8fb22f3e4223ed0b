"""Gradient norms: they lead the loss, so a spike there is on record before the loss shows anything. Only an update out of
all proportion is vetoed."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from feeding import noisy, only, signal, watch_field

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Flag, Kind, Severity
from holdfast.core.detectors import GradSpike, build


def watch_norms(detector: GradSpike, norms, first: int = 1, **more) -> list[Finding]:
    return watch_field(detector, "grad_norm", norms, first, **more)


def learned(**config) -> GradSpike:
    detector = GradSpike(DetectSection(**config))
    assert watch_norms(detector, noisy(300)) == []
    return detector


BLOOM = [(2.20, 0.24), (2.22, 0.95), (2.60, 2.4), (2.24, 15.9), (2.35, 145.0), (5.10, 960.0)]


@pytest.mark.parametrize("count", [200, 1000])
@pytest.mark.parametrize(("wobble", "found_at"), [(0.05, 2), (0.2, 2), (0.3, 3), (0.4, 3)])
def test_bloom_divergence_is_found_before_the_loss_shows_it(count, wobble, found_at):
    """Gradient and loss of BLOOM-176B on the way into a divergence. With even norms it is found at the third value; with
    norms as uneven as 0.3 in the log, at the fourth: two steps before the loss reaches 5."""
    for seed in range(3):
        random = np.random.default_rng(seed)
        norms = 0.24 * np.exp(wobble * random.normal(size=count))
        before = [(float(2.2 + 0.03 * random.normal()), float(norm)) for norm in norms]
        detectors = build(DetectSection())
        found = []
        for step, (loss, norm) in enumerate(before + BLOOM, 1):
            found += [f for d in detectors if (f := d.observe(signal(step, loss, norm))) is not None]
        assert found[0].step == count + 1 + found_at, "in time, and no false alarm before"
        assert found[0].severity is Severity.SKIP
        assert BLOOM[found_at][0] < 5


@pytest.mark.parametrize("warmup", [1, 20, 50])
def test_warm_up_is_silent_and_ends_after_as_many_healthy_steps_as_configured(warmup):
    detector = GradSpike(DetectSection(warmup_steps=warmup))
    assert watch_norms(detector, noisy(warmup - 1)) == []
    assert detector.limits() == {}
    assert watch_norms(detector, [1e4], first=warmup) == []
    assert detector.limits() != {}


@pytest.mark.parametrize("size", [6.0, 20.0, 1e3, 1e30, 1e300])
def test_single_high_gradient_norm_is_skipped(size):
    detector = learned()
    (found,) = watch_norms(detector, [2.2 * size], first=301)
    assert (found.kind, found.severity, found.onset, found.new) == (Kind.GRAD_SPIKE, Severity.SKIP, 301, True)
    assert found.evidence["grad_norm"] == 2.2 * size > found.evidence["limit"] > found.evidence["expected"]
    assert watch_norms(detector, noisy(100, seed=9), first=302) == []


@pytest.mark.parametrize("size", [0.0, 0.01, 2.0, 4.5])
def test_gradient_norm_that_is_low_or_less_than_five_times_its_course_is_left_alone(size):
    assert watch_norms(learned(), [2.2 * size], first=301) == []


def test_both_deviations_and_ratio_must_be_exceeded():
    uneven = np.exp(0.5 * np.random.default_rng(0).normal(size=500))
    detector = GradSpike(DetectSection())
    assert watch_norms(detector, map(float, uneven)) == []
    assert watch_norms(detector, [15.0], first=501) == [], "15 times, and not 8 deviations"
    assert watch_norms(learned(grad_ratio=20.0), [2.2 * 15], first=301) == [], "far out, and not 20 times"
    assert watch_norms(learned(grad_ratio=10.0), [2.2 * 15], first=301) != []


def test_gradient_norms_never_ask_for_a_rollback():
    assert {f.severity for f in watch_norms(learned(), [1e9] * 500, first=301)} == {Severity.SKIP}


@pytest.mark.parametrize("level", [44.0, 2200.0])
def test_high_gradient_norms_under_a_normal_loss_are_accepted_as_the_new_level(level):
    detector = learned()
    found = watch_norms(detector, noisy(500, level=level), first=301)
    assert [f.step for f in found] == list(range(301, 309)), "eight, not five hundred"
    assert [f.new for f in found] == [True] + [False] * 7
    assert "new level" in found[-1].message
    assert watch_norms(detector, [level * 4.5], first=801) == []
    (found,) = watch_norms(detector, [level * 6], first=802)
    assert found.evidence["limit"] == pytest.approx(level * 5, rel=0.1)


def test_high_gradient_norms_under_a_high_loss_are_not_accepted():
    found = watch_norms(learned(), [44.0] * 50, first=301, flags=int(Flag.LOSS_HIGH))
    assert len(found) == 50
    assert all("far above" in f.message for f in found)


def test_one_normal_norm_in_between_starts_the_count_anew():
    found = watch_norms(learned(), ([44.0] * 7 + [2.2]) * 3, first=301)
    assert not any("new level" in f.message for f in found)
    assert [f.step for f in found if f.new][:2] == [301, 309]


def test_norm_that_was_not_measured_or_belongs_to_an_overflow_is_not_a_norm():
    detector = learned()
    before = json.dumps(detector.state_dict())
    assert detector.observe(signal(301, 2.0, None)) is None
    assert detector.observe(signal(301, 2.0, 1e9, overflow=True)) is None
    assert detector.observe(signal(301, 2.0, math.nan)) is None
    assert detector.observe(signal(301, math.nan, 1e9)) is None, "the non-finite loss is the finding"
    assert json.dumps(detector.state_dict()) == before


def test_vetoed_norm_is_found_with_the_limit_of_the_gate_and_leaves_no_trace():
    detector = learned()
    before = json.dumps(detector.state_dict())
    (found,) = watch_norms(detector, [2.2], first=301, grad_limit=2.0, flags=int(Flag.GRAD_HIGH))
    assert (found.severity, found.onset, found.new) == (Severity.SKIP, 301, True)
    assert "out of all proportion" in found.message
    assert found.evidence == {"grad_norm": 2.2, "limit": 2.0, "loss": 2.0}
    assert json.dumps(detector.state_dict()) == before


def test_norm_that_landed_is_judged_by_its_baseline_whatever_the_limit_of_the_gate():
    (found,) = watch_norms(learned(), [22.0], first=301, grad_limit=220.0)
    assert "far above its baseline" in found.message
    assert watch_norms(learned(), [2.2], first=301, grad_limit=1.0) == []


# ---- the limit for the gate


def test_gate_vetoes_only_a_norm_a_hundred_times_any_before_it():
    detector = GradSpike(DetectSection())
    norms = [*noisy(200), 7.0, *noisy(99, 1)]
    watch_norms(detector, norms)
    assert only(detector.limits()) == pytest.approx(700.0, rel=0.05), "the largest counts, not the usual one"


@pytest.mark.parametrize("ratio", [2.0, 30.0])
def test_ratio_of_the_veto_is_set_by_the_policy_file(ratio):
    assert only(learned(grad_veto_ratio=ratio).limits()) == pytest.approx(ratio * max(noisy(300)), rel=0.1)


def test_largest_norm_fades_so_that_an_early_one_does_not_open_the_gate_for_good():
    detector = GradSpike(DetectSection())
    watch_norms(detector, [1e4] + [1.0] * 2000)
    early = only(detector.limits())
    watch_norms(detector, [1.0] * 30_000, first=2002)
    assert early > 5e5
    assert only(detector.limits()) == pytest.approx(100.0)


def test_largest_norm_is_counted_as_the_clip_leaves_it():
    """A norm of 50 clipped at 1 is an update of 1: the limit follows the updates, not the raw norms."""
    detector = GradSpike(DetectSection(grad_veto_ratio=2.0))
    watch_norms(detector, [50.0] * 100, clip=10.0)
    assert detector.limits() == {}, "a clip below the limit keeps every update in proportion"
    watch_norms(detector, [50.0], first=101, clip=25.0)
    assert detector.limits() == {}, "the clip is 25, the limit is 50"
    watch_norms(detector, [1.0], first=102, clip=1000.0)
    assert only(detector.limits()) == pytest.approx(2 * 25.0, rel=0.01)
    watch_norms(detector, [1.0], first=103)
    assert only(detector.limits()) == pytest.approx(2 * 25.0, rel=0.01)


def test_clip_above_the_limit_does_not_open_the_gate():
    detector = GradSpike(DetectSection())
    watch_norms(detector, noisy(100), clip=1e6)
    assert only(detector.limits()) == pytest.approx(100 * max(noisy(100)), rel=0.05)


def test_clip_and_largest_norm_survive_a_restart():
    for clip in (None, 1.0, 1e6):
        detector, back = GradSpike(DetectSection()), GradSpike(DetectSection())
        watch_norms(detector, noisy(100), clip=clip)
        back.load_state_dict(json.loads(json.dumps(detector.state_dict())))
        assert back.limits() == detector.limits()
        assert (back.limits() == {}) is (clip == 1.0)


def test_vetoed_norms_are_not_learned_from():
    detector, clean = GradSpike(DetectSection(warmup_steps=60)), GradSpike(DetectSection(warmup_steps=60))
    for step, value in enumerate(noisy(60), 1):
        detector.observe(signal(step, 2.0, 1e30, flags=int(Flag.LOSS_HIGH)))
        detector.observe(signal(step, 2.0, value))
        clean.observe(signal(step, 2.0, value))
    assert detector.limits() == clean.limits()


def test_announced_shift_is_learned_and_only_a_gross_norm_counts_meanwhile():
    detector = learned()
    detector.rebaseline()
    assert detector.limits() == {}, "the largest norm belongs to what was before"
    found = watch_norms(detector, [44.0, 1e5, *noisy(23, level=44.0)], first=301)
    assert [(f.step, f.new, f.evidence["in_a_row"]) for f in found] == [(302, True, 1)]
    assert found[0].evidence["limit"] == pytest.approx(220.0, rel=0.02), "a hundred times the old course"
    assert watch_norms(detector, noisy(300, 5, level=44.0), first=330) == []
    assert watch_norms(detector, [44.0 * 6], first=700) != []


def test_second_shift_before_the_first_was_learned_keeps_the_gross_limit():
    once, twice = learned(), learned()
    for detector in (once, twice, twice):
        detector.rebaseline()
    (one,), (two,) = watch_norms(once, [1e5], first=301), watch_norms(twice, [1e5], first=301)
    assert one.evidence["limit"] == two.evidence["limit"] == pytest.approx(220.0, rel=0.02)


@pytest.mark.parametrize("wobble", [0.1, 0.3, 0.6])
def test_healthy_norms_are_rarely_skipped(wobble):
    norms = np.exp(wobble * np.random.default_rng(2).normal(size=6000)) * np.linspace(3, 0.5, 6000)
    assert len(watch_norms(GradSpike(DetectSection()), map(float, norms))) <= 1
