"""Loss spikes: one high loss, several together, and how they ended. None sets a limit for the gate."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from feeding import ar1, costly, high_above, noisy, signal, watch

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Flag, Kind, Severity
from holdfast.core.detectors import LossSpike

HIGH = int(Flag.LOSS_HIGH)


def learned(count: int = 300, seed: int = 0, **config: Any) -> LossSpike:
    """One that has seen a healthy stretch around 2.2."""
    detector = LossSpike(DetectSection(**config))
    assert watch(detector, noisy(count, seed)) == []
    return detector


def brief(found: list[Finding]) -> list[tuple[int, str, bool]]:
    return [(f.step, f.evidence.get("outcome", f.severity.name), f.new) for f in found]


# ---- warm-up


def test_warm_up_is_silent_and_ends_after_as_many_healthy_steps_as_configured():
    detector = LossSpike(DetectSection(warmup_steps=50))
    for step, value in enumerate(noisy(49), 1):
        assert detector.observe(signal(step, value, None)) is None
        assert high_above(detector) == math.inf
    assert detector.observe(signal(50, 1e4, None)) is None, "in the warm-up nothing is called a spike"
    assert high_above(detector) < math.inf


def test_shift_declared_in_the_warm_up_does_not_shorten_it():
    detector = LossSpike(DetectSection(warmup_steps=50))
    detector.rebaseline()
    watch(detector, noisy(49))
    assert high_above(detector) == math.inf
    watch(detector, [2.2], first=50)
    assert high_above(detector) < math.inf


@pytest.mark.parametrize("size", [10.0, 1e3, 1e30])
@pytest.mark.parametrize(
    "spikes",
    [
        (25,),
        (15, 35),
        pytest.param(
            (15, 25, 35),
        ),
    ],
)
def test_spikes_inside_the_warm_up_do_not_blind_it_afterwards(size, spikes):
    detector = LossSpike(DetectSection(warmup_steps=40))
    watch(detector, [size * v if n in spikes else v for n, v in enumerate(noisy(40), 1)])
    assert high_above(detector) < 2.2 * 2.5
    assert costly(watch(detector, [2.2 * 3] * 5, first=41)) != []


@pytest.mark.parametrize("seed", range(4))
def test_spike_is_found_from_step_50_on(seed):
    losses = np.array(noisy(100, seed))
    losses[50:60] *= 1.5
    found = watch(LossSpike(DetectSection()), losses)
    assert brief(found[:1]) == [(51, "SKIP", True)]
    assert [f.step for f in costly(found)] == [53]


# ---- two thresholds, two outcomes


@pytest.mark.parametrize("size", [1.3, 1.5, 2.0, 5.0, 100.0, 1e6, 1e300])
def test_single_high_loss_is_skipped_and_recovered_is_said_of_it(size):
    detector = learned()
    skip, end = watch(detector, [2.2 * size, *noisy(200, seed=9)], first=301)
    assert (skip.kind, skip.severity, skip.step, skip.onset, skip.new) == (
        Kind.LOSS_SPIKE,
        Severity.SKIP,
        301,
        301,
        True,
    )
    assert skip.evidence["loss"] == 2.2 * size
    assert skip.evidence["loss"] > skip.evidence["limit"] > skip.evidence["expected"]
    assert skip.evidence["z"] > 8
    assert (end.severity, end.onset, end.new) == (Severity.NOTE, 301, False)
    assert (end.evidence["outcome"], end.evidence["peak"], end.evidence["steps_out"]) == ("recovered", 2.2 * size, 1)
    assert end.step <= 305


@pytest.mark.parametrize("size", [0.5, 1.05, 1.2])
def test_single_loss_that_is_low_or_only_a_little_high_is_left_alone(size):
    assert watch(learned(), [2.2 * size, *noisy(50, 3)], first=301) == []


def test_loss_that_stays_high_is_rolled_back_once_and_ends_as_persistent():
    """A rule without a latch calls one spike 899 times."""
    found = watch(learned(), [10.8] * 900, first=301)
    assert brief(found[:4]) == [
        (301, "SKIP", True),
        (302, "SKIP", False),
        (303, "ROLLBACK", False),
        (304, "SKIP", False),
    ]
    assert Counter(f.severity for f in found) == {Severity.SKIP: 98, Severity.ROLLBACK: 1, Severity.NOTE: 1}
    assert {f.onset for f in found} == {301}
    end = found[-1]
    assert (end.step, end.evidence["outcome"], end.evidence["steps_out"]) == (400, "persistent", 100)
    assert end.evidence["expected"] == pytest.approx(2.2, rel=0.05)


def test_after_a_persistent_excursion_the_new_level_is_the_course():
    detector = learned()
    watch(detector, noisy(300, 1, level=4.4), first=301)
    assert high_above(detector) == pytest.approx(4.4 * 1.25, rel=0.1)
    assert brief(watch(detector, [9.0], first=601)) == [(601, "SKIP", True)]


def test_excursion_under_a_veto_is_never_taken_as_the_new_level():
    """Each update was kept from landing, so the model is still the one of the old course."""
    detector = learned()
    limit = high_above(detector)
    found = watch(detector, [10.8] * 300, first=301, flags=HIGH, loss_limit=5.0)
    assert len(found) == 300
    assert high_above(detector) == limit


@pytest.mark.parametrize("size", [1.1, 1.15, 1.2])
def test_moderate_rise_that_stays_is_a_rollback_without_a_skip_before_it(size):
    found = watch(learned(), [2.2 * size] * 50, first=301)
    assert [f.severity for f in found] == [Severity.ROLLBACK]
    assert found[0].step <= 304 and found[0].onset == 301 and found[0].new
    assert found[0].evidence["score"] > found[0].evidence["enough"]


def test_moderate_rise_that_stays_and_then_ends_is_said_to_have_recovered():
    found = watch(learned(), [2.2 * 1.2] * 20 + noisy(30, 3), first=301)
    assert [f.evidence.get("outcome", f.severity.name) for f in found] == ["ROLLBACK", "recovered"]
    assert found[1].evidence["steps_out"] == 20


def test_skip_and_rollback_have_a_threshold_each():
    spike, stay = [2.2 * 1.5], [2.2 * 1.15] * 10
    bold = {"loss_z": 60.0, "loss_rise": 5.0}
    assert [f.severity for f in watch(learned(**bold), spike, first=301)] == []
    assert [f.severity for f in watch(learned(**bold), stay, first=301)] == [Severity.ROLLBACK]
    calm = {"loss_z": 40.0, "loss_z_rollback": 40.0}
    assert [f.severity for f in watch(learned(**calm), stay, first=301)] == []
    share = {"loss_rise_rollback": 0.5}
    assert [f.severity for f in watch(learned(**share), stay, first=301)] == []
    assert [f.severity for f in watch(learned(**share), spike, first=301)] == [Severity.SKIP]


def test_two_spikes_apart_are_two():
    found = watch(learned(), [9.0, *noisy(10), 9.0, *noisy(10, 1)], first=301)
    assert brief([f for f in found if f.severity]) == [(301, "SKIP", True), (312, "SKIP", True)]
    assert [f.onset for f in found] == [301, 301, 312, 312]


def test_excursion_that_ended_is_said_again_when_another_begins():
    detector = learned()
    for first in (301, 401):
        found = watch(detector, [10.8] * 20 + noisy(80), first)
        assert [f.step for f in costly(found)] == [first + 2]
        assert [f.step for f in found if f.new] == [first]
        assert found[-1].evidence["outcome"] == "recovered"


@pytest.mark.parametrize("seed", range(6))
def test_burst_of_spikes_is_skipped_one_by_one_and_ends_as_recovered(seed):
    losses = np.array(noisy(1000, seed))
    losses[[600, 603, 606, 609]] *= 1.4
    found = watch(LossSpike(DetectSection()), losses)
    skipped = [f.step for f in found if f.severity]
    assert skipped[:3] == [601, 604, 607]
    assert set(skipped) <= {601, 604, 607, 610}
    assert len(costly(found)) <= 1
    assert found[-1].evidence["outcome"] == "recovered"


def test_batches_skipped_one_after_another_at_the_same_step_are_one_spike():
    """A skipped step keeps its number: three bad batches in a row are three attempts at one step."""
    detector = learned()
    found = [detector.observe(signal(301, 9.0, None, attempt=n, flags=HIGH, loss_limit=5.0)) for n in (1, 2, 3, 4)]
    assert brief(found) == [(301, "SKIP", True), (301, "SKIP", False), (301, "ROLLBACK", False), (301, "SKIP", False)]


# ---- what the gate said


def test_it_sets_no_limit_for_the_gate_since_a_finite_loss_vetoes_nothing():
    detector = learned()
    assert detector.limits() == {}
    watch(detector, [9.0] * 50, first=301)
    assert detector.limits() == {}


def test_loss_that_the_gate_vetoed_on_trial_is_high_wherever_its_own_limit_is():
    (found,) = watch(learned(), [2.2], first=301, loss_limit=2.1, flags=HIGH)
    assert brief([found]) == [(301, "SKIP", True)]


@pytest.mark.parametrize("of_the_gate", [None, 1.0, 50.0])
def test_loss_that_landed_is_judged_by_its_own_limit_only(of_the_gate):
    limit = high_above(learned())
    assert watch(learned(), [limit], first=301, loss_limit=of_the_gate) == []
    found = watch(learned(), [math.nextafter(limit, math.inf)], first=301, loss_limit=of_the_gate)
    assert found[0].evidence["limit"] == limit


def test_vetoed_steps_are_not_learned_from():
    detector, clean = LossSpike(DetectSection()), LossSpike(DetectSection())
    for step, value in enumerate(noisy(60), 1):
        detector.observe(signal(step, 3.0, None, flags=int(Flag.GRAD_NONFINITE)))
        detector.observe(signal(step, value, None))
        clean.observe(signal(step, value, None))
    assert detector.state_dict()["course"] == clean.state_dict()["course"]


def test_overflow_of_the_loss_scaler_is_looked_past():
    detector = learned()
    before = json.dumps(detector.state_dict())
    assert watch(detector, [1e9], first=301, overflow=True) == []
    assert json.dumps(detector.state_dict()) == before


def test_spike_is_found_right_after_a_burst_of_nans():
    detector = learned()
    limit = high_above(detector)
    assert watch(detector, [math.nan, math.inf, -math.inf] * 30, first=301) == []
    assert high_above(detector) == limit
    assert brief(watch(detector, [100.0], first=391)) == [(391, "SKIP", True)]


# ---- over a log


@pytest.mark.parametrize(
    "rho",
    [
        0.0,
        *(r for r in (0.8, 0.95)),
    ],
)
def test_loss_that_is_vouched_for_leaves_the_state_that_observe_leaves(rho):
    """`calm` and `observe` on the same loss, at every height up to the limit."""
    taught = LossSpike(DetectSection())
    watch(taught, 2.2 + 0.05 * ar1(2000, 1, rho))
    watch(taught, [2.2] * 20, first=2001)
    state = json.loads(json.dumps(taught.state_dict()))
    assert state["score"] == 0.0
    for loss in np.linspace(2.0, 2.0 * high_above(taught) - 2.2, 200).tolist():
        looked, vouched = LossSpike(DetectSection()), LossSpike(DetectSection())
        for detector in (looked, vouched):
            detector.load_state_dict(json.loads(json.dumps(state)))
        if vouched.absorb_normal([loss], [2021]):
            assert looked.observe(signal(2021, loss, None)) is None
            one, other = vouched.state_dict(), looked.state_dict()
            assert one | {"onset": 0} == other | {"onset": 0}


# ---- what it learns


def test_spike_does_not_enter_the_course_it_is_measured_by():
    detector = learned()
    limit = high_above(detector)
    watch(detector, [10.8] * 50, first=301)
    assert high_above(detector) == limit
    watch(detector, noisy(50), first=351)
    assert high_above(detector) == pytest.approx(limit, rel=0.05)


def test_zero_is_never_high_and_never_enters():
    """A hinge loss that no sample of the batch violates."""
    detector, clean = LossSpike(DetectSection()), LossSpike(DetectSection())
    for step, value in enumerate(noisy(400), 1):
        if step % 2:
            assert detector.observe(signal(step, 0.0, None)) is None
        assert detector.observe(signal(step, value, None)) is None
        clean.observe(signal(step, value, None))
    assert detector.state_dict()["course"] == clean.state_dict()["course"]


def test_zeros_before_a_rise_do_not_hide_it():
    detector = learned()
    watch(detector, [0.0] * 3, first=301)
    assert [f.step for f in costly(watch(detector, [2.2 * 1.2] * 50, first=304))] == [306]


def test_level_that_dropped_is_no_trend_and_hides_nothing_that_follows():
    detector = learned(2000)
    assert watch(detector, noisy(64, 5, level=1.5), first=2001) == []
    course = detector.state_dict()["course"]
    assert course["level"] == pytest.approx(1.5, rel=0.05)
    assert abs(course["trend"]) < 0.01
    assert watch(detector, noisy(300, 6, level=1.5), first=2065) == []
    assert high_above(detector) == pytest.approx(1.5 * 1.25, rel=0.1)


def test_rise_soon_after_a_drop_of_the_level_is_found():
    """The learning rate stepped down, the loss dropped by a third, and then a spike lifts it by 20% for good."""
    detector = learned(2000)
    watch(detector, noisy(40, 5, level=1.5), first=2001)
    assert costly(watch(detector, noisy(100, 6, level=1.8), first=2041)) != []


def test_single_low_loss_does_not_hide_a_rise_that_follows():
    """One batch of padding, and then a spike that does not recover."""
    detector = learned()
    watch(detector, [0.01, *noisy(20, 4)], first=301)
    assert costly(watch(detector, [2.2 * 1.2] * 50, first=322)) != []


def test_falling_loss_is_followed_and_a_spike_down_there_is_found():
    detector = LossSpike(DetectSection())
    assert watch(detector, [(2 + 8 * math.exp(-n / 150)) * w / 2.2 for n, w in enumerate(noisy(1500, seed=2))]) == []
    assert brief(watch(detector, [3.0], first=1501)) == [(1501, "SKIP", True)]


def test_fast_divergence_is_found_before_the_loss_has_risen_by_a_third():
    losses = [2.2 * 1.01**n * wobble / 2.2 for n, wobble in enumerate(noisy(100, seed=4))]
    found = watch(learned(), losses, first=301)
    assert found[0].severity is Severity.ROLLBACK
    assert losses[found[0].step - 301] < 1.33 * 2.2


# ---- losses of other kinds


def test_negative_losses_are_watched_like_positive_ones():
    detector = LossSpike(DetectSection())
    assert watch(detector, [-5.0 + 0.1 * (w - 2.2) / 0.044 for w in noisy(300)]) == []
    assert watch(detector, [-4.5], first=301) == []
    assert brief(watch(detector, [-3.0], first=302)) == [(302, "SKIP", True)]


def test_limit_on_a_negative_loss_is_not_the_one_of_when_it_was_positive():
    detector = LossSpike(DetectSection())
    watch(detector, noisy(100, level=3.0) + [-5.0 + v - 2.2 for v in noisy(1000)])
    assert high_above(detector) < -3.0


def test_loss_that_crosses_zero_slowly_alarms_nobody():
    losses = [3.0 - 0.02 * n + 0.1 * (w - 2.2) / 0.044 for n, w in enumerate(noisy(500))]
    assert min(losses) < -5 < 2 < max(losses)
    assert watch(LossSpike(DetectSection()), losses) == []


def test_loss_that_crosses_zero_fast_does_not_break_it():
    """The course is already under zero while no loss has been, and then comes the first that is, above the course."""
    detector = LossSpike(DetectSection(warmup_steps=33))
    watch(detector, [10 - 0.3 * n for n in range(33)] + [0.05, -0.1])
    assert math.isfinite(high_above(detector))
    for seed in range(100):
        noise = np.random.default_rng(seed).normal(size=120)
        assert costly(watch(LossSpike(DetectSection()), 3 - 0.06 * np.arange(120) + 0.05 * noise)) == []


@pytest.mark.parametrize("level", [1.5, 0.0, -3.0, 1e-8, 1e8])
def test_constant_losses_alarm_nobody_until_they_jump(level):
    detector = LossSpike(DetectSection())
    assert watch(detector, [level] * 500) == []
    assert watch(detector, [math.nextafter(level, math.inf), level], first=501) == []
    if level != 0.0:
        assert brief(watch(detector, [level + abs(level) + 1.0], first=503)) == [(503, "SKIP", True)]


def healthy(count: int, kind: str, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    noise, n = random.normal(size=count), np.arange(count)
    match kind:
        case "bimodal":
            return np.where(random.random(count) < 0.5, 2.0, 3.0) + 0.05 * noise
        case "rare source":
            return np.where(random.random(count) < 0.02, 4.0, 2.0) + 0.05 * noise
        case "very rare source":
            return np.where(random.random(count) < 0.005, 4.0, 2.0) + 0.05 * noise
        case "the same outlier each epoch":
            return np.where(n % 150 == 149, 6.0, 2.0) + 0.05 * noise
        case "heavy tail":
            return 2.0 + 0.05 * random.standard_t(3, size=count)
        case "near zero":
            return 0.01 * random.lognormal(0, 1.0, count)
        case "staircase":
            return 2.0 * 0.85 ** (n // 500) + 0.03 * noise
        case "quantised":
            return np.round(2.2 + 0.05 * noise, 1)
        case "hinge":
            return np.maximum(0.0, 0.2 + 0.3 * noise)
        case "negative":
            return -5 + 0.3 * noise
        case "alike":
            return 2.2 + 0.05 * ar1(count, seed, 0.6)
    return (2 + 8 * np.exp(-n / 150)) * (1 + 0.02 * noise)


@pytest.mark.parametrize(
    ("kind", "skips"),
    [
        ("falling", 0.0),
        ("bimodal", 0.0),
        ("rare source", 0.5),
        ("very rare source", 1.0),
        ("the same outlier each epoch", 1.0),
        ("heavy tail", 0.5),
        ("near zero", 0.5),
        ("staircase", 0.0),
        ("quantised", 0.0),
        ("hinge", 0.0),
        ("negative", 0.0),
        ("alike", 0.0),
    ],
)
def test_healthy_losses_of_every_kind_raise_no_costly_alarm(kind, skips):
    """`skips`: of a hundred steps at most. A single batch out of line may be skipped; it is cheap."""
    said: Counter[Severity] = Counter()
    for seed in range(4):
        said.update(f.severity for f in watch(LossSpike(DetectSection()), healthy(2000, kind, seed)))
    assert said[Severity.ROLLBACK] == 0
    assert said[Severity.SKIP] <= skips * 80


@pytest.mark.parametrize("rho", [0.5, 0.8, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_spike_inside_noise_whose_neighbours_are_alike_is_found_at_once(rho, seed):
    losses = 2.2 + 0.05 * ar1(1000, seed, rho)
    losses[800:840] += 1.0
    found = [f for f in watch(LossSpike(DetectSection()), losses) if f.severity]
    assert brief(found[:3]) == [(801, "SKIP", True), (802, "SKIP", False), (803, "ROLLBACK", False)]


def test_outlier_that_comes_each_epoch_does_not_hide_a_spike_that_stays():
    losses = healthy(2000, "the same outlier each epoch", 1)
    losses[1700:1760] = 6.0
    found = costly(watch(LossSpike(DetectSection()), losses))
    assert [f.step for f in found][:1] and 1701 <= found[0].step <= 1712


# ---- expected shifts


def test_announced_level_shift_is_learned_and_an_unannounced_one_is_found():
    shifted = noisy(300, seed=5, level=3.3)
    assert costly(watch(learned(), shifted, first=301)) != []
    detector = learned()
    detector.rebaseline()
    assert watch(detector, shifted, first=301) == []
    assert brief(watch(detector, [3.3 * 1.6], first=601)) == [(601, "SKIP", True)]


def test_gross_loss_after_an_announced_shift_is_found_and_not_learned():
    detector = learned()
    detector.rebaseline()
    found = watch(detector, [3.3, 50.0, 50.0, 3.3, 60.0], first=301)
    assert brief(found) == [(302, "SKIP", True), (303, "SKIP", False), (305, "SKIP", True)]
    assert [f.evidence["z"] for f in found] == [None] * 3, "there is no course to measure it by"
    watch(detector, noisy(122, level=3.3), first=306)
    assert high_above(detector) < 3.3 * 2


def test_after_an_announced_shift_only_gross_losses_are_high_until_24_steps_are_learned():
    detector = learned()
    detector.rebaseline()
    gross = high_above(detector)
    assert gross == pytest.approx(6 * 2.2, rel=0.02)
    for step, value in enumerate(noisy(23, level=4.4), 301):
        assert detector.observe(signal(step, 9.0 if step == 310 else value, None)) is None
        assert high_above(detector) == gross
    watch(detector, [4.4], first=324)
    assert high_above(detector) < gross


def test_gross_is_fifty_deviations_where_the_noise_is_wide():
    detector = LossSpike(DetectSection())
    watch(detector, noisy(300, noise=0.2))
    deviation = detector.state_dict()["course"]["scale"]
    detector.rebaseline()
    assert high_above(detector) == pytest.approx(2.2 + 50 * deviation, rel=0.02)


def test_announced_shift_downwards_leaves_no_limit_from_above():
    detector = learned()
    detector.rebaseline()
    watch(detector, noisy(124, level=0.3), first=301)
    assert high_above(detector) < 0.6


def test_excursion_before_an_announced_shift_neither_adds_up_with_nor_mutes_one_after_it():
    detector = learned()
    assert len(watch(detector, [9.0, 9.0], first=301)) == 2
    detector.rebaseline()
    found = watch(detector, [*noisy(100, level=3.3), 12.0, 12.0, 12.0], first=303)
    assert brief(found) == [(403, "SKIP", True), (404, "SKIP", False), (405, "ROLLBACK", False)]
    assert {f.onset for f in found} == {403}


def test_gross_level_that_stays_after_an_announced_shift_is_accepted_in_the_end():
    detector = learned()
    detector.rebaseline()
    assert len(watch(detector, [50.0] * 300, first=301)) < 100
    assert watch(detector, [50.0] * 100, first=601) == []


def test_second_shift_before_the_first_was_learned_keeps_the_gross_limit():
    detector = learned()
    detector.rebaseline()
    gross = high_above(detector)
    assert gross < math.inf
    detector.rebaseline()
    assert high_above(detector) == gross
