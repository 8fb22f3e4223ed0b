"""Processes that train until a signal ends them. Each tells the test when it has come to a place, and waits there."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # optimizers and DDP import it when they are first made
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast

STEPS = 40
CONFIG = {
    "checkpoint": {"every_steps": 15, "certify_after": 3},
    "snapshot": {"every_steps": 4, "certify_after": 3},
    "journal": {"fsync": False},
}


class Noisy(Dataset):
    """Rows with noise from three global generators."""

    def __init__(self) -> None:
        self.x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        noise = 0.1 * torch.randn(6) + 0.01 * random.random() + 0.01 * float(np.random.rand())
        return self.x[i] + noise, self.x[i].sum().sin().reshape(1)


class Place:
    """Somewhere in the program: the process tells the test once, and then waits there, for `seconds` or for an answer."""

    def __init__(self, pipe: Connection, name: str, step: int, seconds: float | None = None) -> None:
        self.pipe, self.name, self.step, self.seconds = pipe, name, step, seconds
        self._is_told = False

    def at(self, name: str, step: int) -> None:
        if (name, step) != (self.name, self.step) or self._is_told:
            return
        self._is_told = True
        self.pipe.send(os.getpid())
        if self.seconds is None:
            end = time.monotonic() + 60
            while not self.pipe.poll(0.1):  # a signal just before a system call does not interrupt it
                assert time.monotonic() < end, "the test gives no answer"
        else:
            time.sleep(self.seconds)


def train(
    run_dir: Path,
    driver: str,
    place: Place | None,
    config: dict[str, Any] | None = None,
    *,
    workers: int = 0,
    rank: int = 0,
    size: int = 1,
    port: int = 0,
    before: Callable[[], object] = lambda: None,
) -> None:
    """Train, and write a checksum of model, optimizer and random state to run_dir.end at the end."""
    logging.getLogger("holdfast").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before()
    torch.set_num_threads(1)
    if size > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    bare: nn.Module = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.2), nn.Linear(12, 1))
    model = DistributedDataParallel(bare) if size > 1 else bare
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(Noisy(), size, rank, seed=3) if size > 1 else None
    loader = DataLoader(Noisy(), 4, shuffle=sampler is None, sampler=sampler, num_workers=workers)
    policy = {name: {**CONFIG.get(name, {}), **(config or {}).get(name, {})} for name in {*CONFIG, *(config or {})}}

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        if place is not None:
            place.at("forward", int(guard.step) + 1)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def evaluate() -> None:
        if place is not None:
            place.at("evaluation", int(guard.step))
        if guard.step % 10 == 0:
            torch.rand(3)

    make = holdfast.Guard.wrap if driver == "wrap" else holdfast.Guard
    guard = make(model, optimizer, run_dir=run_dir, config=policy)
    if driver == "steps":
        with guard:
            for step in guard.steps(loader, max_steps=STEPS):
                with step:
                    for batch in step.microbatches():
                        step.backward(loss_of(batch))
                evaluate()
    else:
        while guard.step < STEPS:
            for batch in guard.data(loader, max_steps=STEPS):
                loss = loss_of(batch)
                loss.backward()
                if driver == "wrap":
                    optimizer.step()
                    optimizer.zero_grad()
                else:
                    guard.step(loss)
                evaluate()
        guard.close()
    state = [*bare.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values()), torch.rand(2)]
    digest = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in state)).hexdigest()
    Path(f"{run_dir}.end{rank}").write_text(digest)
