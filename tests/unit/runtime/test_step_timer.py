"""What a rank's row says about its time: each second since the exchange before counts once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.runtime.agree.step_timer import StepTimer
from holdfast.runtime.update.local_grad_norms import LocalGradNorms


class Hand:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def timer(hand: Hand) -> StepTimer:
    """A rank that has just received the rows of a step, for which it waited half a second."""
    timer = StepTimer(hand)
    sent_at = hand.seconds
    hand.seconds += 0.5
    timer.exchanged(sent_at)
    return timer


def step(timer: StepTimer, hand: Hand, parts: int = 1) -> float:
    """Take 1 s between steps, 2 s for each batch, 3 s for each part, 4 s after the last gradient. Return when that came."""
    hand.seconds += 1.0
    for part in range(parts):
        began = hand.seconds
        hand.seconds += 2.0
        timer.add_data(began)
        if part == 0:
            timer.enter()
        hand.seconds += 3.0
    last_gradient_at = hand.seconds
    hand.seconds += 4.0
    return last_gradient_at


@pytest.mark.parametrize("parts", [1, 3])
def test_phases_are_told_apart_and_add_up(timer, hand, parts):
    began = hand.seconds
    phases = timer.phases(step(timer, hand, parts), on_device=False)
    assert phases == pytest.approx((1.0, 2.0 * parts, 3.0 * parts, 4.0 + 0.5))
    assert sum(phases) == pytest.approx(hand.seconds - began + 0.5)


def test_without_a_gradient_all_up_to_the_row_is_computing(timer, hand):
    step(timer, hand)
    assert timer.phases(None, on_device=False) == pytest.approx((1.0, 2.0, 7.0, 0.5))


def test_each_step_begins_with_the_rows_of_the_one_before(timer, hand):
    for _ in range(2):
        phases = timer.phases(step(timer, hand), on_device=False)
        sent_at = hand.seconds
        hand.seconds += 0.25
        timer.exchanged(sent_at)
    assert phases == pytest.approx((1.0, 2.0, 3.0, 4.25))


def test_on_a_device_time_of_the_host_counts_only_beyond_its_wait_for_the_device(timer, hand):
    began = hand.seconds
    hand.seconds += 1.5
    timer.exchanged(began)
    last_gradient_at = step(timer, hand)
    assert timer.phases(last_gradient_at, on_device=True) == pytest.approx((0.0, 0.5, 1.5, 5.5))
    assert timer.phases(last_gradient_at, on_device=False) == pytest.approx((1.0, 2.0, 3.0, 5.5))


def test_wait_inside_a_step_is_counted(timer, hand):
    last_gradient_at = step(timer, hand)
    began = hand.seconds
    hand.seconds += 0.75
    timer.add_wait(began)
    *_, wait = timer.phases(last_gradient_at, on_device=False)
    assert wait == pytest.approx(4.75 + 0.5 + 0.75)


def test_last_gradient_is_timed_when_it_arrives_once_a_step(hand):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    norms = LocalGradNorms([("", model)], enabled=True, now=hand)
    assert norms.pop_last_arrival() is None
    hidden = model[0](torch.ones(1, 2))
    hidden.register_hook(lambda _: setattr(hand, "seconds", 102.0))  # the backward reaches the first layer
    model[1](hidden).sum().backward()
    hand.seconds = 109.0  # the ranks average
    norms.finish_backward()
    assert (norms.pop_last_arrival(), norms.pop_last_arrival()) == (102.0, None)
    norms.close()
