"""A program that trains a sharded model, and keeps what its ranks together hold at the end."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from sharded_models import OPTIMIZERS, build
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from holdfast import Guard, HoldfastWarning


def train_sharded(folder: Path, rank: int, size: int) -> None:
    model = build("fsdp", size)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    data = torch.randn(4 * 6, 6, generator=torch.Generator().manual_seed(rank))
    with warnings.catch_warnings(action="ignore", category=HoldfastWarning):
        guard = Guard(model, optimizer, run_dir=folder / "run")
        with guard:
            for step in guard.steps(DataLoader(TensorDataset(data), 4), epochs=1):
                with step:
                    for (batch,) in step.microbatches():
                        step.backward(model(batch).square().mean())
    whole = {
        "model": {name: _whole(value) for name, value in model.state_dict().items()},
        "optimizer": {
            index: {name: _whole(value) for name, value in entry.items()}
            for index, entry in optimizer.state_dict()["state"].items()
        },
    }
    if rank == 0:
        torch.save(whole, folder / "whole.pt")


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
