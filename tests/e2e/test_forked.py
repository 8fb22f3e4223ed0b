"""A child that is forked from a process with an open Guard is refused at once, and leaves the parent's run alone."""

from __future__ import annotations

import hashlib
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch
from cases import Points, loss_of, parts
from torch.utils.data import DataLoader

import holdfast

WAIT_SECONDS = 60


def in_child(function: Callable[[], object]) -> str:
    """Call a function in a forked child. Return what it raised, or its result; "waits" if it does not end."""
    readable, writable = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            answer = f"returned {function()}"
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writable, answer.encode())
        os._exit(0)
    os.close(writable)
    try:
        done, _, _ = select.select([readable], [], [], WAIT_SECONDS)
        return os.read(readable, 10_000).decode() if done else "waits"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(readable)


def train(guard, model, loader, max_steps, between=lambda step: None, inside=lambda step: None):
    for step in guard.steps(loader, max_steps=max_steps):
        with step:
            for batch in step.microbatches():
                step.backward(loss_of(model, batch))
            inside(step)
        between(step)


def contents(folder):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def opened(tmp_path):
    model, optimizer, loader = parts()
    with holdfast.Guard(model, optimizer, run_dir=tmp_path / "run") as guard:
        train(guard, model, loader, 4)
        guard.checkpoint()
        guard._records.flush()
        yield guard, model, optimizer, loader, tmp_path / "run"


USES = {
    "checkpoint": lambda guard, model, loader: guard.checkpoint(),
    "steps": lambda guard, model, loader: train(guard, model, loader, 8),
    "fit": lambda guard, model, loader: guard.fit(loss_of, loader, max_steps=8),
    "with": lambda guard, model, loader: guard.__enter__(),
    "stop": lambda guard, model, loader: guard.stop(),
    "flush": lambda guard, model, loader: guard.flush(),
    "record": lambda guard, model, loader: guard.record(tokenizer="a"),
    "record results": lambda guard, model, loader: holdfast.record(guard, eval={"loss": 1.0}),
    "report_eval": lambda guard, model, loader: guard.report_eval(1.0),
    "expect_shift": lambda guard, model, loader: guard.expect_shift("another stage"),
    "quarantine": lambda guard, model, loader: guard.quarantine([3], "bad row"),
}


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_every_use_in_a_child_is_refused_with_the_cure(opened, use):
    guard, model, _, loader, run_dir = opened
    before = contents(run_dir)
    answer = in_child(lambda: USES[use](guard, model, loader))
    assert answer.startswith("StepError: process ")
    assert "was forked from the one that opened this Guard" in answer
    assert "make a new Guard with another run_dir" in answer
    assert contents(run_dir) == before


def test_a_child_may_read_and_close_and_then_train_by_itself(opened, tmp_path):
    guard, model, optimizer, loader, run_dir = opened
    before = contents(run_dir)

    def use() -> str:
        assert (guard.step, guard.stopping, guard.summary().committed) == (4, None, 4)
        guard.close()
        with holdfast.Guard(model, optimizer, run_dir=tmp_path / "child") as own:
            train(own, model, loader, 3)
        optimizer.step()
        return f"{own.step} steps"

    assert in_child(use) == "returned 3 steps"
    assert contents(run_dir) == before
    guard.quarantine([3], "the parent's Guard still works")


def test_a_child_forked_inside_a_step_cannot_end_it(tmp_path):
    answers = []

    def run(run_dir, fork):
        model, optimizer, loader = parts()
        with holdfast.Guard(model, optimizer, run_dir=run_dir) as guard:
            for step in guard.steps(loader, max_steps=6):
                with step:
                    for batch in step.microbatches():
                        step.backward(loss_of(model, batch))
                    if fork and step.number == 3:
                        answers.append(in_child(lambda step=step: step.__exit__(None, None, None)))
                        error = SystemExit(0)
                        answers.append(in_child(lambda step=step, error=error: step.__exit__(None, error, None)))
        return model.state_dict()

    forked, plain = run(tmp_path / "forked", True), run(tmp_path / "plain", False)
    assert answers[0].startswith("StepError: process ")
    assert answers[1] == "returned False", "the child's own way out is not hidden by an error"
    assert all(torch.equal(value, plain[name]) for name, value in forked.items())
    text = (tmp_path / "forked" / "journal.jsonl").read_text()
    assert "abandoned" not in text and text.count("run_end") == 1


def test_a_child_that_continues_the_loop_is_refused_at_its_next_step(tmp_path):
    model, optimizer, loader = parts()
    with holdfast.Guard(model, optimizer, run_dir=tmp_path / "run") as guard:
        steps = guard.steps(loader, max_steps=4)
        for step in steps:
            with step:
                for batch in step.microbatches():
                    step.backward(loss_of(model, batch))
            if step.number == 2:
                assert in_child(lambda: next(steps)).startswith("StepError: process ")
    assert guard.summary().committed == 4


def test_a_guard_that_is_not_open_yet_may_be_opened_by_a_child(tmp_path):
    model, optimizer, loader = parts()
    guard = holdfast.Guard(model, optimizer, run_dir=tmp_path / "run")

    def use() -> int:
        with guard:
            train(guard, model, loader, 3)
        return guard.step

    assert in_child(use) == "returned 3"


def test_a_closed_guard_may_record_from_a_child(tmp_path):
    model, optimizer, loader = parts()
    with holdfast.Guard(model, optimizer, run_dir=tmp_path / "run") as guard:
        train(guard, model, loader, 2)
    assert in_child(lambda: guard.record(tokenizer="a")) == "returned None"


def test_without_the_guard_a_child_may_do_what_it_likes(monkeypatch):
    monkeypatch.setenv("HOLDFAST_OFF", "1")
    model, optimizer, loader = parts()
    with holdfast.Guard(model, optimizer) as guard:
        train(guard, model, loader, 2)
        assert in_child(lambda: train(guard, model, loader, 4)) == "returned None"


def test_loader_workers_may_read_the_guard(tmp_path):
    class Watching(Points):
        def __getitem__(self, i):
            assert guard.step >= 0 and guard.stopping is None
            return super().__getitem__(i)

    model, optimizer, _ = parts()
    loader = DataLoader(Watching(64), batch_size=8, num_workers=1, multiprocessing_context="fork")
    with holdfast.Guard(model, optimizer, run_dir=tmp_path / "run") as guard:
        train(guard, model, loader, 12)
    assert guard.summary().committed == 12


@pytest.mark.slow
def test_a_child_that_exits_writes_closes_and_removes_nothing_of_the_run(tmp_path):
    """Through sys.exit and the end of the interpreter: __exit__ of the Guard, atexit, __del__."""
    script = textwrap.dedent("""
        import os, sys, torch, holdfast
        from torch.utils.data import DataLoader, TensorDataset

        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4)

        class Ends(holdfast.Hook):
            def on_train_end(self, summary):
                print("ended by", "child" if os.getpid() != parent else "parent", flush=True)

        parent = os.getpid()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with holdfast.Guard(model, optimizer, run_dir=sys.argv[1], hooks=[Ends()]) as guard:
            for step in guard.steps(loader, max_steps=12):
                with step:
                    for (x,) in step.microbatches():
                        step.backward(model(x).square().mean())
                    if step.number == 5 and not os.fork():
                        sys.exit(5)
                if step.number == 7 and not os.fork():
                    sys.exit(7)
                if step.number in (5, 7):
                    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
    """)
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.split("\n") == ["5", "7", "ended by parent", ""], done.stderr
    assert done.returncode == 0
    text = (tmp_path / "run" / "journal.jsonl").read_text()
    assert "abandoned" not in text and text.count("run_end") == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 12
