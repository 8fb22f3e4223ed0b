"""Trains two ranks of which one runs out of memory inside a collective. Run it under torchrun, which restarts both."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import holdfast
from holdfast.drill.memory_limit import MemoryLimit

STEPS, SIZE, LENGTH = 10, 4, 16


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 80

    def __getitem__(self, n: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(n)
        return torch.randn(LENGTH, 4, generator=generator), torch.randn(LENGTH, 4, generator=generator)


class Keeps(torch.autograd.Function):
    """Passes its input on, and takes as much memory again in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        with limit:
            return gradient.clone()


limit = MemoryLimit()


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
    if kind == "fsdp":
        for layer in (model[0], model[2], model):
            fully_shard(layer)
        return model
    return DistributedDataParallel(model)


def train(kind: str, guard_options: dict[str, Any], nbytes: int | None, at: int) -> tuple[list[Tensor], int, int]:
    model = make(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Data()
    loader = DataLoader(data, batch_size=SIZE, sampler=DistributedSampler(data, shuffle=True))
    guard = holdfast.Guard(model, optimizer, **guard_options)
    parts = 0
    with guard:
        for step in guard.steps(loader, max_steps=STEPS):
            parts = 0
            with step:
                for x, y in step.microbatches():
                    parts += 1
                    hidden = Keeps.apply(x.requires_grad_()) if kind == "ddp" else x
                    is_short = nbytes is not None and step.number >= at and dist.get_rank() == 1
                    out = model(hidden)
                    limit.nbytes = nbytes if is_short else None
                    if kind == "fsdp":
                        with limit:
                            out = out * 1.0
                    step.backward((out - y).square().mean())
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [p.detach().clone() for p in whole], parts, int(guard.step)


def main(folder: Path, kind: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    config = {
        "checkpoint": {"every_steps": 2, "certify_after": 1, "rank_timeout_seconds": 30},
        "liveness": {"poll_seconds": 0.1},
    }
    one_sample = LENGTH * 4 * 4
    state, parts, step = train(kind, {"run_dir": folder / "run", "config": config}, int(2.5 * one_sample), at=5)
    plain, _, _ = train(kind, {"config": {"checkpoint": {"enabled": False}}}, None, at=0)
    difference = max(float((a - b).norm() / b.norm()) for a, b in zip(state, plain, strict=True))
    end = {"attempt": attempt, "step": step, "parts": parts, "difference": difference}
    (folder / f"end-{rank}.json").write_text(json.dumps(end))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
