"""A vision loop with random augmentation in two workers, killed at random instants, is bit for bit the unguarded run."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from parts import assert_equal
from torch import nn
from torch.utils.data import DataLoader, Dataset

import holdfast
from marks import slow

FORK = multiprocessing.get_context("fork")
CONFIG = {
    "checkpoint": {"every_steps": 2, "certify_after": 1, "keep_last": 2},
    "snapshot": {"every_steps": 4, "certify_after": 2},
    "journal": {"fsync": False},
}


class Images(Dataset):
    """Crops, flips and noise, each from another global generator, as transforms of different libraries have them."""

    def __init__(self, count: int) -> None:
        self.images = torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        image = self.images[i]
        top, left = random.randint(0, 4), random.randint(0, 4)
        image = image[:, top : top + 8, left : left + 8]
        image = image.flip(-1) if np.random.rand() < 0.5 else image
        return image + 0.1 * torch.randn(image.shape), i % 4


class Training(NamedTuple):
    persistent: bool
    epochs: int
    images: int


def made(how: Training) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    convolution = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model = nn.Sequential(convolution, nn.Flatten(), nn.Dropout(0.1), nn.Linear(144, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    workers: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
    workers["persistent_workers"] = how.persistent
    return model, optimizer, DataLoader(Images(how.images), batch_size=8, shuffle=True, **workers)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict()["state"],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
    }


def unguarded(how: Training) -> dict[str, Any]:
    model, optimizer, loader = made(how)
    for _ in range(how.epochs):
        for images, labels in loader:
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    return state_of(model, optimizer)


def guarded(run_dir: Path, how: Training) -> dict[str, Any]:
    model, optimizer, loader = made(how)
    with holdfast.Guard(model, optimizer, run_dir=run_dir, config=CONFIG) as guard:
        for step in guard.steps(loader, epochs=how.epochs):
            with step:
                for images, labels in step.microbatches():
                    step.backward(nn.functional.cross_entropy(model(images), labels))
    return state_of(model, optimizer)


def one_process(run_dir: Path, end: Path, how: Training, kill_after: float | None) -> bool:
    """Train in a process of its own, killed after so many seconds. Return whether it was killed."""

    def target() -> None:
        os.setpgrp()
        torch.set_num_threads(1)
        if kill_after is not None:
            timer = threading.Timer(kill_after, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        torch.save(guarded(run_dir, how), end)
        os._exit(0)

    process = FORK.Process(target=target)
    process.start()
    deadline = time.monotonic() + 120
    while process.exitcode is None and time.monotonic() < deadline:  # `join` would wait for its workers too
        time.sleep(0.01)
    with suppress(ProcessLookupError):  # a worker that was just started may not notice that its parent is gone
        os.killpg(process.pid, signal.SIGKILL)
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return process.exitcode != 0


@pytest.mark.parametrize(
    ("kills", "how"),
    [(2, Training(False, 2, 28)), *slow((20, Training(False, 4, 68)), (20, Training(True, 4, 68)))],
    ids=["2", "20", "20, persistent"],
)
def test_killed_at_random_instants_it_ends_as_the_unguarded_run(kills, how, tmp_path):
    reference = unguarded(how)
    began = time.monotonic()
    assert_equal(guarded(tmp_path / "whole", how), reference)
    seconds = time.monotonic() - began
    dice, killed, runs = random.Random(kills), 0, 0
    while killed < kills:
        run_dir, end = tmp_path / f"run{runs}", tmp_path / f"run{runs}.pt"
        while one_process(run_dir, end, how, dice.uniform(0, seconds) if killed < kills else None):
            killed += 1
        runs += 1
        assert_equal(torch.load(end, weights_only=False), reference)
