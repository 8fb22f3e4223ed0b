"""One rank is slower than the others, in its data set, its model or its loop."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts import QUICK, same
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast

BATCH = 4
STEP_SECONDS, SLOWER = 0.03, 0.3
"""how long the forward of a step takes at least, and the share of it by which the slow rank is slower"""
BEGIN, NAMED_WITHIN = 57, 72
"""the first slow step, and the steps in which it must be named: noise on a busy machine is higher than 50 steps allow"""


class SlowRank:
    """Sleeps on the last rank, where it is asked to, from step BEGIN to step `end`."""

    def __init__(self, place: str, is_slow: bool, end: int) -> None:
        self.place, self._is_slow, self._end, self.step = place, is_slow, end, 1

    def pause(self, place: str, parts: int = 1) -> None:
        if self._is_slow and place == self.place and BEGIN <= self.step <= self._end:
            time.sleep(SLOWER * STEP_SECONDS / parts)


class Data(Dataset):
    def __init__(self, slow: SlowRank | None) -> None:
        self._slow = slow

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, i: int) -> Tensor:
        if self._slow is not None:
            self._slow.pause("data", BATCH)
        return torch.randn(8, generator=torch.Generator().manual_seed(i))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.slow: SlowRank | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.slow is not None:
            time.sleep(STEP_SECONDS)
            self.slow.pause("compute")
        result: Tensor = self.layers(x)
        return result.square().mean()


def make(kind: str, slow: SlowRank | None) -> tuple[Any, torch.optim.Optimizer, DataLoader]:
    torch.manual_seed(0)
    plain = Model()
    plain.slow = slow
    model: Any = DistributedDataParallel(plain) if kind != "fsdp" else fully_shard(plain)
    data = Data(slow)
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=False))
    return model, torch.optim.AdamW(model.parameters(), 1e-3), loader


def local_state(model: nn.Module) -> list[Tensor]:
    return [getattr(value, "to_local", lambda v=value: v)().detach() for value in model.state_dict().values()]


def train_unguarded(kind: str, steps: int) -> list[Tensor]:
    model, optimizer, loader = make(kind, None)
    for _, batch in zip(range(steps), loader, strict=False):
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return local_state(model)


def train_guarded(kind: str, steps: int, slow: SlowRank, run_dir: Path) -> list[Tensor]:
    model, optimizer, loader = make(kind, slow)
    if kind == "wrap":
        with holdfast.Guard.wrap(model, optimizer, run_dir=run_dir, config=QUICK) as guard:
            for _, batch in zip(range(steps), guard.data(loader), strict=False):
                slow.step = guard.step + 1
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        return local_state(model)
    with holdfast.Guard(model, optimizer, run_dir=run_dir, config=QUICK) as guard:
        for step in guard.steps(loader, max_steps=steps):
            slow.step = step.number + 1
            slow.pause("between_steps")
            with step:
                for batch in step.microbatches():
                    step.backward(model(batch))
    return local_state(model)


def named(folder: Path, rank: int, size: int) -> None:
    """The slow rank is named with its phase, and the parameters are those of the loop without a guard."""
    kind, place, length = folder.name.split("-")
    end = BEGIN + int(length) - 1
    steps = end if end < 200 else end + 160
    slow = SlowRank(place, rank == size - 1, end)
    state = train_guarded(kind, steps, slow, folder / "run")
    same(state, train_unguarded(kind, steps))
    (folder / f"exact-{rank}").touch()
    dist.barrier()
    if rank != 0:
        return
    events = [json.loads(line) for line in (folder / "run/journal.jsonl").read_text().splitlines()]
    found = [event for event in events if event["event"] == "finding" and event["kind"] == "straggler"]
    places = [(e["evidence"]["rank"], e["evidence"]["host"], e["evidence"]["phase"]) for e in found]
    assert places[:1] == [(size - 1, socket.gethostname(), place)], found
    assert BEGIN <= found[0]["step"] < BEGIN + NAMED_WITHIN, found
    assert abs(found[0]["onset"] - BEGIN) <= 8, found
    assert 10 < found[0]["evidence"]["percent"] < 70, found  # a busy machine makes the pauses longer
    assert not [event for event in events if event["event"] in ("action", "incident_opened")]
    if end < steps:
        notes = [e for e in events if e["event"] == "note" and f"rank {size - 1} (" in e["message"]]
        assert notes and end < notes[0]["step"], events


def healthy(folder: Path, rank: int, size: int) -> None:
    """Ranks that are equally slow are not named."""
    state = train_guarded("ddp", 120, SlowRank("", False, 0), folder / "run")
    same(state, train_unguarded("ddp", 120))
    if rank == 0:
        assert '"straggler"' not in (folder / "run/journal.jsonl").read_text()
