"""Trains one small model in every parallel layout, with and without a guard, on the same data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast
from holdfast import Plan, Rollback, SkipData
from holdfast.core.record.quarantine import Quarantine
from holdfast.distributed.norms import MeshNorms
from holdfast.runtime.tensors.norms import ClipSpec

SAMPLES, GLOBAL = 160, 8
"""samples in an epoch, and in a step over all data-parallel ranks"""
STEPS = SAMPLES // GLOBAL
QUICK = {
    "snapshot": {"every_steps": 4, "certify_after": 2},
    "recover": {"rollback_margin": 1, "skip_batches": 2, "probation_steps": 6, "lr_factor": 1.0},
    "quarantine": {"nonfinite_samples": False},
    "checkpoint": {"enabled": False},
    "liveness": {"every_steps": 5, "timeout_seconds": 30, "poll_seconds": 0.1},
}


class Explode(torch.autograd.Function):
    """Returns its input and makes the gradient large, which the loss does not show."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1e6


class Data(Dataset):
    """Sample i is a function of i; `faults` maps some samples to what is wrong with them."""

    def __init__(self, faults: dict[int, str]) -> None:
        self.faults = faults

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1000 + i)
        x = torch.randn(8, generator=generator)
        y = x[:4] * 0.5 + 0.1 * torch.randn(4, generator=generator)
        fault = self.faults.get(i, "")
        if fault == "nan":
            x = x * float("nan")
        elif fault == "spike":
            y = y + 300.0
        return {"x": x, "y": y, "id": i, "explodes": fault == "explosion"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x + self.down(torch.tanh(self.up(x)))))


def loss_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    out = model(batch["x"])
    if bool(batch["explodes"].any()):
        out = Explode.apply(out)
    return (out - batch["y"]).square().mean()


class Layout:
    """Holds a model parallelized over the ranks, its optimizer, and this rank's share of the data."""

    def __init__(self, kind: str, rank: int, size: int, optimizer: str = "adamw") -> None:
        torch.manual_seed(5)
        bare: nn.Module = Model()
        self.kind, self.rank, self.size = kind, rank, size
        self.data = (size, rank)
        self.model = bare
        if kind == "ddp":
            self.model = DistributedDataParallel(bare)
        elif kind == "fsdp":
            mesh = init_device_mesh("cpu", (size,))
            for part in (bare.up, bare.down):
                fully_shard(part, mesh=mesh)
            fully_shard(bare, mesh=mesh)
        elif kind == "tp":
            mesh = init_device_mesh("cpu", (size,))
            parallelize_module(bare, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            self.data = (1, 0)
        elif kind == "fsdp_tp":
            mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(bare, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            for part in (bare.up, bare.down):
                fully_shard(part, mesh=mesh["dp"])
            fully_shard(bare, mesh=mesh["dp"])
            self.data = (size // 2, rank // 2)
        # A fused optimizer takes the parameters of one mesh at a time.
        groups: dict[Any, list[nn.Parameter]] = {}
        for p in self.model.parameters():
            groups.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
        self.optimizer = OPTIMIZERS[optimizer]([{"params": group} for group in groups.values()])

    def loader(self, faults: dict[int, str] | None = None) -> DataLoader:
        data = Data(faults or {})
        sampler = DistributedSampler(data, num_replicas=self.data[0], rank=self.data[1], shuffle=False)
        return DataLoader(data, batch_size=GLOBAL // self.data[0], sampler=sampler)

    def clip(self, max_norm: float) -> None:
        """Clip as torch does. It refuses parameters on several meshes: use the norm of their norms there."""
        parameters = list(self.model.parameters())
        if "tp" not in self.kind:
            torch.nn.utils.clip_grad_norm_(parameters, max_norm)
            return
        norms = MeshNorms(self.size)
        total = norms.gradient_norm(parameters, to_clip=True).value
        norms.clip(parameters, ClipSpec(max_norm, total, torch.stack(on_all(total)).amax()))

    def state(self) -> list[Tensor]:
        """Return this rank's part of every parameter and of all optimizer state."""
        tensors: list[Tensor] = [p.detach() for p in self.model.parameters()]
        for p in self.model.parameters():
            tensors += [v for _, v in sorted(self.optimizer.state[p].items()) if isinstance(v, Tensor)]
        return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
}


class BackWithoutData:
    """Plans a rollback that leaves out the two batches around the bad step, on every rank."""

    def on_instability(self, incident: Any) -> Plan:
        step = incident.findings[-1].step
        back = Rollback(before=max(0, step - 2), at_latest=step - 1)
        return Plan(actions=(back, SkipData(batches=2, around=step)), reason="back, without the data")


def train_unguarded(
    layout: Layout,
    clip: float | None,
    without: set[int],
    steps: int = STEPS,
    faults: dict[int, str] | None = None,
) -> list[Tensor]:
    """Run the loop without a guard over one epoch, without the steps in `without`."""
    done = 0
    for number, batch in enumerate(layout.loader(faults), 1):
        if number in without or done == steps:
            continue
        loss_of(layout.model, batch).backward()
        if clip is not None:
            layout.clip(clip)
        layout.optimizer.step()
        layout.optimizer.zero_grad()
        done += 1
    return layout.state()


class Guarded:
    """Runs a guarded loop and keeps the outcome of each step on this rank."""

    def __init__(
        self,
        layout: Layout,
        run_dir: Path,
        *,
        faults: dict[int, str] | None = None,
        clip: float | None = 1.0,
        config: dict[str, Any] | None = None,
        each: Callable[[holdfast.Guard, Any], None] | None = None,
        hooks: list[Any] | None = None,
        max_steps: int | None = None,
    ) -> None:
        self.layout, self.run_dir = layout, run_dir
        self.outcomes: list[tuple[int, int, str]] = []
        merged = {**QUICK, **(config or {})}
        self.guard = holdfast.Guard(
            layout.model,
            layout.optimizer,
            clip_grad_norm=clip,
            run_dir=run_dir,
            config=merged,
            hooks=[self, *(hooks or [])],
        )
        with self.guard:
            for step in self.guard.steps(layout.loader(faults), epochs=1, max_steps=max_steps):
                with step:
                    for batch in step.microbatches():
                        step.backward(loss_of(layout.model, batch))
                    if each is not None:
                        each(self.guard, step)

    late = True

    def on_step_end(self, outcome: Any) -> None:
        self.outcomes.append((outcome.step, outcome.signal.attempt, str(outcome.status)))

    def on_recovery(self, outcome: Any) -> None:
        self.outcomes.append((outcome.step, outcome.signal.attempt, str(outcome.status)))

    def events(self, *names: str) -> list[dict[str, Any]]:
        lines = (self.run_dir / "journal.jsonl").read_text().splitlines()
        return [e for e in map(json.loads, lines) if e["event"] in names]

    def excluded(self) -> set[int]:
        """Return the steps of the epoch whose data is quarantined, counted from 1."""
        spans = Quarantine(self.run_dir / "quarantine.json").spans()
        return {n + 1 for n in range(STEPS) for _, a, b in spans if a < (n + 1) * GLOBAL and n * GLOBAL < b}


def same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for n, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), f"tensor {n}: {a} {b}"


def on_all(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
