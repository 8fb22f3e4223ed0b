"""The Hugging Face Trainer under the guard: harmless without a fault, and exact after every fault, bit for bit."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_cases import QUICK, HFCase, Run, Seen, assert_same
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

import holdfast
from holdfast import SetupError
from holdfast.trainers.hf import ABANDONED
from marks import slow

FORK = multiprocessing.get_context("fork")


def nan(x: torch.Tensor) -> torch.Tensor:
    return x * float("nan")


def garbage(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, 30.0)


def config(**recover: Any) -> dict[str, Any]:
    return {**QUICK, "recover": QUICK["recover"] | recover}


def callback(run: Run, kind: type) -> Any:
    return next(c for c in run.trainer.callback_handler.callbacks if isinstance(c, kind))


# ---- without a fault


WAYS = list(itertools.product([1, 5], [0, 2], ["fp32", "bf16", "fp16"], [True, False]))
QUICK_WAYS = [(1, 2, "bf16", False), (5, 0, "fp16", True)]


@pytest.mark.slow
@pytest.mark.shows("hf", "harmless")
@pytest.mark.parametrize(
    ("accumulate", "workers", "precision", "unique"),
    [*QUICK_WAYS, *slow(*(way for way in WAYS if way not in QUICK_WAYS))],
)
def test_without_a_fault_it_is_the_plain_trainer(accumulate, workers, precision, unique, tmp_path):
    """Twelve batches in steps of five leave a remainder, on which the Trainer trains."""
    args = {"gradient_accumulation_steps": accumulate, "dataloader_num_workers": workers}
    case = HFCase(augment=True, unique=unique, args=args | ({} if precision == "fp32" else {precision: True}))
    assert_same(case.guarded(tmp_path), case.plain(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [{"max_grad_norm": 0.0}, {"optim": "sgd"}, {"optim": "adafactor"}, {"lr_scheduler_type": "reduce_lr_on_plateau"}],
)
def test_other_arguments_are_harmless_too(args, tmp_path):
    case = HFCase(args={"eval_strategy": "epoch", **args})
    assert_same(case.guarded(tmp_path), case.plain(tmp_path))


def contents(folder: Path) -> dict[str, Any]:
    """The contents of a Trainer's checkpoints, without times and paths."""
    found: dict[str, Any] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.name == "trainer_state.json":
            state = json.loads(path.read_text())
            timed = ("runtime", "per_second")
            state["log_history"] = [
                {k: v for k, v in e.items() if not any(t in k for t in timed)} for e in state["log_history"]
            ]
            found[name] = state
        elif path.name != "training_args.bin":  # it holds the folder's name
            found[name] = path.read_bytes()
    return found


SAVING = {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "steps", "eval_steps": 5}


@pytest.mark.slow
def test_the_trainers_own_checkpoints_are_the_same_and_either_loads_the_others(tmp_path):
    case = HFCase(args={"gradient_accumulation_steps": 2, **SAVING})
    assert_same(case.guarded(tmp_path), case.plain(tmp_path))
    saved = [tmp_path / kind / "out" for kind in ("guarded", "plain")]
    assert contents(saved[0]) == contents(saved[1])

    def resumed(folder: Path, path: Path, *, is_guarded: bool) -> Run:
        trainer = case.trainer(folder)
        if is_guarded:
            trainer = holdfast.hf.guard(trainer, run_dir=folder / "run", config=case.config)
        trainer.train(resume_from_checkpoint=str(path))
        return Run(trainer)

    for step in (5, 10):
        expected = resumed(tmp_path / f"reference{step}", saved[1] / f"checkpoint-{step}", is_guarded=False)
        assert_same(resumed(tmp_path / f"a{step}", saved[0] / f"checkpoint-{step}", is_guarded=False), expected)
        assert_same(resumed(tmp_path / f"b{step}", saved[1] / f"checkpoint-{step}", is_guarded=True), expected)


# ---- after a fault


@pytest.mark.slow
@pytest.mark.shows("hf", "nan")
@pytest.mark.parametrize(
    ("batches", "workers"), [([11, 12], 0), *slow(([0], 0), ([5], 2), ([11], 0), ([35], 2), ([11, 12], 2))], ids=str
)
def test_a_nan_batch_is_left_out(batches, workers, tmp_path):
    case = HFCase(faults=dict.fromkeys(batches, nan), augment=workers == 2, args={"dataloader_num_workers": workers})
    run = case.guarded(tmp_path)
    assert run.actions() == ["replay", "skip"] * len(batches)
    assert run.trainer.state.global_step == 36 - len(batches)
    assert_same(run, case.plain(tmp_path, tuple(batches)))


@pytest.mark.slow
@pytest.mark.shows("hf", "garbage")
def test_a_window_of_garbage_is_left_out_and_abandoned_checkpoints_are_marked(tmp_path, caplog):
    case = HFCase(count=80, epochs=7, faults=dict.fromkeys(range(90, 95), garbage), config=config(watch_steps=8))
    case.args = {"save_strategy": "steps", "save_steps": 10, "eval_strategy": "epoch"}
    marks = []

    class Marks(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            marks.extend((state.global_step, p.parent.name) for p in Path(args.output_dir).rglob(ABANDONED))

    case.callbacks = lambda: [Marks()]
    run = case.guarded(tmp_path)
    assert run.actions() == ["rollback", "rollback", *["skip"] * 5]
    assert_same(run, case.plain(tmp_path, tuple(range(90, 95))))
    assert set(marks) == {(88, "checkpoint-90"), (89, "checkpoint-90")}
    assert "checkpoint-90 was saved on a branch that is abandoned; marked" in caplog.text
    assert list((tmp_path / "guarded").rglob(ABANDONED)) == [], "saved again on the new branch"
    assert contents(tmp_path / "guarded" / "out") == contents(tmp_path / "plain" / "out")


@pytest.mark.slow
@pytest.mark.shows("hf", "border")
@pytest.mark.parametrize("accumulate", [2, *slow(1)])
def test_a_rollback_over_an_epochs_border(accumulate, tmp_path):
    bad = tuple(range(22, 22 + 4 * accumulate))
    case = HFCase(
        epochs=5, faults=dict.fromkeys(bad, nan), config=config(max_consecutive=3), callbacks=lambda: [Seen()]
    )
    case.args = {"gradient_accumulation_steps": accumulate, "eval_strategy": "epoch"}
    run = case.guarded(tmp_path)
    assert "rollback" in run.actions()
    plain = case.plain(tmp_path, bad)
    assert_same(run, plain)
    seen = [vars(callback(each, Seen)) for each in (run, plain)]
    assert seen[0] == seen[1], "what the callback has kept went back with the run"


class InfGradient(TrainerCallback):
    """An Inf in one gradient, once: a tensor hook puts it there in the backward of one step."""

    def __init__(self, step: int) -> None:
        self.step, self.state, self.done = step, None, []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        next(model.parameters()).register_hook(lambda g: self.gradient(g, state))

    def gradient(self, gradient: torch.Tensor, state: Any) -> torch.Tensor | None:
        if HITS or state.global_step + 1 != self.step:
            return None
        HITS.append(self.step)
        return gradient * float("inf")


HITS: list[int] = []
"""faults that have happened; not kept in a callback, where it would go back with the run"""


@pytest.mark.slow
@pytest.mark.shows("hf", "inf")
@pytest.mark.parametrize("step", [13, *slow(1, 36)])
def test_an_inf_gradient_leaves_no_trace(step, tmp_path):
    HITS.clear()
    case = HFCase(callbacks=lambda: [InfGradient(step)])
    run = case.guarded(tmp_path)
    assert run.actions() == ["replay"]
    case.callbacks = list
    assert_same(run, case.plain(tmp_path))


class ScaledWeights(TrainerCallback):
    """Weights that something else in memory scales, once, after a step."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 90 and not HITS:
            HITS.append(90)
            with torch.no_grad():
                model.last.weight.mul_(20.0)


@pytest.mark.slow
@pytest.mark.shows("hf", "weights")
def test_scaled_weights_are_taken_back(tmp_path):
    HITS.clear()
    case = HFCase(count=80, epochs=7, config=config(watch_steps=8), callbacks=lambda: [ScaledWeights()])
    run = case.guarded(tmp_path)
    assert run.actions() == ["rollback"]
    case.callbacks = list
    assert_same(run, case.plain(tmp_path))


@pytest.mark.slow
def test_callbacks_and_logs_see_only_steps_that_landed(tmp_path):
    seen: list[Any] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(("step", state.global_step))

        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(("log", state.global_step))

        def on_save(self, args, state, control, **kwargs):
            seen.append(("save", state.global_step))

        def on_epoch_end(self, args, state, control, **kwargs):
            seen.append(("epoch", state.global_step))

    case = HFCase(faults={5: nan, 11: nan, 20: nan}, callbacks=lambda: [Watch()])
    case.args = {"save_strategy": "steps", "save_steps": 10}
    run = case.guarded(tmp_path)
    guarded = seen.copy()
    seen.clear()
    assert_same(run, case.plain(tmp_path, (5, 11, 20)))
    assert guarded == seen


@pytest.mark.slow
def test_a_callback_that_stops_early_goes_back_with_the_run_and_an_epoch_may_end_early(tmp_path):
    class ShortEpochs(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step % 7 == 0

    case = HFCase(faults={9: nan}, callbacks=lambda: [ShortEpochs(), EarlyStoppingCallback(2)])
    case.args = {
        "eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4,
        "load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True,
    }  # fmt: skip
    run = case.guarded(tmp_path)
    plain = case.plain(tmp_path) if "skip" not in run.actions() else case.plain(tmp_path, (9,))
    assert run.trainer.state.global_step == plain.trainer.state.global_step < 30
    assert run.log() == plain.log()
    assert run.trainer.state.best_metric == plain.trainer.state.best_metric


class Average(TrainerCallback):
    """An average of the weights, and numbers of its own: in a module, in an attribute, and in an object of its own."""

    def __init__(self) -> None:
        self.average, self.count, self.other = nn.Linear(1, 1, bias=False), 0, type("Other", (), {})()
        self.other.count = 0

    def on_step_end(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            self.average.weight.mul_(0.9).add_(0.1 * model.last.weight.mean())
        self.count += 1
        self.other.count += 1


@pytest.mark.slow
def test_what_callbacks_keep_goes_back_and_what_cannot_is_named_once(tmp_path, caplog):
    case = HFCase(epochs=5, faults=dict.fromkeys(range(22, 26), nan), config=config(max_consecutive=3))

    def averages() -> list[Any]:
        torch.manual_seed(5)
        return [Average()]

    case.callbacks = averages
    run, plain = case.guarded(tmp_path), case.plain(tmp_path, tuple(range(22, 26)))
    assert_same(run, plain)
    mine, other = callback(run, Average), callback(plain, Average)
    assert torch.equal(mine.average.weight, other.average.weight)
    assert mine.count == other.count == run.trainer.state.global_step
    assert caplog.text.count("other changes during training, and neither a rollback nor a resume restores it") == 1


# ---- in another process


class Kill(TrainerCallback):
    def __init__(self, step: int, number: int = signal.SIGKILL) -> None:
        self.step, self.number = step, number

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


ARGS = [{}, {"gradient_accumulation_steps": 5}, {"dataloader_num_workers": 2}]


@pytest.mark.slow
@pytest.mark.shows("hf", "killed")
@pytest.mark.parametrize(
    ("steps", "args"), [((17,), {}), *slow(*itertools.product([(12,), (1,), (13, 30, 34)], ARGS))], ids=str
)
def test_a_killed_run_resumes_as_if_it_never_was(steps, args, tmp_path):
    case = HFCase(augment=True, faults={9: nan}, args=args, epochs=15 if "gradient_accumulation_steps" in args else 3)
    began: list[float] = []

    class Epochs(TrainerCallback):
        def on_epoch_begin(self, args, state, control, **kwargs):
            began.append(state.epoch)

    for step in steps:
        case.callbacks = lambda step=step: [Epochs(), Kill(step)]
        process = FORK.Process(target=case.guarded, args=(tmp_path,))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    case.callbacks = lambda: [Epochs()]
    run = case.guarded(tmp_path)
    assert len(began) <= case.epochs and began == sorted(began)
    excluded = tuple(range(5, 10)) if "gradient_accumulation_steps" in args else (9,)
    assert_same(run, case.plain(tmp_path, excluded))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, *slow(signal.SIGINT, signal.SIGUSR1)])
def test_a_signal_ends_it_with_status_75_and_the_next_process_continues(number, tmp_path):
    case = HFCase(augment=True, faults={9: nan})
    case.callbacks = lambda: [Kill(17, number)]

    def train():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
        case.guarded(tmp_path)

    process = FORK.Process(target=train)
    process.start()
    process.join(60)
    assert process.exitcode == 75
    case.callbacks = list
    assert_same(case.guarded(tmp_path), case.plain(tmp_path, (9,)))


@pytest.mark.parametrize(("args", "steps"), [({}, 36), ({"max_steps": 17}, 17)], ids=["epochs", "max_steps"])
def test_a_finished_run_trains_no_further_and_logs_the_same(args, steps, tmp_path):
    case = HFCase(args=args)
    first, again = case.guarded(tmp_path), case.guarded(tmp_path)
    assert first.log() == again.log()
    assert again.trainer.holdfast.summary().committed == again.trainer.state.global_step == steps


@pytest.mark.slow
def test_a_run_that_was_asked_to_stop_goes_on_in_the_next_process(tmp_path):
    class Stop:
        def on_train_begin(self, guard: Any) -> None:
            self.guard = guard

        def on_step_end(self, outcome: Any) -> None:
            if outcome.step == 20:
                self.guard.stop("asked to")

    case = HFCase()
    assert case.guarded(tmp_path, hooks=[Stop()]).trainer.state.global_step == 20
    assert_same(case.guarded(tmp_path), case.plain(tmp_path))


def test_the_next_process_may_have_other_callbacks(tmp_path):
    class Counting(TrainerCallback):
        def __init__(self) -> None:
            self.steps = 0

        def on_step_end(self, args, state, control, **kwargs):
            self.steps += 1

    case = HFCase(epochs=1, callbacks=lambda: [] if counting is None else [counting])
    counting = None
    case.guarded(tmp_path)
    counting = Counting()
    longer = HFCase(epochs=2, callbacks=case.callbacks)
    assert longer.guarded(tmp_path).trainer.state.global_step == 24
    assert counting.steps == 12
    counting = Counting()
    longer.guarded(tmp_path)
    assert counting.steps == 12, "the next process has restored it"


def test_a_run_that_is_at_its_last_step_reports_why_it_trains_no_further(tmp_path, caplog):
    case = HFCase(epochs=1, args={"max_steps": 7})
    case.guarded(tmp_path)
    assert "trains no further" not in caplog.text
    case.guarded(tmp_path)
    assert "the run is at step 7 of 7, so it trains no further; to train on, raise max_steps" in caplog.text


def test_guarding_a_trainer_that_trains_already_is_refused(tmp_path):
    class Late(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            holdfast.hf.guard(trainer, run_dir=tmp_path / "run")

    trainer = HFCase(callbacks=lambda: [Late()]).trainer(tmp_path)
    with pytest.raises(SetupError, match=r"call it before trainer.train\(\)"):
        trainer.train()


@pytest.mark.slow
def test_a_finished_run_with_more_epochs_goes_on(tmp_path):
    args = {"lr_scheduler_type": "constant", "warmup_steps": 0}
    HFCase(args=args).guarded(tmp_path)
    longer = HFCase(epochs=5, args=args)
    run, plain = longer.guarded(tmp_path), longer.plain(tmp_path)
    assert run.trainer.state.global_step == plain.trainer.state.global_step == 60
    for mine, other in zip(run.trainer.model.parameters(), plain.trainer.model.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.slow
def test_a_checkpoint_of_the_trainer_wins_over_the_run_directory(tmp_path, caplog):
    case = HFCase(args=SAVING)
    case.guarded(tmp_path)
    saved = tmp_path / "guarded" / "out" / "checkpoint-15"
    (saved / ABANDONED).touch()
    reference = case.trainer(tmp_path / "reference")
    reference.train(resume_from_checkpoint=str(saved))
    expected = Run(reference)
    trainer = holdfast.hf.guard(case.trainer(tmp_path / "guarded"), run_dir=tmp_path / "run", config=case.config)
    trainer.train(resume_from_checkpoint=str(saved))
    assert_same(Run(trainer), expected)
    assert "checkpoint-15 is of a branch that was abandoned" in caplog.text
    assert trainer.holdfast.step == 21
    again = case.guarded(tmp_path)  # the run that began at the Trainer's checkpoint is the one that is continued
    assert again.trainer.state.global_step == 36 and again.trainer.holdfast.step == 21


# ---- refused, and switched off


def refused(trainer: Any) -> str:
    with pytest.raises(SetupError) as caught:
        holdfast.hf.guard(trainer)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_what_cannot_be_guarded_is_refused_in_one_line(tmp_path):
    case = HFCase()
    assert "a transformers.Trainer" in refused(nn.Linear(1, 1))
    assert "per_device_train_batch_size" in refused(HFCase(args={"auto_find_batch_size": True}).trainer(tmp_path))
    for name, value, cure in (("is_deepspeed_enabled", True, "FSDP2"), ("is_fsdp_enabled", True, "fsdp_version=2")):
        trainer = case.trainer(tmp_path)
        setattr(trainer, name, value)
        assert cure in refused(trainer)
    trainer = case.trainer(tmp_path)
    trainer._buffered_inputs = None  # as GRPO has it
    assert "span several steps" in refused(trainer)

    class OwnLoop(Trainer):
        def _inner_training_loop(self, *args, **kwargs): ...

    assert "Guard.wrap" in refused(OwnLoop(nn.Linear(1, 1), TrainingArguments(output_dir=str(tmp_path), use_cpu=True)))
    twice = holdfast.hf.guard(case.trainer(tmp_path))
    assert "once" in refused(twice)
    with pytest.raises(TypeError, match="confg"):
        holdfast.hf.guard(case.trainer(tmp_path), confg={})


def test_another_training_loop_gets_one_error_with_the_versions_that_work(tmp_path, monkeypatch):
    trainer = HFCase().trainer(tmp_path)
    monkeypatch.delattr(Trainer, "_run_epoch")  # as before 5.3
    assert "from 5.3" in refused(trainer)


def test_switched_off_it_returns_the_trainer_unchanged(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_OFF", "1")
    trainer = HFCase().trainer(tmp_path)
    kind = type(trainer)
    assert holdfast.hf.guard(trainer, run_dir=tmp_path / "run") is trainer
    assert type(trainer) is kind and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_example_comes_through_its_faults(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hf_trainer", str(tmp_path / "run")])
    runpy.run_module("holdfast.examples.hf_trainer", run_name="__main__")
    assert "recovered: 191 steps committed, 1 skipped, 1 replayed, 1 rolled back" in capsys.readouterr().out
