"""Flips bits in one rank's memory during training. The guard finds it, names the rank and rolls back."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import Guarded, Layout, on_all, same, train_unguarded

import holdfast
from holdfast.core.record import journal
from holdfast.core.record.exclusions import read_exclusions

EVERY, FLIP_STEP = 5, 7
# Not back to before the first step: DistributedDataParallel rebuilds its buckets there, and more than two ranks would then
# sum their gradients in another order.
RECOVER = {"rollback_margin": 0, "probation_steps": 6, "lr_factor": 1.0}
CONFIG = {"integrity": {"replicas_every": EVERY, "between_updates_every": 0}, "recover": RECOVER}


def flip(value: torch.Tensor) -> None:
    """Flip one bit through memory, so that torch does not count it as a write."""
    memory = value.detach().reshape(-1).view(torch.int32).numpy()
    memory[3] ^= 1 << 20


def _once(on_this_rank: bool, act: Callable[[], Any]) -> Callable[[Any, Any], None]:
    """Call `act` on this rank, the first time FLIP_STEP runs."""
    done: list[int] = []

    def each(guard: Any, step: Any) -> None:
        if on_this_rank and step.number == FLIP_STEP and not done:
            done.append(1)
            act()

    return each


def _target(layout: Layout, where: str) -> torch.Tensor:
    parameter = layout.model.module.down.weight
    return parameter if where == "parameter" else layout.optimizer.state[parameter][where]


def replicas(folder: Path, rank: int, size: int) -> None:
    """DDP: in a parameter and in optimizer state. Of four ranks one is named; of two both are suspects."""
    for gate, optimizer, where in (
        ("host", "adamw", "parameter"),
        ("device", "adamw_fused", "exp_avg"),
        ("host", "adamw", "exp_avg_sq"),
    ):
        layout = Layout("ddp", rank, size, optimizer)
        each = _once(rank == size - 1, lambda layout=layout, where=where: flip(_target(layout, where)))
        config = {**CONFIG, "detect": {"gate": gate, "warmup_steps": 8}}
        run_dir = folder / f"c-{size}-{where}"
        run = Guarded(layout, run_dir, config=config, each=each)
        assert len({str(o) for o in on_all(run.outcomes)}) == 1
        dist.barrier()
        assert [o for o in run.outcomes if o[2] == "rolled_back"] == [(10, 1, "rolled_back")], run.outcomes
        same(layout.state(), train_unguarded(Layout("ddp", rank, size, optimizer), 1.0, set()))
        if rank == 0:
            (finding,) = [e for e in run.events("finding") if e["kind"] == "desync"]
            evidence = finding["evidence"]
            assert evidence["named"] == (size > 2) and evidence["ranks"] == ([size - 1] if size > 2 else [0, 1]), (
                evidence
            )
            name = "model.down.weight" if where == "parameter" else where
            assert len(evidence["tensors"]) <= 2 and any(name in t for t in evidence["tensors"]), evidence
            assert [each["rank"] for each in evidence["devices"]] == evidence["ranks"]
            assert all(each["host"] == socket.gethostname() and each["device"] == "cpu" for each in evidence["devices"])
            assert any("transient" in e.get("message", "") for e in run.events("note"))
            assert read_exclusions(run.events("finding") + run.events("plan")) == [], "named once"


def persistent(folder: Path, rank: int, size: int) -> None:
    """A rank that flips a bit again after the rollback has a broken device: the run stops and names it."""

    def each(guard: Any, step: Any) -> None:
        if step.number in (FLIP_STEP, FLIP_STEP + 1) and rank == 1:
            flip(_target(layout, "parameter"))

    layout = Layout("ddp", rank, size)
    run_dir = folder / "persistent"
    with pytest.raises(holdfast.PolicyStop) as stop:
        Guarded(layout, run_dir, config=CONFIG, each=each)
    assert stop.value.code == 70
    assert all("rank 1" in text and "desync" in text for text in on_all(str(stop.value)))
    if rank == 0:
        events = journal.read(run_dir / "journal.jsonl").events
        (excluded,) = [event for event in events if event["event"] == "excluded"]
        assert (excluded["host"], excluded["device"]) == (socket.gethostname(), "cpu")
        assert [naming["rank"] for naming in excluded["namings"]] == [1, 1]
        assert [each.host for each in read_exclusions(events)] == [socket.gethostname()]


def window(folder: Path, rank: int, size: int) -> None:
    """Nothing is replicated: a change between two updates is found on the rank where it happened."""
    layout = Layout("fsdp", rank, size)
    config = {"integrity": {"replicas_every": 0, "between_updates_every": 1}}
    each = _once(rank == 1, lambda: flip(layout.model.down.weight.to_local()))
    run = Guarded(layout, folder / "window", config=config, each=each)
    dist.barrier()
    assert [o for o in run.outcomes if o[2] == "rolled_back"] == [(FLIP_STEP, 1, "rolled_back")], run.outcomes
    same(layout.state(), train_unguarded(Layout("fsdp", rank, size), 1.0, set()))
    if rank == 0:
        (finding,) = [e for e in run.events("finding") if e["kind"] == "silent_corruption"]
        assert finding["evidence"]["ranks"] == [1] and "model.down.weight" in finding["evidence"]["tensors"], finding


def gradient(folder: Path, rank: int, size: int) -> None:
    """One rank changes an averaged gradient: the update is applied on no rank, and the step is replayed."""
    layout = Layout("ddp", rank, size)
    each = _once(rank == 1, lambda: layout.model.module.down.weight.grad.mul_(3.0))
    run = Guarded(layout, folder / "gradient", config=CONFIG, each=each)
    dist.barrier()
    assert [o for o in run.outcomes if o[2] != "committed"] == [(FLIP_STEP, 1, "replayed")], run.outcomes
    same(layout.state(), train_unguarded(Layout("ddp", rank, size), 1.0, set()))
    if rank == 0:
        (finding,) = [e for e in run.events("finding") if e["kind"] == "desync"]
        assert finding["evidence"]["ranks"] == ([1] if size > 2 else [0, 1]), finding
