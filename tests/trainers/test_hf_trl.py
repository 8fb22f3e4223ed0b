"""TRL's trainers under the guard, with their own metrics: harmless without a fault, and exact after it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from typing import Any

import pytest
import torch
from hf_cases import QUICK, assert_same
from transformers import TrainerCallback
from trl_cases import GARBAGE, NAN, TRLCase

FORK = multiprocessing.get_context("fork")
WATCHED = {**QUICK, "recover": QUICK["recover"] | {"watch_steps": 8}}
kinds = pytest.mark.parametrize(
    "kind", ["sft", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dpo", "kto", "reward"))]
)


@kinds
@pytest.mark.shows("sft", "harmless")
def test_without_a_fault_it_is_the_plain_trainer(kind, tmp_path):
    case = TRLCase(kind, gradient_accumulation_steps=5)
    assert_same(case.guarded(tmp_path), case.plain(tmp_path))


@kinds
@pytest.mark.shows("sft", "nan")
def test_a_nan_batch_is_left_out_of_the_metrics_too(kind, tmp_path):
    case = TRLCase(kind, faults={7: NAN})
    run = case.guarded(tmp_path)
    assert run.actions() == ["replay", "skip"]
    assert_same(run, case.plain(tmp_path, (7,)))


@pytest.mark.slow
@pytest.mark.shows("sft", "garbage")
def test_a_window_of_garbage_is_left_out(tmp_path):
    case = TRLCase("sft", batches=150, faults=dict.fromkeys(range(80, 85), GARBAGE))
    case.config = WATCHED
    run = case.guarded(tmp_path)
    assert run.actions() == ["rollback", "rollback", *["skip"] * 5]
    assert_same(run, case.plain(tmp_path, tuple(range(80, 85))))


HITS: list[int] = []


class Faults(TrainerCallback):
    """One Inf gradient before step 30, weights scaled after step 80, or the process killed after step 50."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        def gradient(value: torch.Tensor) -> torch.Tensor | None:
            if self.what != "inf" or HITS or state.global_step + 1 != 30:
                return None
            HITS.append(30)
            return value * float("inf")

        next(model.parameters()).register_hook(gradient)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if self.what == "weights" and state.global_step == 80 and not HITS:
            HITS.append(80)
            with torch.no_grad():
                model.model.layers[0].mlp.down_proj.weight.mul_(300.0)
        if self.what == "killed" and state.global_step == 50:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [pytest.param(what, marks=pytest.mark.shows("sft", what)) for what in ("inf", "weights", "killed")],
)
def test_a_transient_fault_leaves_no_trace(what, tmp_path):
    HITS.clear()
    case = TRLCase("sft", batches=150)
    case.config = WATCHED
    case.on_trainer = lambda trainer: trainer.add_callback(Faults(what))
    if what == "killed":
        process = FORK.Process(target=case.guarded, args=(tmp_path,))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        case.on_trainer = lambda trainer: None
    run = case.guarded(tmp_path)
    assert run.actions() == {"inf": ["replay"], "weights": ["rollback"], "killed": []}[what]
    case.on_trainer = lambda trainer: None
    assert_same(run, case.plain(tmp_path))


@pytest.mark.slow
@pytest.mark.shows("sft", "border")
def test_a_rollback_over_the_border_of_an_epoch_is_exact(tmp_path):
    HITS.clear()
    case = TRLCase("sft", batches=78, num_train_epochs=2)
    case.config = WATCHED
    case.on_trainer = lambda trainer: trainer.add_callback(Faults("weights"))
    run = case.guarded(tmp_path)
    events = map(json.loads, (tmp_path / "run" / "journal.jsonl").read_text().splitlines())
    (rollback,) = [event for event in events if event.get("action") == "rollback"]
    assert rollback["to_step"] < 78 < rollback["from_step"], "step 78 ends an epoch"
    case.on_trainer = lambda trainer: None
    assert_same(run, case.plain(tmp_path))


def test_a_trainer_whose_generations_span_steps_is_refused(tmp_path):
    from trl import GRPOTrainer, RLOOTrainer

    import holdfast

    for kind in (GRPOTrainer, RLOOTrainer):
        case: Any = TRLCase("sft")
        trainer = case.trainer(tmp_path)
        trainer.__class__ = kind  # its methods tell it
        with pytest.raises(holdfast.SetupError, match="span several steps"):
            holdfast.hf.guard(trainer)
