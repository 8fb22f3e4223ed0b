"""A small model spread over ranks in every way that is supported, and how its bits and its collectives are told."""

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
    """A running mean is a buffer that forward moves; the last bias has one element, so that under FSDP2 most ranks
    have none of it."""

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
    """The same weights on every rank, in the placements of `kind`."""
    torch.manual_seed(0)
    model = Net(norm=kind.endswith(("norm", "sequence")), width=width)
    way = kind.split("+")[0]
    if way == "plain":
        return model
    if way == "ddp":
        return DistributedDataParallel(model)
    if way in ("fsdp", "kept"):
        mesh = line(size)
        for layer in (model.up, model.down):
            fully_shard(layer, mesh=mesh, reshard_after_forward=way == "fsdp")
        return fully_shard(model, mesh=mesh, reshard_after_forward=way == "fsdp")
    if way == "tp":
        whole = {} if kind.endswith("norm") else LAST
        plan = IN_SEQUENCE if kind.endswith("sequence") else SPLIT
        return parallelize_module(model, line(size), {**plan, **whole})
    assert way == "both"
    mesh = grid(size)
    whole = {} if kind.endswith("norm") else LAST
    parallelize_module(model, mesh["tp"], {**SPLIT, **whole})
    fully_shard(model.up, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def batch(kind: str, rank: int, step: int) -> Tensor:
    """Ranks that share a replica see the same data."""
    who = {"tp": 0, "both": rank // 2}.get(kind.split("+")[0], rank)
    if kind.endswith("sequence"):
        return torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(step))
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + who))


def backward(model: nn.Module, kind: str, rank: int, step: int) -> None:
    x = batch(kind, rank, step)
    if kind.endswith("sequence"):
        x = DTensor.from_local(x.chunk(dist.get_world_size(), 1)[rank], line(dist.get_world_size()), [Shard(1)])
        model.train(False)
    out = model(x)
    (out.full_tensor() if isinstance(out, DTensor) else out).square().mean().backward()


def mine(value: Tensor) -> Tensor:
    with torch.no_grad():
        return (value.to_local() if isinstance(value, DTensor) else value).detach().clone()


def full(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What this rank holds: parameters, by way of the optimizer, its state, and buffers."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = [v for p in parameters for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor)]
    return [mine(t) for t in (*parameters, *state, *model.buffers())]


def alike(one: list[Tensor], other: list[Tensor]) -> bool:
    """Bit for bit."""
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.equal(b) and _signs(a, b) for a, b in pairs
    )


def _signs(a: Tensor, b: Tensor) -> bool:
    return bool((a.signbit() == b.signbit()).all())


@contextlib.contextmanager
def no_collective() -> Iterator[None]:
    """Nothing is asked of another rank inside, on any group, from any thread."""
    before = collectives()
    yield
    assert collectives() == before, "a collective was called"


def collectives() -> int:
    return sum(group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map)
