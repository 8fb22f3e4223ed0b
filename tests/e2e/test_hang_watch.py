"""The hang watch changes nothing of a run, in any loop, and knows the phases of each."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.core.hang.heartbeat import PHASES, HeartbeatReader
from holdfast.supervise.processes import read_state

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the hang watch needs Linux")
STEPS = 64
EARLY = {"hang": {"floor_seconds": 0.01, "action": "report"}}
"""the sidecar starts at once; on a busy machine it may report such short stalls, which changes nothing either"""


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
    loader = DataLoader(TensorDataset(torch.randn(STEPS * 2, 4)), batch_size=2, shuffle=True)
    return model, torch.optim.AdamW(model.parameters(), 1e-2), loader


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).pow(2).mean()


def plain() -> dict[str, torch.Tensor]:
    model, optimizer, loader = build()
    for batch in loader:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train(driver: str, run_dir: Path, config: Any) -> tuple[holdfast.Guard, torch.nn.Module, set[str]]:
    """Train one epoch. Return the guard, still open, and the phases of its heartbeat."""
    model, optimizer, loader = build()
    make = holdfast.Guard.wrap if driver == "wrap" else holdfast.Guard
    guard = make(model, optimizer, run_dir=run_dir, config=config)
    if driver == "steps":
        for step in guard.steps(loader, epochs=1):
            with step:
                for batch in step.microbatches():
                    step.backward(loss_of(model, batch))
    else:
        for batch in guard.data(loader):
            loss = loss_of(model, batch)
            loss.backward()
            if driver == "wrap":
                optimizer.step()
                optimizer.zero_grad()
            else:
                guard.step(loss)
    with guard.phase("eval"):
        pass
    reader = HeartbeatReader(memoryview(guard._heartbeat.memory))
    phases = {PHASES[beat.phase] for beat, _ in reader.read()}
    return guard, model, phases


@pytest.mark.parametrize("driver", ["steps", "data", "wrap"])
def test_a_watched_run_is_bit_for_bit_the_plain_one_and_shares_its_phases(tmp_path, driver):
    guard, model, phases = train(driver, tmp_path / "run", EARLY)
    watch = guard._run.parts.hang_watch
    assert watch._socket is not None, "the sidecar was not started"
    assert {"user", "data", "forward", "optimizer", "eval"} <= phases
    assert ("backward" in phases) == (driver == "steps"), "other loops call backward themselves"
    descriptors = len(os.listdir("/proc/self/fd"))
    guard.close()
    assert len(os.listdir("/proc/self/fd")) < descriptors
    assert all(torch.equal(a, b) for a, b in zip(plain().values(), model.state_dict().values(), strict=True))


@pytest.mark.parametrize("driver", ["steps", "data", "wrap"])
def test_after_the_data_has_ended_the_time_is_the_users_since_an_evaluation_may_follow(tmp_path, driver):
    guard, _, _ = train(driver, tmp_path / "run", EARLY)
    assert PHASES[guard._heartbeat.phase] == "user"
    guard.close()


def test_the_data_that_ends_inside_a_step_leaves_the_time_to_the_user(tmp_path):
    model, optimizer, loader = build()
    with holdfast.Guard(model, optimizer, run_dir=tmp_path / "run", config=EARLY) as guard:
        for number, batch in enumerate(guard.data(loader), 1):
            loss = loss_of(model, batch)
            loss.backward()
            guard.step(loss, update=number % 3 == 0)
        assert PHASES[guard._heartbeat.phase] == "user"


def test_a_single_process_has_no_thread_for_the_watch(tmp_path):
    guard, _, _ = train("steps", tmp_path / "run", EARLY)
    assert not [thread for thread in threading.enumerate() if thread.name == "holdfast-hang"]
    guard.close()


@pytest.mark.parametrize("config", [{"hang": {"enabled": False, "floor_seconds": 0.01}}, {}])
def test_a_run_that_is_short_or_not_watched_starts_no_process(tmp_path, config):
    guard, _, _ = train("steps", tmp_path / "run", config)
    assert getattr(guard._run.parts.hang_watch, "_socket", None) is None
    guard.close()


def test_signals_are_free_again_after_the_run_and_two_runs_have_different_ones(tmp_path):
    first, _, _ = train("steps", tmp_path / "a", EARLY)
    second, _, _ = train("steps", tmp_path / "b", EARLY)
    numbers = [guard._run.parts.hang_watch._signal for guard in (first, second)]
    assert len(set(numbers)) == 2 and all(signal.getsignal(number) == signal.SIG_DFL for number in numbers)
    second.close()
    first.close()
    assert not any(read_state(os.getpid()).handles(number) for number in numbers)


def test_a_system_that_cannot_be_watched_trains_on_and_says_so(tmp_path, monkeypatch, caplog):
    def refuse(name: str) -> int:
        raise OSError("no memory files here")

    monkeypatch.setattr(os, "memfd_create", refuse)
    guard, model, _ = train("steps", tmp_path / "run", EARLY)
    guard.close()
    assert "the run is not watched for hangs: OSError: no memory files here" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(plain().values(), model.state_dict().values(), strict=True))


def test_a_hook_counts_as_code_of_the_user(tmp_path):
    seen: list[int] = []

    class Evaluates:
        def on_step_end(self, outcome: Any) -> None:
            seen.append(guard._heartbeat.phase)

    model, optimizer, loader = build()
    guard = holdfast.Guard(model, optimizer, run_dir=tmp_path / "run", hooks=[Evaluates()])
    with guard:
        for step in guard.steps(loader, max_steps=3):
            with step:
                for batch in step.microbatches():
                    step.backward(loss_of(model, batch))
    assert {PHASES[phase] for phase in seen} == {"user"}


@pytest.mark.slow
def test_a_hang_of_a_run_is_named_and_the_run_goes_on(tmp_path):
    model, optimizer, loader = build()
    config = {"hang": {"floor_seconds": 2.0}}
    guard = holdfast.Guard(model, optimizer, run_dir=tmp_path, config=config)
    with guard:
        for step in guard.steps(loader, epochs=2):
            with step:
                for batch in step.microbatches():
                    step.backward(loss_of(model, batch))
                    time.sleep(0.02)
                    if step.number == 2 * STEPS - 1:
                        ends = time.monotonic() + 120
                        while not list(tmp_path.glob("hang/*/verdict.txt")) and time.monotonic() < ends:
                            time.sleep(0.05)
    (text,) = [path.read_text() for path in tmp_path.glob("hang/*/verdict.txt")]
    assert f"forward of step {2 * STEPS - 1}" in text and "test_hang_watch.py" in text
    assert guard.step == 2 * STEPS
