"""Data, faults and comparison for runs of Lightning and Fabric."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Dataset, Sampler

WIDTH = 8


class Points(Dataset):
    """Item i is a function of i, with random noise if `augment`. `faults` maps an id to a function of its x."""

    def __init__(
        self, count: int, augment: bool = False, faults: dict[int, Callable[[Any], Any]] | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, WIDTH, generator=generator)
        self.y = self.x.sum(1, keepdim=True) + 0.05 * torch.randn(count, 1, generator=generator)
        self.augment, self.faults = augment, faults or {}

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[i % len(self.x)]
        if self.augment:
            x = x + 0.05 * torch.randn(WIDTH) + 0.01 * random.random() + 0.01 * float(np.random.rand())
        return self.faults.get(i, lambda x: x)(x), self.y[i % len(self.x)]


class Order(Sampler):
    """Ids of their own for every epoch, in an order drawn from the global generator, or `seeded` by the epoch."""

    def __init__(self, count: int, seeded: bool, rank: int = 0, ranks: int = 1) -> None:
        self.count, self.seeded, self.rank, self.ranks, self.epoch = count, seeded, rank, ranks, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count // self.ranks

    def __iter__(self) -> Any:
        yield from order_of(self.count, self.epoch, self.seeded)[self.rank :: self.ranks]


class Without:
    """The batches of a batch sampler, less some of them, by epoch and number: for the reference run."""

    def __init__(self, inner: BatchSampler, left_out: Any) -> None:
        self.inner, self.sampler, self.left_out = inner, inner.sampler, frozenset(left_out)

    def __len__(self) -> int:
        return len(self.inner) - sum(epoch == self.sampler.epoch for epoch, _ in self.left_out)

    def __iter__(self) -> Any:
        epoch = self.sampler.epoch
        for number, batch in enumerate(self.inner):
            if (epoch, number) not in self.left_out:
                yield batch


def order_of(count: int, epoch: int, seeded: bool = True) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + epoch) if seeded else None
    return [i + epoch * count for i in torch.randperm(count, generator=generator).tolist()]


def ids_of(places: Any, count: int = 96, batch: int = 8) -> list[int]:
    """Return the ids in the batches at these places, (epoch, number)."""
    return [i for epoch, n in places for i in order_of(count, epoch)[n * batch : (n + 1) * batch]]


def seed() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)


CONFIG: dict[str, Any] = {
    "snapshot": {"every_steps": 4, "certify_after": 3},
    "recover": {"rollback_margin": 2, "skip_batches": 6, "lr_ramp_steps": 7, "probation_steps": 8, "watch_steps": 8},
    "quarantine": {"nonfinite_samples": False},
    "detect": {"gate": "host", "warmup_steps": 8},
}


def same(a: Any, b: Any, name: str) -> None:
    """Compare nested values bit for bit."""
    assert type(a) is type(b), f"{name}: {a!r} / {b!r}"
    if isinstance(a, dict):
        assert a.keys() == b.keys(), f"{name}: {a.keys() ^ b.keys()}"
        for key in a:
            same(a[key], b[key], f"{name}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), name
        for n, (one, other) in enumerate(zip(a, b, strict=True)):
            same(one, other, f"{name}.{n}")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape, name
        assert a.numpy(force=True).tobytes() == b.numpy(force=True).tobytes(), f"{name}: {a} / {b}"
    else:
        assert a == b or a != a, f"{name}: {a!r} / {b!r}"


def inf_gradient(module: Any) -> None:
    """Make the next gradient of the last layer Inf, once."""
    handle = module.last.weight.register_hook(lambda gradient: (handle.remove(), gradient * float("inf"))[1])


def scaled(module: Any) -> None:
    """Scale the weights of the last layer."""
    with torch.no_grad():
        module.last.weight.mul_(1e4)


def nan_weights(module: Any) -> None:
    """Overwrite the weights of the last layer with NaN."""
    with torch.no_grad():
        module.last.weight.mul_(float("nan"))


def garbage(x: torch.Tensor) -> torch.Tensor:
    """Return data that is finite and far from any other."""
    return torch.full_like(x, 30.0)


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process that imports the helpers of these tests."""
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), *sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}
