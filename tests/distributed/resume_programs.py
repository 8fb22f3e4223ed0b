"""Runs a guarded data-parallel run in legs, each with its own world size, batch size and workers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast

SAMPLES = 120


class NumberedSamples(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.randn(4, generator=torch.Generator().manual_seed(i)), i


class RunningMean(nn.Module):
    """Keeps a running mean, which differs between ranks until DistributedDataParallel broadcasts that of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def leg(folder: Path, rank: int, size: int) -> None:
    """Run the next leg of folder/legs.json: {"batch", "workers", "stop"}; "crash": exit at that step without closing."""
    legs = json.loads((folder / "legs.json").read_text())
    number = len(list(folder.glob("began-*-0")))
    dist.barrier()
    (folder / f"began-{number}-{rank}").touch()
    plan = legs[number]
    torch.manual_seed(7 + rank)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), RunningMean(), nn.Linear(8, 1))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    wrapped = DistributedDataParallel(model) if size > 1 else model
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=plan.get("lr", 1e-2))
    data = NumberedSamples()
    sampler = DistributedSampler(data, num_replicas=size, rank=rank, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=plan["batch"], sampler=sampler, num_workers=plan["workers"])
    config = {"checkpoint": {"every_steps": 2, "certify_after": 1, "rank_timeout_seconds": 30}}
    guard = holdfast.Guard(wrapped, optimizer, run_dir=folder / "run", config=config)
    served: list[tuple[int, list[int]]] = []
    with guard:
        for step in guard.steps(loader, epochs=2):
            number_now = step.number
            with step:
                for x, ids in step.microbatches():
                    served.append((number_now, ids.tolist()))
                    step.backward(wrapped(x).square().mean())
                if number_now == plan.get("stop"):
                    guard.stop("the leg ends")
            if number_now == plan.get("crash"):
                _report(folder, number, rank, served)
                dist.barrier()
                os._exit(0)
    lr = optimizer.param_groups[0]["lr"]
    _report(folder, number, rank, served, parameters=[p.tolist() for p in model.parameters()], lr=lr)


def _report(folder: Path, number: int, rank: int, served: list, **more: object) -> None:
    (folder / f"leg-{number}-{rank}.json").write_text(json.dumps({"served": served, **more}))
