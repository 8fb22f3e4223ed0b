"""Fabric's loop with Guard.wrap and guard.data: the same run bit for bit, also after faults and kills."""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.fabric
import numpy as np
import pytest
import torch
from lightning.fabric.plugins import MixedPrecision
from lightning_data import (
    CONFIG,
    Order,
    Points,
    Without,
    environment,
    garbage,
    ids_of,
    inf_gradient,
    same,
    scaled,
    seed,
)
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

import holdfast
from marks import slow


class Loop:
    """A loop of Fabric as its documentation shows it, guarded if `run_dir` is given, and what it ended as."""

    def __init__(
        self,
        run_dir: Path | None = None,
        *,
        workers: int = 0,
        augment: bool = False,
        accumulate: int = 1,
        epochs: int = 3,
        count: int = 96,
        norm: bool = True,
        bad: Any = (),
        how: Callable[[Any], Any] = lambda x: x * float("nan"),
        without: Any = (),
        faults: dict[int, Callable[[nn.Module], None]] | None = None,
        fp16: bool = False,
        kill: int = -1,
        config: Any = None,
        seeded: bool = True,
        **options: Any,
    ) -> None:
        seed()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=7) if fp16 else None
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)] if fp16 else None
        fabric = lightning.fabric.Fabric(accelerator="cpu", devices=1, plugins=plugins, **options)
        middle: nn.Module = nn.BatchNorm1d(16) if norm else nn.Identity()
        plain = nn.Sequential(nn.Linear(8, 16), middle, nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        self.module, self.scaler = plain, scaler
        self.optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        model, optimizer = fabric.setup(plain, self.optimizer)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        batches: Any = BatchSampler(Order(count, seeded), 8, drop_last=False)
        batches = Without(batches, without) if without else batches
        data = Points(count, augment, dict.fromkeys(ids_of(bad, count), how))
        context = "fork" if workers else None
        loader = fabric.setup_dataloaders(
            DataLoader(data, batch_sampler=batches, num_workers=workers, multiprocessing_context=context)
        )
        self.guard = None
        if run_dir is not None:
            self.guard = holdfast.Guard.wrap(model, optimizer, self.schedule, run_dir=run_dir, config=config)
            loader = self.guard.data(loader)
        faults = dict(faults or {})
        self.losses: list[float] = []
        drawn = 0
        for _ in range(epochs):
            for x, y in loader:
                fault = faults.pop(int(self.optimizer.state_dict()["state"].get(0, {}).get("step", 0)), None)
                if fault is not None:
                    fault(SimpleNamespace(last=plain[-1]))
                loss = nn.functional.mse_loss(model(x).float(), y)
                fabric.backward(loss / accumulate)
                drawn += 1
                if drawn % accumulate == 0:
                    fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=not fp16)
                    optimizer.step()
                    self.schedule.step()
                    optimizer.zero_grad()
                if self.guard is None or self.guard.landed:
                    self.losses.append(loss.item())
                if drawn == kill:
                    os.kill(os.getpid(), signal.SIGKILL)
        if self.guard is not None:
            self.guard.close()
        self.random = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())

    def state(self) -> dict[str, Any]:
        return {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }


def assert_same(a: Loop, b: Loop) -> None:
    same(a.state(), b.state(), "run")
    assert a.random == b.random


@pytest.mark.shows("fabric", "harmless")
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 4, "augment": True, "seeded": False},
        *slow(
            {},
            {"workers": 2, "augment": True},
            {"workers": 2, "accumulate": 4, "seeded": False},
            {"precision": "bf16-mixed"},
            {"fp16": True},
        ),
    ],
    ids=str,
)
def test_a_guarded_loop_of_fabric_is_the_unguarded_one(tmp_path, options):
    run = Loop(tmp_path / "run", **options)
    plain = Loop(**options)
    assert_same(run, plain)
    summary = run.guard.summary()
    assert (summary.status, summary.committed > 5) == ("clean", True)


@pytest.mark.shows("fabric", "weights")
@pytest.mark.shows("fabric", "inf")
@pytest.mark.parametrize(("fault", "step"), [(scaled, 13), *slow((scaled, 26), (inf_gradient, 7), (inf_gradient, 12))])
def test_a_fault_that_does_not_come_back_leaves_fabrics_loop_without_it(tmp_path, fault, step):
    run = Loop(tmp_path / "run", faults={step: fault}, augment=True, config=CONFIG)
    assert run.guard.summary().status == "recovered"
    assert_same(run, Loop(augment=True))


@pytest.mark.shows("fabric", "nan")
@pytest.mark.parametrize("place", [(1, 11), *slow(((0, 0),), ((1, 0),), ((2, 11),))])
def test_a_nan_batch_is_left_out_although_clip_gradients_raises_for_it_by_default(tmp_path, place):
    run = Loop(tmp_path / "run", bad=[place], augment=True)
    assert_same(run, Loop(without=[place], augment=True))


@pytest.mark.shows("fabric", "garbage")
@pytest.mark.shows("fabric", "border")
@pytest.mark.slow
def test_a_window_of_garbage_is_left_out_of_fabrics_loop(tmp_path):
    window = [(4, 18), (4, 19), (5, 0), (5, 1), (5, 2)]
    options = {"count": 160, "epochs": 7, "norm": False, "augment": True}
    run = Loop(tmp_path / "run", bad=window, how=garbage, config=CONFIG, **options)
    events = map(json.loads, (tmp_path / "run" / "journal.jsonl").read_text().splitlines())
    rollbacks = [(e["to_step"], e["from_step"]) for e in events if e.get("action") == "rollback"]
    assert any(to < 100 < begin for to, begin in rollbacks), "step 100 ends an epoch"
    assert_same(run, Loop(without=window, **options))


def test_clip_gradients_of_fabric_raises_again_once_the_guard_is_closed(tmp_path):
    before = lightning.fabric.Fabric.clip_gradients
    Loop(tmp_path / "run", epochs=1)
    assert lightning.fabric.Fabric.clip_gradients is before


@pytest.mark.shows("fabric", "killed")
@pytest.mark.slow
@pytest.mark.parametrize("options", ["augment=True", "workers=2, augment=True", "accumulate=4, bad=[(1, 2)]"])
def test_a_loop_of_fabric_that_is_killed_ends_as_if_it_never_was(tmp_path, options):
    program = (
        "import sys, torch; from pathlib import Path; from test_fabric_loop import Loop\n"
        "config = {'checkpoint': {'every_steps': 3}, 'snapshot': {'certify_after': 2}}\n"
        f"run = Loop(Path(sys.argv[1]) / 'run', kill=int(sys.argv[2]), config=config, {options})\n"
        "torch.save((run.state(), run.random), Path(sys.argv[1]) / 'ended.pt')\n"
    )
    for kill in (9, 14, -1):
        command = [sys.executable, "-c", program, str(tmp_path), str(kill)]
        done = subprocess.run(command, env=environment(), timeout=200, check=False)
        assert done.returncode == (0 if kill < 0 else -signal.SIGKILL)
    arguments = eval(f"dict({options})")
    if "bad" in arguments:
        arguments.pop("bad")
        arguments["without"] = [(1, n) for n in range(4)]
    program = (  # a process of its own: after other tests of this process the last bits differ
        "import sys, torch; from pathlib import Path; from test_fabric_loop import Loop\n"
        f"plain = Loop(**{arguments!r})\n"
        "torch.save((plain.state(), plain.random), Path(sys.argv[1]) / 'plain.pt')\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment(), timeout=200, check=True)
    (state, generators), (expected, random_state) = (
        torch.load(tmp_path / name, weights_only=False) for name in ("ended.pt", "plain.pt")
    )
    same(state, expected, "run")
    assert generators == random_state


@pytest.mark.slow
def test_the_example_of_fabric_recovers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fabric_loop", str(tmp_path / "run")])
    runpy.run_module("holdfast.examples.fabric_loop", run_name="__main__")
    assert "recovered: 384 steps committed, 1 skipped, 1 replayed, 1 rolled back" in capsys.readouterr().out


@pytest.mark.shows("fabric", "ranks")
@pytest.mark.slow
def test_two_ranks_of_fabric_are_the_unguarded_ones_also_after_a_nan_on_one_of_them(tmp_path):
    script = str(Path(__file__).parent / "fabric_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    done = subprocess.run([*command, str(tmp_path)], env=environment(), timeout=200, check=False)
    assert done.returncode == 0
