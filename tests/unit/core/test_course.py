"""The course of a loss: what is off it, whether it is a descent, and the jumps of the LR on record."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from random import Random

import pytest

from holdfast.core.base.types import Signal
from holdfast.core.decide.course import BLOCK, Course, RecordedLrJump, is_falling


def follow(losses: Iterable[float], course: Course | None = None, lrs: dict[int, float] | None = None) -> Course:
    course = course or Course()
    first = course.count + 1
    for step, loss in enumerate(losses, first):
        lr = 1e-3 if lrs is None else lrs.get(step, 1e-3)
        course.signals.append(Signal(step=step, loss=loss, lr=lr))
        course.count += 1
        if course.count % BLOCK == 0:
            course.close_block()
    return course


def noise(count: int, level: float, width: float = 0.02, seed: int = 0) -> list[float]:
    random = Random(seed)
    return [level + width * random.gauss(0, 1) for _ in range(count)]


def descent(count: int) -> list[float]:
    return [2 + 2 * math.exp(-n / 60) + w for n, w in enumerate(noise(count, 0.0, 0.01))]


# ---- reference


def test_reference_is_the_level_before_the_onset_whatever_follows():
    course = follow([*noise(100, 2.0), *[50.0] * 20])
    level, limit = course.reference(101)
    assert level == pytest.approx(2.0, abs=0.02)
    assert 2.02 < limit < 2.2


def test_too_short_a_past_is_no_reference():
    course = follow(noise(20, 2.0))
    assert course.reference(8) is None
    assert course.reference(9) is not None


def test_limit_is_never_nearer_than_a_share_of_the_level():
    level, limit = follow([2.0] * 100).reference(101)
    assert (level, limit) == (2.0, 2.0 * 1.015)


def test_batches_of_another_kind_lie_within_the_limit_and_a_single_outlier_does_not_widen_it():
    losses = noise(120, 2.0)
    losses[60] = 9.0
    assert follow(losses).reference(121)[1] < 2.2
    losses[90] = 4.0
    assert follow(losses).reference(121)[1] == pytest.approx(4.0, abs=0.1)


# ---- descent


def test_loss_that_fell_far_below_its_first_values_is_a_descent():
    course = follow(descent(400))
    assert course.untrained == pytest.approx(3.9, abs=0.1)
    assert course.best == pytest.approx(2.0, abs=0.05)
    assert course.is_descent(2.0, 401)
    assert not course.is_descent(3.5, 401), "not far enough"


@pytest.mark.parametrize("count", [0, BLOCK - 1])
def test_too_few_losses_are_no_descent(count):
    course = follow(descent(count))
    assert course.untrained is None
    assert not course.is_descent(2.0, count + 1)


def test_signed_loss_is_no_descent():
    assert not follow([4 - 0.02 * n for n in range(400)]).is_descent(-3.0, 401)


def test_loss_that_has_risen_and_come_back_by_itself_wanders():
    losses = [*descent(200), *noise(64, 3.2), *noise(100, 2.0)]
    course = follow(losses)
    assert not course.is_descent(2.0, len(losses) + 1)
    assert course.is_descent(2.0, 200), "a rise after the onset is not held against it"


# ---- jumps of the LR


@pytest.mark.parametrize("onset", [100, 101, 115])
def test_jump_of_the_lr_shortly_before_the_onset_is_on_record(onset):
    course = follow([2.0] * 130, lrs=dict.fromkeys(range(100, 131), 0.1))
    assert course.lr_jump(onset) == RecordedLrJump(100, 1e-3, 0.1)


@pytest.mark.parametrize("onset", [90, 118])
def test_jump_long_before_the_onset_or_after_it_is_not_its_cause(onset):
    course = follow([2.0] * 130, lrs=dict.fromkeys(range(100, 131), 0.1))
    assert course.lr_jump(onset) is None


def test_warm_up_and_fall_of_the_lr_are_no_jumps():
    rising = follow([2.0] * 100, lrs={step: 1e-3 * (1 + step / 100) for step in range(1, 101)})
    falling = follow([2.0] * 100, lrs=dict.fromkeys(range(90, 101), 0.0001))
    assert rising.lr_jump(95) is falling.lr_jump(95) is None


def test_last_of_several_jumps_counts():
    course = follow([2.0] * 110, lrs={step: 0.01 if step < 105 else 0.1 for step in range(100, 111)})
    assert course.lr_jump(106) == RecordedLrJump(105, 0.01, 0.1)


# ---- batches at fault


def test_solid_block_of_high_losses_that_ends_at_once_is_the_data():
    course = follow([*noise(100, 2.0), *[6.0] * 5, *noise(5, 2.0, seed=1)])
    assert [signal.step for signal in course.batches_at_fault(101)] == [101, 102, 103, 104, 105]


@pytest.mark.parametrize("tail", [[6.0] * 5, [6.0, 6.0, 6.0, 5.0, 4.0, 3.0, 2.5], [2.3, 3.0, 6.0, 6.0, 6.0, 2.0]])
def test_rise_that_does_not_begin_and_end_with_a_batch_is_not_the_data(tail):
    assert follow([*noise(100, 2.0), *tail]).batches_at_fault(101) == []


# ---- the rest


def test_falling_is_five_percent_lower_than_as_many_losses_before():
    assert is_falling([4.0] * 8 + [3.7] * 8, 8)
    assert not is_falling([4.0] * 8 + [3.9] * 8, 8)
    assert is_falling([4.0] * 10, 8), "too few to tell"


def test_recent_is_a_median_of_exactly_as_many_losses():
    course = follow([1.0, 2.0, 30.0])
    assert course.recent(3) == 2.0
    assert course.recent(3, since=2) is None
    assert course.recent(2, since=2) == 16.0


@pytest.mark.parametrize("at", [0, 1, 31, 32, 100, 333])
def test_state_through_json_text_at_any_step_gives_the_same_course(at):
    losses = [*descent(300), *noise(64, 3.2), *noise(100, 2.0)]
    lrs = dict.fromkeys(range(390, 400), 0.1)
    whole, broken = follow(losses, lrs=lrs), Course()
    broken.load_state_dict(json.loads(json.dumps(follow(losses[:at], lrs=lrs).state_dict(), allow_nan=False)))
    follow(losses[at:], broken, lrs)
    assert broken.state_dict() == whole.state_dict()
    assert broken.reference(400) == whole.reference(400)
    assert broken.lr_jump(395) == whole.lr_jump(395) is not None
    assert broken.is_descent(2.0, 250) is whole.is_descent(2.0, 250)


def test_course_stays_small_over_a_long_run():
    assert len(json.dumps(follow(noise(20_000, 2.0)).state_dict())) < 12_000
