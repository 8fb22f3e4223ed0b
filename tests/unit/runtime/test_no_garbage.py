"""A healthy run leaves nothing behind: no cycle for the collector, no memory that grows with the steps, no call to the disk
that waits."""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast

SETTLED, WINDOW, WINDOWS = 2600, 200, 4
"""steps until every window that is kept is full; steps between two counts; counts"""


class Healthy:
    """A small run, taken on by so many steps at a time."""

    def __init__(self, path: Path, gate: str = "host", snapshots: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=gate == "device")
        rows = 8 * (SETTLED + WINDOW * (WINDOWS + 1))  # one epoch: the order of each is bounded by itself
        x = torch.randn(rows, 4)
        self.loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
        config = {
            "snapshot": {"enabled": snapshots, "every_steps": 10, "reach_steps": 40},
            "checkpoint": {"enabled": False},
            "detect": {"gate": gate},
            "metrics": {"flush_seconds": 0.05},
        }
        self.guard = holdfast.Guard(self.model, optimizer, clip_grad_norm=1.0, run_dir=path, config=config)

    def go(self, steps: int) -> None:
        for step in self.guard.steps(
            self.loader, epochs=None, max_steps=self.guard._run.pipeline.progress.step + steps
        ):
            with step:
                for x, y in step.microbatches():
                    step.backward(nn.functional.mse_loss(self.model(x), y))
        self.guard._run.context.records.flush()


@pytest.fixture
def uncollected():
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("snapshots", [True, False], ids=["snapshots", "no snapshots"])
@pytest.mark.parametrize("gate", ["host", "device"])
def test_healthy_steps_leave_no_cycles(tmp_path, gate, snapshots, uncollected):
    run = Healthy(tmp_path, gate, snapshots)
    with run.guard:
        run.go(60)
        gc.collect()
        run.go(100)
        gc.set_debug(gc.DEBUG_SAVEALL)
        found = gc.collect()
        assert found == 0, [type(thing) for thing in gc.garbage[:20]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gate", "snapshots"),
    [
        pytest.param("host", True, id="host-snapshots", marks=pytest.mark.slow),
        pytest.param("host", False, id="host-no snapshots", marks=pytest.mark.slow),
        pytest.param("device", True, id="device-snapshots"),
        pytest.param("device", False, id="device-no snapshots", marks=pytest.mark.slow),
    ],
)
def test_a_healthy_run_holds_no_more_memory_the_longer_it_runs(tmp_path, gate, snapshots, uncollected):
    run = Healthy(tmp_path, gate, snapshots)
    with run.guard:
        run.go(SETTLED)
        readings = run.guard._run.parts.memory.detector._history  # bounded: filled before anything is counted
        last = readings[-1]
        readings.extend(type(last)(*(v and v + n for v in last)) for n in range(1, 1 + readings.maxlen))
        counts = []
        for _ in range(WINDOWS):
            run.go(WINDOW)
            counts.append(sys.getallocatedblocks())
    growth = [after - counts[0] for after in counts[1:]]
    # Less than one object a step. A thread that is behind with its rows may hold some at one of the counts.
    assert min(growth[1:]) < WINDOW, growth


@pytest.mark.parametrize("gate", ["host", "device"])
def test_between_begin_and_end_nothing_is_forced_to_disk_and_training_writes_nothing(tmp_path, gate, monkeypatch):
    here, calls = threading.get_ident(), []

    def watched(name: str) -> Any:
        call = getattr(os, name)

        def wrapper(*args: Any) -> Any:
            if threading.get_ident() == here:
                calls.append(name)
            return call(*args)

        return wrapper

    run = Healthy(tmp_path, gate)
    with run.guard:
        run.go(50)
        for name in ("write", "pwrite", "fsync", "fdatasync"):
            monkeypatch.setattr(os, name, watched(name))
        for step in run.guard.steps(run.loader, epochs=None, max_steps=300):
            with step:
                for x, y in step.microbatches():
                    step.backward(nn.functional.mse_loss(run.model(x), y))
        monkeypatch.undo()
    assert calls == []
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 300


def test_a_run_that_is_closed_has_no_thread(tmp_path):
    run = Healthy(tmp_path)
    with run.guard:
        run.go(5)
        assert any(t.name == "holdfast-metrics" for t in threading.enumerate())
    assert not any(t.name.startswith("holdfast") for t in threading.enumerate())
