"""Bits flipped in one rank's memory while it trains: found, the rank named, healed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import Guarded, Layout, on_all, plain, same

import holdfast

EVERY, WHEN = 5, 7
# Not to before the first step: there DistributedDataParallel orders its buckets anew, and more than two ranks then add up
# their gradients in another order.
RECOVER = {"rollback_margin": 0, "probation_steps": 6, "lr_factor": 1.0}
CONFIG = {"integrity": {"replicas_every": EVERY, "between_updates_every": 0}, "recover": RECOVER}


def flip(value: torch.Tensor) -> None:
    """One bit, as a cosmic ray would: through memory, unseen by torch."""
    value.data_ptr()
    memory = value.detach().reshape(-1).view(torch.int32).numpy()
    memory[3] ^= 1 << 20


def _once(here: bool, act: Callable[[], Any]) -> Callable[[Any, Any], None]:
    """On this rank, the first time that step WHEN comes."""
    done: list[int] = []

    def each(guard: Any, step: Any) -> None:
        if here and step.number == WHEN and not done:
            done.append(1)
            act()

    return each


def _target(layout: Layout, where: str) -> torch.Tensor:
    parameter = layout.model.module.down.weight
    return parameter if where == "parameter" else layout.optimizer.state[parameter][where]


def replicas(folder: Path, rank: int, size: int) -> None:
    """DDP: in a parameter and in the optimizer's state. With four the rank is named; with two both are suspects."""
    for gate, optimizer, where in (
        ("host", "adamw", "parameter"),
        ("device", "adamw_fused", "exp_avg"),
        ("host", "adamw", "exp_avg_sq"),
    ):
        layout = Layout("ddp", rank, size, optimizer)
        each = _once(rank == size - 1, lambda layout=layout, where=where: flip(_target(layout, where)))
        config = {**CONFIG, "detect": {"gate": gate, "warmup_steps": 8}}
        place = folder / f"c-{size}-{where}"
        run = Guarded(layout, place, config=config, each=each)
        assert len({str(o) for o in on_all(run.outcomes)}) == 1
        dist.barrier()
        assert [o for o in run.outcomes if o[2] == "rolled_back"] == [(10, 1, "rolled_back")], run.outcomes
        same(layout.state(), plain(Layout("ddp", rank, size, optimizer), 1.0, set()))
        if rank == 0:
            (found,) = [e for e in run.events("finding") if e["kind"] == "desync"]
            said = found["evidence"]
            assert said["named"] == (size > 2) and said["ranks"] == ([size - 1] if size > 2 else [0, 1]), said
            name = "model.down.weight" if where == "parameter" else where
            assert len(said["tensors"]) <= 2 and any(name in t for t in said["tensors"]), said
            assert any("transient" in e.get("message", "") for e in run.events("note"))


def persistent(folder: Path, rank: int, size: int) -> None:
    """A rank that flips again after the return has a broken device: the run is stopped, and says which."""

    def each(guard: Any, step: Any) -> None:
        if step.number in (WHEN, WHEN + 1) and rank == 1:
            flip(_target(layout, "parameter"))

    layout = Layout("ddp", rank, size)
    place = folder / "persistent"
    with pytest.raises(holdfast.PolicyStop) as stop:
        Guarded(layout, place, config=CONFIG, each=each)
    assert stop.value.code == 70
    assert all("rank 1" in said and "desync" in said for said in on_all(str(stop.value)))


def window(folder: Path, rank: int, size: int) -> None:
    """Where nothing is replicated: what changed between two updates is found on the rank it changed on."""
    layout = Layout("fsdp", rank, size)
    config = {"integrity": {"replicas_every": 0, "between_updates_every": 1}}
    each = _once(rank == 1, lambda: flip(layout.model.down.weight.to_local()))
    run = Guarded(layout, folder / "window", config=config, each=each)
    dist.barrier()
    assert [o for o in run.outcomes if o[2] == "rolled_back"] == [(WHEN, 1, "rolled_back")], run.outcomes
    same(layout.state(), plain(Layout("fsdp", rank, size), 1.0, set()))
    if rank == 0:
        (found,) = [e for e in run.events("finding") if e["kind"] == "silent_corruption"]
        assert found["evidence"]["ranks"] == [1] and "model.down.weight" in found["evidence"]["tensors"], found


def gradient(folder: Path, rank: int, size: int) -> None:
    """A gradient that one rank alone changed after it was averaged: the update lands nowhere, and the step runs again."""
    layout = Layout("ddp", rank, size)
    each = _once(rank == 1, lambda: layout.model.module.down.weight.grad.mul_(3.0))
    run = Guarded(layout, folder / "gradient", config=CONFIG, each=each)
    dist.barrier()
    assert [o for o in run.outcomes if o[2] != "committed"] == [(WHEN, 1, "replayed")], run.outcomes
    same(layout.state(), plain(Layout("ddp", rank, size), 1.0, set()))
    if rank == 0:
        (found,) = [e for e in run.events("finding") if e["kind"] == "desync"]
        assert found["evidence"]["ranks"] == ([1] if size > 2 else [0, 1]), found


def four(folder: Path, rank: int, size: int) -> None:
    replicas(folder, rank, size)
    persistent(folder, rank, size)
    gradient(folder, rank, size)


def two(folder: Path, rank: int, size: int) -> None:
    replicas(folder, rank, size)
    window(folder, rank, size)
