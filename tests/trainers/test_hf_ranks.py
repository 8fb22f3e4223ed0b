"""The Hugging Face Trainer on two ranks under the guard: DDP, and FSDP2 through Accelerate."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from hf_cases import QUICK, HFCase, Run
from hf_ranks import assert_same_ending, run_on_two_ranks
from test_hf_trainer import nan
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from trl_cases import NAN, TRLCase

ARGS = {"ddp_backend": "gloo", "per_device_train_batch_size": 2, "ddp_find_unused_parameters": False}
SHARDED = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True, "auto_wrap_policy": "NO_WRAP"}}


def compare(case: HFCase | TRLCase, tmp_path: Any, excluded: tuple[int, ...]) -> list[str]:
    case.config = {**QUICK, "recover": QUICK["recover"] | {"max_consecutive": 3}}

    def guarded(folder: Any) -> Run:
        run = case.guarded(folder)
        assert ("fsdp" in case.args) == any(isinstance(p, DTensor) for p in run.trainer.model.parameters())
        return run

    ends = run_on_two_ranks(guarded, tmp_path / "a")
    expected = run_on_two_ranks(lambda folder: case.plain(folder, excluded), tmp_path / "b")
    for one, other in zip(ends, expected, strict=True):
        assert_same_ending(one, other)
    return Run.read_actions(tmp_path / "a" / "run")


@pytest.mark.slow
@pytest.mark.shows("hf", "ranks")
@pytest.mark.parametrize("args", [{}, SHARDED], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("accumulate", [1, 5])
def test_two_ranks_without_a_fault_are_the_plain_trainer(args, accumulate, tmp_path):
    case = HFCase(args=ARGS | args | {"gradient_accumulation_steps": accumulate})
    assert compare(case, tmp_path, ()) == []


@pytest.mark.slow
@pytest.mark.shows("hf", "ranks")
@pytest.mark.parametrize("args", [{}, SHARDED], ids=["ddp", "fsdp2"])
def test_a_nan_batch_of_one_rank_is_left_out_on_both(args, tmp_path):
    case = HFCase(faults={7: nan}, args=ARGS | args)
    assert compare(case, tmp_path, (7,)) == ["replay", "skip"]


class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 17:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.shows("hf", "ranks")
@pytest.mark.parametrize("args", [{}, SHARDED], ids=["ddp", "fsdp2"])
def test_two_ranks_that_were_killed_resume_as_if_they_never_were(args, tmp_path):
    case = HFCase(args=ARGS | args, callbacks=lambda: [Kill()])
    case.config = {**QUICK, "checkpoint": {"every_steps": 3, "certify_after": 2}}
    with pytest.raises(AssertionError, match="-9"):
        run_on_two_ranks(case.guarded, tmp_path / "a")
    case.callbacks = list
    ends, expected = (run_on_two_ranks(f, tmp_path / name) for name, f in (("a", case.guarded), ("b", case.plain)))
    for one, other in zip(ends, expected, strict=True):
        assert_same_ending(one, other)


@pytest.mark.slow
@pytest.mark.shows("hf", "ranks")
@pytest.mark.parametrize("args", [{}, SHARDED], ids=["ddp", "fsdp2"])
def test_both_ranks_roll_back_over_an_epochs_border(args, tmp_path):
    bad = tuple(range(22, 26))
    case = HFCase(epochs=5, faults=dict.fromkeys(bad, nan), args=ARGS | args)
    assert "rollback" in compare(case, tmp_path, bad)


@pytest.mark.slow
@pytest.mark.shows("sft", "ranks")
@pytest.mark.parametrize("faults", [{}, {7: NAN}], ids=["no fault", "nan"])
def test_two_ranks_of_an_sft_trainer_are_the_plain_ones_without_the_bad_batch(faults, tmp_path):
    case = TRLCase("sft", faults=faults, **ARGS)
    assert compare(case, tmp_path, tuple(faults)) == (["replay", "skip"] if faults else [])
