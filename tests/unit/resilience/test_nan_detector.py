"""NaN and Inf in losses and gradients, in one process and in two."""

from __future__ import annotations

import logging
import math
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from holdfast.resilience import NaNDetector, NaNState, check_nccl_health

NAN, INF = math.nan, math.inf


def with_gradients(*bad: str) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    model(torch.ones(2, 4)).sum().backward()
    for name, parameter in model.named_parameters():
        if name in bad:
            parameter.grad.view(-1)[1] = INF
    return model


@pytest.mark.parametrize("loss", [NAN, INF, -INF, torch.tensor(NAN), torch.tensor(INF, dtype=torch.bfloat16)])
def test_a_loss_that_is_not_finite_is_reported_and_counted(loss, caplog):
    detector = NaNDetector()
    assert detector.check_loss(torch.tensor(2.5, requires_grad=True).detach(), step=1) is True
    assert detector.check_loss(loss, step=2) is False
    assert detector.state == NaNState(1, 1, 2.5, 1, [2])
    assert "NaN/Inf loss at step 2" in caplog.text


def test_a_row_ends_with_a_finite_loss_and_the_total_does_not():
    detector = NaNDetector(max_consecutive=2)
    assert [detector.check_loss(loss, step) for step, loss in enumerate([NAN, 1.0, NAN, NAN])] == [
        False,
        True,
        False,
        False,
    ]
    assert detector.should_rollback
    assert detector.state.total_nans == 3
    detector.reset()
    assert detector.state == NaNState()
    assert not detector.should_rollback


def test_the_newest_steps_are_kept():
    detector = NaNDetector(max_history=2)
    for step in range(5):
        detector.check_loss(NAN, step)
    assert detector.state.nan_steps == [3, 4]


def test_no_history_keeps_no_steps():
    detector = NaNDetector(max_history=0)
    detector.check_loss(NAN, 1)
    assert detector.state.nan_steps == []
    assert detector.state.total_nans == 1


def test_the_first_bad_gradient_is_named(caplog):
    detector = NaNDetector()
    assert detector.check_gradients(with_gradients(), step=1) is True
    assert detector.check_gradients(with_gradients("1.weight", "1.bias"), step=2) is False
    assert "NaN/Inf gradient in 1.weight at step 2" in caplog.text


def test_bad_gradients_in_a_row_ask_for_a_rollback_although_losses_are_finite():
    detector = NaNDetector(max_consecutive=3)
    for step in range(3):
        assert detector.check_loss(1.0, step)
        assert not detector.should_rollback
        assert not detector.check_gradients(with_gradients("0.bias"), step)
    assert detector.should_rollback
    assert detector.check_loss(1.0, 3)
    assert detector.check_gradients(with_gradients(), 3)
    assert detector.state.consecutive_nans == 0


def test_loss_and_gradients_of_one_step_count_once():
    detector = NaNDetector()
    detector.check_loss(NAN, 7)
    detector.check_gradients(with_gradients("0.weight"), 7)
    assert detector.state.total_nans == detector.state.consecutive_nans == 1


def test_a_sparse_gradient_is_checked():
    table = torch.nn.Embedding(8, 2, sparse=True)
    table(torch.tensor([1, 3])).sum().backward()
    detector = NaNDetector()
    assert detector.check_gradients(table, 1)
    table.weight.grad = table.weight.grad * NAN
    assert not detector.check_gradients(table, 2)


@pytest.mark.parametrize("check", ["check_loss", "check_gradients"])
def test_raise_raises_and_counts(check):
    detector = NaNDetector(action="raise")
    with pytest.raises(RuntimeError, match="NaN/Inf"):
        getattr(detector, check)(NAN if check == "check_loss" else with_gradients("0.bias"), 4)
    assert detector.state.nan_steps == [4]


def test_skip_says_so(caplog):
    with caplog.at_level(logging.WARNING, "holdfast"):
        NaNDetector(action="skip").check_loss(NAN, 1)
    assert "skipping the optimizer step" in caplog.text


def test_an_unknown_action_is_refused():
    with pytest.raises(ValueError, match="Invalid NaN action: 'ignore'.*warn/skip/raise"):
        NaNDetector(action="ignore")


def test_a_process_group_without_a_gpu_is_asked(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        detector = NaNDetector()
        assert check_nccl_health(timeout_sec=5)
        assert detector.check_loss(1.0, 1)
        assert not detector.check_loss(NAN, 2)
    finally:
        dist.destroy_process_group()


RANK = """
import sys, math, torch, torch.distributed as dist
from holdfast.resilience import NaNDetector, check_nccl_health
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
detector = NaNDetector()
model = torch.nn.Linear(2, 2)
model(torch.ones(1, 2)).sum().backward()
answers = [check_nccl_health(), detector.check_loss(1.0, 1), detector.check_loss(math.nan if rank else 1.0, 2)]
if rank:
    model.bias.grad[0] = math.nan
answers += [detector.check_gradients(model, 3, all_ranks=True), detector.check_gradients(model, 4)]
print(*answers, detector.state.nan_steps)
dist.barrier()
if rank == 0:
    print(check_nccl_health(timeout_sec=0.3))  # the other rank does not join
"""


@pytest.mark.slow
def test_two_ranks_agree_and_a_rank_that_does_not_join_is_noticed(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=60)[0].splitlines() for rank in ranks]
    assert outputs[0] == ["True True False False True [2, 3]", "False"]
    assert outputs[1] == ["True True False False False [2, 3, 4]"]
