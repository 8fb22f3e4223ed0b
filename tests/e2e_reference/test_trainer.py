"""The reference trainer: the same seed gives the same bits, also after a stop and resume, also unguarded."""

from __future__ import annotations

import copy
import itertools
import json
import multiprocessing
import os
import random
import signal
import time

import numpy as np
import pytest
import torch

from holdfast.cli import main
from holdfast.core.base.errors import ConfigError, DataError, RunDirError, SetupError
from holdfast.core.record import journal
from holdfast.drill.fault_schedule import FaultSchedule
from holdfast.drill.faults import InfGradient, NanBatch
from holdfast.reference import trainer as reference
from holdfast.reference.config import parse
from holdfast.reference.tokens import TokenWriter
from marks import slow
from row_columns import without_times

STEPS = 20
BEFORE = itertools.count(999)
"""seeds of the global generators before each run: they must not matter"""


def configuration(run_dir, **sections):
    small = {
        "model": {"layers": 2, "width": 32, "heads": 2, "context": 16},
        "train": {"run_dir": str(run_dir), "steps": STEPS, "batch_size": 4, "seed": 7, "device": "cpu", "threads": 1},
        "scheduler": {"warmup_steps": 5},
        "eval": {"every": 7, "batches": 2},
    }
    return parse({name: {**small.get(name, {}), **sections.get(name, {})} for name in {**small, **sections}}, "test")


class Losses:
    """Keeps the loss of every committed step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def on_step_end(self, outcome) -> None:
        self.seen.append((outcome.step, outcome.signal.loss))


class Done:
    """Trains one run and keeps its losses and state."""

    def __init__(self, config, *, faults=None, resume=None, stop_at=None) -> None:
        before = next(BEFORE)
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(before)
        self.trainer = reference.build(config, faults=faults)
        hook = Losses()
        self.result = self.trainer.run(hooks=[hook], resume=resume, stop_at=stop_at)
        self.losses = hook.seen
        optimizer = self.trainer.optimizer.state_dict()
        self.state = copy.deepcopy(
            {
                "parameters": dict(self.trainer.model.named_parameters()),
                "moments": optimizer["state"],
                "groups": optimizer["param_groups"],
                "schedule": self.trainer.scheduler.last_epoch,
                "scaler": None if self.trainer.scaler is None else self.trainer.scaler.state_dict(),
            }
        )


def metrics(run_dir) -> list[dict]:
    record = journal.read_rows(run_dir / "metrics.jsonl")
    assert record.torn == []
    return record.events


def rows_of(run_dir) -> list[dict]:
    return [without_times(row) for row in metrics(run_dir)]


def events(run_dir, kind=None) -> list[dict]:
    record = journal.read(run_dir / "journal.jsonl")
    assert record.torn == []
    return [e for e in record.events if kind in (None, e["event"])]


def assert_same(a, b, where="state") -> None:
    """The same to the last bit."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (left, right) in enumerate(zip(a, b, strict=True)):
            assert_same(left, right, f"{where}[{i}]")
    else:
        assert a == b, where


def token_file(path, seed=0, tokens=5000, vocab_size=256):
    writer = TokenWriter(path, vocab_size, "bytes")
    writer.write(np.random.default_rng(seed).integers(0, vocab_size, tokens))
    writer.close()
    return path


# ---- the same to the last bit


def test_same_seed_is_the_same_run_to_the_last_bit(tmp_path):
    first, second = (Done(configuration(tmp_path / name)) for name in ("a", "b"))
    assert_same(first.state, second.state)
    assert first.losses == second.losses
    assert first.result.eval_loss == second.result.eval_loss
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")
    assert first.losses[-1][1] < first.losses[0][1]


def test_other_seed_is_another_run(tmp_path):
    first, second = (Done(configuration(tmp_path / str(s), train={"seed": s, "steps": 6})) for s in (1, 2))
    assert all(a != b for a, b in zip(first.losses, second.losses, strict=True))


CASES = {
    "plain": ({}, lambda: None, lambda: None),
    "accumulated": ({"train": {"accumulate": 2}}, lambda: None, lambda: None),
    "two workers": ({"dataset": {"workers": 2}}, lambda: None, lambda: None),
    "fp16": ({"train": {"precision": "fp16"}}, lambda: None, lambda: None),
    # A batch stays bad; a gradient that overflowed once does not overflow again.
    "bad batch skipped before": ({}, lambda: FaultSchedule([NanBatch(4)], 4), lambda: FaultSchedule([NanBatch(4)], 4)),
    "bad batch skipped before, accumulated": (
        {"train": {"accumulate": 2}},
        lambda: FaultSchedule([NanBatch(4)], 8),
        lambda: FaultSchedule([NanBatch(4)], 8),
    ),
    "bad gradient replayed before": ({}, lambda: FaultSchedule([InfGradient(4)], 4), lambda: None),
}
REPEATED = ("accumulated", "fp16", "bad batch skipped before, accumulated")


@pytest.mark.slow
@pytest.mark.parametrize("case", [*(case for case in CASES if case not in REPEATED), *slow(*REPEATED)])
def test_run_stopped_and_resumed_is_the_uninterrupted_run_to_the_last_bit(tmp_path, case):
    sections, faults, faults_after = CASES[case]
    whole = Done(configuration(tmp_path / "whole", **sections), faults=faults())
    parted = configuration(tmp_path / "parted", **sections)
    first = Done(parted, faults=faults(), stop_at=9)
    assert (first.result.steps, first.result.stopped) == (9, "asked to stop at step 9")
    assert first.result.checkpoint == str(tmp_path / "parted" / "checkpoints" / "step_00000009")
    second = Done(parted, faults=faults_after())
    assert second.result.stopped is None
    (resumed,) = events(tmp_path / "parted", "resumed")
    assert (resumed["step"], resumed["checkpoint"]) == (9, "step_00000009")
    assert_same(second.state, whole.state)
    assert first.losses + second.losses == whole.losses
    assert second.result.eval_loss == whole.result.eval_loss
    assert rows_of(tmp_path / "parted") == rows_of(tmp_path / "whole")
    skipped = 0 if faults_after() is None else 1
    assert whole.result.summary.skipped == second.result.summary.skipped == skipped


def test_comparison_fails_for_a_run_with_other_data(tmp_path):
    """The comparison can fail: a resumed run that is one batch further differs."""
    whole = Done(configuration(tmp_path / "whole"))
    parted = configuration(tmp_path / "parted")
    first = Done(parted, stop_at=9)
    other = Done(configuration(tmp_path / "parted", train={"seed": 8}))
    assert first.losses + other.losses != whole.losses


def test_run_stopped_twice_resumes_from_the_second_stop(tmp_path):
    whole = Done(configuration(tmp_path / "whole"))
    config = configuration(tmp_path / "parted")
    parts = [Done(config, stop_at=5)]
    parts.append(Done(config, stop_at=12))
    parts.append(Done(config))
    assert [p.result.steps for p in parts] == [5, 12, STEPS]
    assert_same(parts[-1].state, whole.state)


@pytest.mark.slow
@pytest.mark.parametrize("sections", [{}, {"train": {"accumulate": 2}}, {"train": {"precision": "fp16"}}])
def test_guarded_run_is_the_unguarded_run_to_the_last_bit(tmp_path, monkeypatch, sections):
    guarded = Done(configuration(tmp_path / "guarded", **sections))
    monkeypatch.setenv("HOLDFAST_OFF", "1")
    plain = Done(configuration(tmp_path / "plain", **sections))
    assert plain.result.summary.status == "off"
    assert not (tmp_path / "plain").exists()
    assert_same(guarded.state, plain.state)
    assert guarded.losses == plain.losses
    assert guarded.result.eval_loss == plain.result.eval_loss


def test_bad_batch_is_skipped_by_the_guard_and_kills_the_run_without_it(tmp_path, monkeypatch):
    guarded = Done(configuration(tmp_path / "guarded"), faults=FaultSchedule([NanBatch(5)], 4))
    assert np.isfinite(guarded.result.eval_loss)
    assert [(i.kind, i.step) for i in guarded.result.summary.incidents] == [("nonfinite_loss", 5)]
    monkeypatch.setenv("HOLDFAST_OFF", "1")
    plain = Done(configuration(tmp_path / "plain"), faults=FaultSchedule([NanBatch(5)], 4))
    assert np.isnan(plain.result.eval_loss)


# ---- precisions, sources, options


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_trains_on_the_cpu(tmp_path, precision):
    done = Done(configuration(tmp_path, train={"precision": precision, "steps": 12}))
    assert done.result.steps == 12
    assert done.losses[-1][1] < done.losses[0][1]
    assert (done.trainer.scaler is not None) == (precision == "fp16")
    full = Done(configuration(tmp_path / "full", train={"steps": 12}))
    assert done.losses != full.losses
    assert done.losses[0][1] == pytest.approx(full.losses[0][1], rel=0.01)


def test_two_sources_with_stages_train_and_the_mix_changes_when_it_should(tmp_path):
    sources = [
        {"path": str(token_file(tmp_path / "low.tokens", 1, vocab_size=100)), "weight": 0.75},
        {"path": str(token_file(tmp_path / "high.tokens", 2)), "weight": 0.25},
    ]
    # 250 samples a step: blocks of 1000 end with every fourth step.
    config = configuration(
        tmp_path / "run",
        model={"layers": 1, "width": 8, "heads": 1, "context": 4},
        dataset={"sources": sources, "stages": [{"from_step": 5, "weights": [0, 1]}]},
        train={"steps": 8, "batch_size": 250},
        scheduler={"warmup_steps": 1},
    )
    trainer = reference.build(config)
    seen: list[int] = []
    inner = trainer.loss

    def loss(batch, z_loss=0.0):
        if "source" in batch:
            seen.append(int((batch["source"] == 0).sum()))
        return inner(batch, z_loss)

    trainer.loss = loss  # type: ignore[method-assign]
    result = trainer.run()
    assert result.steps == 8
    assert sum(seen[:4]) == 750
    assert seen[4:] == [0, 0, 0, 0]
    about = json.loads((tmp_path / "run" / "run.json").read_text())["data"]
    assert [entry["name"] for entry in about] == ["low.tokens", "high.tokens"]
    assert len({entry["fingerprint"] for entry in about}) == 2


def test_stage_that_begins_at_the_first_step_replaces_the_weights(tmp_path):
    sources = [{"path": str(token_file(tmp_path / name))} for name in ("a", "b")]
    config = configuration(
        tmp_path / "run", dataset={"sources": sources, "stages": [{"from_step": 1, "weights": [0, 1]}]}
    )
    mixture = reference.build(config).mixture
    assert {mixture.locate(n)[0] for n in range(3000)} == {1}


def test_z_loss_and_qk_norm_train(tmp_path):
    done = Done(configuration(tmp_path, model={"z_loss": 1e-2, "qk_norm": True}, train={"steps": 12}))
    assert done.losses[-1][1] < done.losses[0][1]
    plain = Done(configuration(tmp_path / "plain", model={"qk_norm": True}, train={"steps": 12}))
    assert done.losses[0][1] > plain.losses[0][1] + 0.1  # the squared log-partition, ln(256)^2, at its weight


def test_evaluation_leaves_the_run_as_it_is(tmp_path):
    often = Done(configuration(tmp_path / "often", eval={"every": 1, "batches": 3}))
    never = Done(configuration(tmp_path / "never", eval={"every": 0, "batches": 3}))
    assert_same(often.state, never.state)
    assert often.result.eval_loss == never.result.eval_loss


# ---- records


def test_metrics_have_one_line_for_every_step(tmp_path):
    done = Done(configuration(tmp_path))
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert {row["status"] for row in rows} == {"committed"}
    assert [(row["step"], row["loss"]) for row in rows] == done.losses
    for name in ("grad_norm", "lr", "seconds"):
        assert all(row[name] > 0 for row in rows)


def test_skipped_step_has_a_line_of_its_own(tmp_path):
    Done(configuration(tmp_path), faults=FaultSchedule([NanBatch(5)], 4))
    rows = metrics(tmp_path)
    assert len(rows) == STEPS + 2
    assert [row["status"] for row in rows if row["step"] == 5] == ["replayed", "skipped", "committed"]


def test_run_json_describes_the_run(tmp_path):
    done = Done(configuration(tmp_path, train={"steps": 6}))
    about = json.loads((tmp_path / "run.json").read_text())
    (data,) = about["data"]
    source = done.trainer.mixture.sources[0]
    assert data == {
        "name": "standard library",
        "tokens": len(source),
        "tokenizer": "bytes",
        "fingerprint": source.fingerprint(),
    }
    assert about["parameters"] == done.trainer.parameter_count
    assert about["precision"] == "fp32"
    assert about["tokens_per_step"] == 4 * 16
    assert about["config"]["train"]["seed"] == 7
    assert about["config"]["recover"]["mode"] == "heal"


def test_result_counts_the_steps_of_this_process(tmp_path):
    config = configuration(tmp_path, train={"accumulate": 2})
    first = Done(config, stop_at=8).result
    second = Done(config).result
    assert (first.tokens, second.tokens) == (8 * 2 * 4 * 16, 12 * 2 * 4 * 16)
    assert second.run_dir == str(tmp_path)
    assert second.tokens_per_second > 0
    assert second.mfu is None


# ---- stops


def test_run_asked_to_stop_at_its_last_step_is_complete(tmp_path):
    result = Done(configuration(tmp_path), stop_at=STEPS).result
    assert (result.steps, result.stopped) == (STEPS, None)
    again = Done(configuration(tmp_path)).result
    assert (again.steps, again.stopped, again.tokens) == (STEPS, None, 0)
    assert again.eval_loss == result.eval_loss


def test_stopped_unguarded_run_has_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_OFF", "1")
    result = Done(configuration(tmp_path), stop_at=4).result
    assert (result.steps, result.checkpoint) == (4, None)
    assert result.stopped == "asked to stop at step 4"


def test_unguarded_run_refuses_to_resume(tmp_path, monkeypatch):
    config = configuration(tmp_path)
    checkpoint = Done(config, stop_at=4).result.checkpoint
    monkeypatch.setenv("HOLDFAST_OFF", "1")
    with pytest.raises(ConfigError, match="HOLDFAST_OFF"):
        Done(config, resume=checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"layers": 3}},
        {"model": {"width": 48}},
        {"train": {"precision": "fp16"}},
    ],
    ids=["layers", "width", "precision"],
)
@pytest.mark.parametrize("by_name", [False, True])
def test_checkpoint_of_another_model_is_refused(tmp_path, sections, by_name):
    checkpoint = Done(configuration(tmp_path / "a"), stop_at=4).result.checkpoint
    with pytest.raises(SetupError, match="belongs to another run"):
        Done(configuration(tmp_path / ("b" if by_name else "a"), **sections), resume=checkpoint if by_name else None)


def test_another_batch_size_resumes_at_the_exact_next_sample_with_a_note(tmp_path):
    Done(configuration(tmp_path), stop_at=4)
    Done(configuration(tmp_path, train={"batch_size": 8}), stop_at=6)
    last = [row["data"] for row in metrics(tmp_path)][-3:]
    assert last == [[[0, 12, 16]], [[0, 16, 24]], [[0, 24, 32]]]
    assert any("sample 16" in e["message"] for e in events(tmp_path, "note"))


def test_missing_or_foreign_checkpoint_is_refused(tmp_path):
    with pytest.raises(RunDirError, match="no such folder"):
        Done(configuration(tmp_path), resume=str(tmp_path / "none"))
    (tmp_path / "text").mkdir()
    with pytest.raises(RunDirError, match="neither a checkpoint nor a run directory"):
        Done(configuration(tmp_path), resume=str(tmp_path / "text"))


def test_source_that_does_not_fit_the_model_is_one_error(tmp_path):
    path = token_file(tmp_path / "large.tokens", vocab_size=300)
    config = configuration(tmp_path / "run", dataset={"sources": [{"path": str(path)}]})
    with pytest.raises(ConfigError, match=r"large.tokens: its vocabulary of 300 .* set \[model\] vocab_size = 300"):
        reference.build(config)
    with pytest.raises(DataError):
        reference.Trainer(config)


# ---- the program

SMALL = """
[model]
layers = 1
width = 16
heads = 2
context = 16
[train]
steps = 600
batch_size = 2
device = "cpu"
threads = 1
log_every = 10
[eval]
every = 0
batches = 2
[detect]
loss_spike = false     # with 32 tokens a batch the loss is mostly noise
grad_spike = false
"""


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL.replace("[train]", f'[train]\nrun_dir = "{tmp_path / "run"}"'))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_interrupted_program_leaves_a_readable_run_and_resumes(tmp_path, program, config_file, workers):
    """Ctrl-C goes to the loader's processes as well: they are of the same group."""
    words = ("train", config_file, f"--dataset.workers={workers}")
    run = tmp_path / "run"
    first = program(*words)
    first.wait_for("step 10/")
    first.interrupt(group=True)
    ended = first.end()
    assert ended.status == 75, ended.err
    assert "Traceback" not in ended.err
    assert "the same command resumes it" in ended.err.splitlines()[-1]
    (stop,) = events(run, "stop_requested")
    assert stop["reason"] == "received SIGINT"
    (end,) = events(run, "run_end")
    assert end.get("error") is None
    reached = end["step"]
    assert 10 <= reached < 500
    assert [row["step"] for row in metrics(run)] == list(range(1, reached + 1))

    with pytest.raises(SystemExit) as second:
        main.run([*map(str, words), f"--stop-at={reached + 10}"])
    assert second.value.code == 75
    assert [row["step"] for row in metrics(run)] == list(range(1, reached + 11))
    assert events(run, "resumed")[0]["step"] == reached


@pytest.mark.slow
def test_second_interrupt_ends_the_program_at_once_without_a_traceback(tmp_path, program, config_file):
    one = program("train", config_file, "--train.steps=1000000")
    one.wait_for("step 10/")
    one.interrupt()
    one.interrupt()
    ended = one.end()
    assert ended.status in (75, 130)  # the step may have ended before the second one came
    assert "Traceback" not in ended.err
    assert events(tmp_path / "run", "run_end")


def test_run_in_use_by_a_live_process_is_one_message(tmp_path, config_file, capsys):
    fork = multiprocessing.get_context("fork")
    first = fork.Process(target=main.run, args=(["train", str(config_file), "--train.steps=1000000"],), daemon=True)
    first.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(SystemExit) as ended:
        main.run(["train", str(config_file)])
    stderr = capsys.readouterr().err
    assert ended.value.code == 78
    assert stderr.count("error: ") == 1
    assert f"{tmp_path / 'run'} is in use by process" in stderr
    assert "choose another run_dir" in stderr
    os.kill(first.pid, signal.SIGINT)
    first.join(60)
    assert first.exitcode == 75
    assert len(events(tmp_path / "run", "run_begin")) == 1
    assert events(tmp_path / "run", "restart") == []
