"""Builds a small model in every supported parallel layout, and compares bits and counts collectives."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

LAST = {"last": RowwiseParallel(input_layouts=Replicate())}
SPLIT = {"up": ColwiseParallel(), "down": RowwiseParallel()}
IN_SEQUENCE = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Replicate()),
}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
}


class Net(nn.Module):
    """Has a buffer that forward updates, and a bias of one element, of which most ranks have nothing under FSDP2."""

    def __init__(self, *, norm: bool = False, width: int = 8) -> None:
        super().__init__()
        self.norm: nn.Module = nn.LayerNorm(6) if norm else nn.Identity()
        self.up, self.down = nn.Linear(6, width), nn.Linear(width, 6)
        self.last = nn.Linear(6, 1)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().flatten(0, -2).mean(0)
        hidden = self.down(torch.tanh(self.up(self.norm(x))))
        return self.last(hidden) - self.mean.sum()


@functools.cache
def line(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,))


@functools.cache
def grid(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))


def build(kind: str, size: int, *, width: int = 8) -> nn.Module:
    """Return a model with the same weights on every rank, in the layout `kind`."""
    torch.manual_seed(0)
    model = Net(norm=kind.endswith(("norm", "sequence")), width=width)
    layout = kind.split("+")[0]
    if layout == "plain":
        return model
    if layout == "ddp":
        return DistributedDataParallel(model)
    if layout in ("fsdp", "kept"):
        mesh = line(size)
        for layer in (model.up, model.down):
            fully_shard(layer, mesh=mesh, reshard_after_forward=layout == "fsdp")
        return fully_shard(model, mesh=mesh, reshard_after_forward=layout == "fsdp")
    if layout == "tp":
        whole = {} if kind.endswith("norm") else LAST
        plan = IN_SEQUENCE if kind.endswith("sequence") else SPLIT
        return parallelize_module(model, line(size), {**plan, **whole})
    assert layout == "both"
    mesh = grid(size)
    whole = {} if kind.endswith("norm") else LAST
    parallelize_module(model, mesh["tp"], {**SPLIT, **whole})
    fully_shard(model.up, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def batch(kind: str, rank: int, step: int) -> Tensor:
    """Return a batch; ranks of one tensor-parallel group get the same."""
    data_rank = {"tp": 0, "both": rank // 2}.get(kind.split("+")[0], rank)
    if kind.endswith("sequence"):
        return torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(step))
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + data_rank))


def backward(model: nn.Module, kind: str, rank: int, step: int) -> None:
    x = batch(kind, rank, step)
    if kind.endswith("sequence"):
        x = DTensor.from_local(x.chunk(dist.get_world_size(), 1)[rank], line(dist.get_world_size()), [Shard(1)])
        model.train(False)
    out = model(x)
    (out.full_tensor() if isinstance(out, DTensor) else out).square().mean().backward()


def local_copy(value: Tensor) -> Tensor:
    with torch.no_grad():
        return (value.to_local() if isinstance(value, DTensor) else value).detach().clone()


def full(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def local_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return copies of this rank's parameters, optimizer state and buffers."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = [v for p in parameters for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor)]
    return [local_copy(t) for t in (*parameters, *state, *model.buffers())]


def bit_identical(one: list[Tensor], other: list[Tensor]) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.equal(b) and a.signbit().equal(b.signbit()) for a, b in pairs
    )


@contextlib.contextmanager
def no_collective() -> Iterator[None]:
    """Assert that the block calls no collective, on any group, from any thread."""
    before = collective_count()
    yield
    assert collective_count() == before, "a collective was called"


def collective_count() -> int:
    return sum(group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map)
