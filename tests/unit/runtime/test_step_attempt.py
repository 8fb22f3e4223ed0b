"""One try of a step: how its parts are weighed, what its data is, and what it reports."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.base.types import Flag, Span
from holdfast.runtime.data.fingerprint import BatchFingerprint
from holdfast.runtime.data.source import Draw, Position
from holdfast.runtime.effects.attempt import StepAttempt
from holdfast.runtime.state.buffers import NO_BUFFERS
from holdfast.runtime.update.measurements import HostMeasurements

START = Position(0, 0, 0)


def draw(epoch: int, start: int, stop: int, samples: int | None = None) -> Draw:
    return Draw(None, Span(epoch, start, stop), None, samples, START, START, None)


def attempt(*draws: Draw, parts: int | None = None, number: int = 4, tries: int = 2) -> StepAttempt:
    inputs = BatchFingerprint(fingerprint=True)
    made = StepAttempt(number, tries, max(1, len(draws)), list(draws) or [draw(0, 0, 8, 8)], NO_BUFFERS, inputs)
    made.parts = parts
    return made


def add(to: StepAttempt, losses, weights, *, is_explicit=False, is_distributed=False) -> list[float]:
    pairs = zip(losses, weights, strict=True)
    return [
        to.add_part(torch.tensor(loss), weight, is_explicit=is_explicit, is_distributed=is_distributed)
        for loss, weight in pairs
    ]


weights = st.lists(st.integers(0, 64), min_size=1, max_size=6)


@given(weights, st.data())
def test_parts_by_their_weights_are_the_mean_over_all(sizes, data):
    """factor / parts, times the correction, is each part's share of the whole; the loss is the same mean."""
    losses = data.draw(st.lists(st.floats(0.125, 8, width=16), min_size=len(sizes), max_size=len(sizes)))
    step = attempt(parts=len(sizes))
    factors = add(step, losses, sizes)
    loss, correction = step.complete(is_distributed=False)
    total = sum(sizes)
    if not total:
        assert math.isnan(loss) and factors == [0.0] * len(sizes) and correction == 1.0
        return
    shares = [factor / len(sizes) * correction for factor in factors]
    assert shares == pytest.approx([size / total for size in sizes])
    assert float(loss) == pytest.approx(sum(v * s for v, s in zip(losses, sizes, strict=True)) / total, rel=1e-5)
    assert step.weight == pytest.approx(total)


def test_equal_parts_need_no_correction_and_a_single_part_is_its_own_mean():
    step = attempt(parts=3)
    assert add(step, [1.0, 2.0, 6.0], [8, 8, 8]) == [1.0, 1.0, 1.0]
    loss, correction = step.complete(is_distributed=False)
    assert (float(loss), correction) == (3.0, 1.0)
    single = attempt(parts=1)
    value = torch.tensor(0.1)
    single.add_part(value, 17.0, is_explicit=True, is_distributed=False)
    assert torch.equal(single.mean_loss(), value)


def test_a_part_without_weight_may_be_nan_and_counts_nothing():
    step = attempt(parts=2)
    assert add(step, [math.nan, 2.0], [0, 8]) == [0.0, 1.0]
    assert step.loss == 2.0
    assert step.losses == [torch.tensor(2.0)]
    assert step.complete(is_distributed=False)[1] == 2.0


def test_nan_loss_of_a_part_that_counts_is_kept():
    step = attempt(parts=2)
    add(step, [1.0, math.nan], [8, 8])
    assert math.isnan(step.loss)


def test_before_the_first_part_there_is_no_loss():
    step = attempt(parts=1)
    assert step.mean_loss() is None
    assert math.isnan(step.loss)
    assert step.weight == 0.0
    with pytest.raises(AssertionError, match="a complete step has a loss"):
        step.complete(is_distributed=False)


def test_without_weights_every_part_counts_alike_on_several_ranks():
    step = attempt(parts=2)
    assert add(step, [1.0, 2.0], [8, 4], is_distributed=True) == [1.0, 1.0]
    assert step.complete(is_distributed=True)[1] == 1.0
    assert step.total_if_equal() is None


def test_with_weights_all_ranks_divide_by_the_unit_they_agreed_on():
    step = attempt(parts=2)
    step.unit = 4.0
    factors = add(step, [1.0, 2.0], [8.0, 2.0], is_explicit=True, is_distributed=True)
    assert factors == [2.0, 0.5]
    assert step.complete(is_distributed=True)[1] == 1.0, "the total of all ranks is not known yet"
    assert (step.weight, step.total_if_equal()) == (10.0, 8.0)
    # Once the total weight is known, the pipeline scales the gradients by total_if_equal / total.
    summed = sum(factor * loss for factor, loss in zip(factors, [1.0, 2.0], strict=True)) / step.parts
    assert summed * step.total_if_equal() / step.weight == pytest.approx((8.0 * 1.0 + 2.0 * 2.0) / 10.0)


def test_rank_whose_parts_all_weigh_nothing_still_has_a_unit():
    step = attempt(parts=2)
    step.unit = 4.0
    add(step, [math.nan, math.nan], [0.0, 0.0], is_explicit=True, is_distributed=True)
    assert (step.weight, step.total_if_equal()) == (0.0, 8.0)


@pytest.mark.parametrize(
    ("draws", "spans"),
    [
        ([(0, 0, 8)], [(0, 0, 8)]),
        ([(0, 0, 8), (0, 8, 16), (0, 16, 20)], [(0, 0, 20)]),
        ([(0, 0, 8), (0, 16, 24)], [(0, 0, 8), (0, 16, 24)]),
        ([(0, 88, 96), (1, 96, 104)], [(0, 88, 96), (1, 96, 104)]),
        ([(0, 88, 96), (1, 0, 8), (1, 8, 16)], [(0, 88, 96), (1, 0, 16)]),
    ],
    ids=["one", "neighbours", "a gap", "same place in two epochs", "an epoch border"],
)
def test_neighbouring_stretches_of_data_are_joined(draws, spans):
    assert attempt(*(draw(*each) for each in draws)).spans() == tuple(Span(*span) for span in spans)


def test_samples_are_known_if_those_of_every_batch_are():
    assert attempt(draw(0, 0, 8, 8), draw(0, 8, 12, 4)).samples == 12
    assert attempt(draw(0, 0, 8, 8), draw(0, 8, 12)).samples is None
    assert attempt(draw(0, 0, 0, 0)).samples == 0


def test_signal_holds_what_was_measured_and_the_limits_it_was_measured_with():
    step = attempt(draw(1, 8, 16, 8))
    step.inputs.add(torch.ones(8, 3, dtype=torch.int64))
    step.lr, step.clip, step.loss_limit, step.grad_limit, step.seconds = 0.1, 1.0, 5.0, 6.0, 0.25
    flags = int(Flag.LOSS_HIGH)
    signal = step.signal(HostMeasurements(7.0, 2.0, flags, False, 1024.0, update_rms=0.5, weight_norm=3.0))
    assert (signal.step, signal.attempt, signal.data) == (4, 2, (Span(1, 8, 16),))
    assert (signal.loss, signal.grad_norm, signal.flags, signal.overflow) == (7.0, 2.0, flags, False)
    assert (signal.loss_scale, signal.update_rms, signal.weight_norm) == (1024.0, 0.5, 3.0)
    assert (signal.lr, signal.clip, signal.loss_limit, signal.grad_limit) == (0.1, 1.0, 5.0, 6.0)
    assert (signal.samples, signal.length, signal.seconds, signal.batch) == (8, 3, 0.25, step.inputs.checksum)
    assert signal.batch is not None


def test_signal_of_a_step_that_was_never_submitted_has_its_loss_and_no_gradient():
    step = attempt(parts=1)
    add(step, [2.5], [8])
    signal = step.unmeasured_signal()
    assert (signal.step, signal.attempt, signal.loss, signal.grad_norm) == (4, 2, 2.5, None)
