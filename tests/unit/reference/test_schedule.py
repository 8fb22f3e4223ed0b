"""The learning rate over the steps, as the optimizer gets it."""

from __future__ import annotations

import itertools

import pytest

from holdfast.reference.config import parse
from holdfast.reference.trainer import Trainer

STEPS = 200


def shares(steps: int = STEPS, **scheduler) -> list[float]:
    """The LR of every update, and of the one that would follow, as a share of the peak."""
    config = parse(
        {
            "model": {"layers": 1, "width": 8, "heads": 1, "context": 8},
            "train": {"steps": steps, "batch_size": 1, "device": "cpu"},
            "eval": {"batches": 1},
            "optimizer": {"lr": 0.5},
            "scheduler": scheduler,
        },
        "test",
    )
    trainer = Trainer(config)
    found = []
    for _ in range(steps + 1):
        found.append(trainer.optimizer.param_groups[0]["lr"] / 0.5)
        trainer.optimizer.step()
        trainer.scheduler.step()
    return found


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_warm_up_is_linear_and_reaches_the_peak(kind):
    found = shares(kind=kind, warmup_steps=40)
    assert found[:40] == pytest.approx([(n + 1) / 40 for n in range(40)])
    assert found[40] == pytest.approx(1.0)


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_without_a_warm_up_the_first_update_has_the_peak(kind):
    assert shares(kind=kind, warmup_steps=0)[0] == 1.0


@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
def test_cosine_falls_from_the_peak_to_the_floor_and_is_halfway_in_the_middle(floor):
    found = shares(kind="cosine", warmup_steps=40, floor=floor)
    after = found[40:]
    assert after == sorted(after, reverse=True)
    assert after[0] == pytest.approx(1.0)
    assert after[80] == pytest.approx((1 + floor) / 2)
    assert found[STEPS] == pytest.approx(floor)


def test_cosine_is_steepest_in_the_middle():
    after = shares(kind="cosine", warmup_steps=40)[40:]
    falls = [a - b for a, b in itertools.pairwise(after)]
    assert falls[80] > 3 * falls[5] and falls[80] > 3 * falls[-5]


@pytest.mark.parametrize(("decay_share", "stays"), [(0.2, 160), (0.5, 100)])
def test_wsd_stays_at_the_peak_and_decays_in_a_line_to_the_floor(decay_share, stays):
    found = shares(kind="wsd", warmup_steps=40, decay_share=decay_share, floor=0.1)
    assert found[40 : stays + 1] == pytest.approx([1.0] * (stays - 39))
    length = STEPS - stays
    assert found[stays:] == pytest.approx([1 - 0.9 * n / length for n in range(length + 1)])


def test_wsd_with_hardly_any_decay_still_ends_at_the_floor():
    assert shares(kind="wsd", warmup_steps=2, decay_share=0.001, floor=0.25)[-2:] == pytest.approx([1.0, 0.25])


def test_constant_stays_at_the_peak_whatever_the_floor():
    assert shares(kind="constant", warmup_steps=10, floor=0.0)[10:] == [1.0] * (STEPS - 9)


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_learning_rate_is_above_zero_and_at_most_the_peak(kind):
    found = shares(steps=7, kind=kind, warmup_steps=6, floor=0.0)
    assert all(0 < share <= 1 for share in found[:7])
