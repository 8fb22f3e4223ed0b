"""A stop by policy, and checkpoints by time, on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from layouts import GLOBAL, Guarded, Layout, on_all, same, train_unguarded

import holdfast
from holdfast.cli.ack import ack
from holdfast.core.base.clock import SystemClock
from holdfast.core.checkpoints.folder import Folder

BAD_STEP = 18
FAULT = {(BAD_STEP - 1) * GLOBAL + 3: "nan"}


def _config(gate: str, **checkpoint: Any) -> dict[str, Any]:
    return {
        "detect": {"gate": gate, "warmup_steps": 30},
        "recover": {"ladder": ["stop"]},
        "checkpoint": {"every_steps": 1000, "rank_timeout_seconds": 30, **checkpoint},
    }


def _checkpoints(run_dir: Path) -> dict[int, tuple[str, str]]:
    found = Folder(run_dir / "checkpoints").entries()
    return {e.step: (str(e.health), "" if e.manifest is None else e.manifest.reason) for e in found}


def kept(kind: str, folder: Path, rank: int, size: int, gate: str) -> None:
    """All ranks write the same snapshot, one that each of them holds and verifies, and resume there bit for bit."""
    optimizer = "adamw" if gate == "host" else "adamw_fused"
    run_dir = folder / f"kept-{gate}"

    def lose_the_newest(guard: Any, step: Any) -> None:
        if step.number == BAD_STEP and rank == size - 1:
            good = [s for s in guard._run.parts.snapshots.ring if s.health == "good"]
            assert good[-1].step == 12, [s.step for s in good]
            next(iter(good[-1].copy.tensors.values())).view(-1)[0] += 1.0

    with pytest.raises(holdfast.PolicyStop, match="step_00000008"):
        Guarded(Layout(kind, rank, size, optimizer), run_dir, faults=FAULT, config=_config(gate), each=lose_the_newest)
    dist.barrier()
    assert _checkpoints(run_dir) == {0: ("good", "start"), 8: ("good", "stop")}
    if rank == 0:
        ack(str(run_dir))
    dist.barrier()
    layout = Layout(kind, rank, size, optimizer)
    run = Guarded(layout, run_dir, config=_config(gate))
    assert run.outcomes[0][0] == 9 and run.guard.step == 20
    same(layout.state(), train_unguarded(Layout(kind, rank, size, optimizer), 1.0, set()))


class FastClock(SystemClock):
    """Runs a hundred thousand times as fast on rank 0, and stands still on the others."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def monotonic(self) -> float:  # type: ignore[override]
        return 1e5 * SystemClock.monotonic() if self._rank == 0 else 0.0


def timed(kind: str, folder: Path, rank: int, size: int, gate: str) -> None:
    """The clock of rank 0 decides, and every rank saves the same steps."""
    optimizer = "adamw" if gate == "host" else "adamw_fused"
    run_dir = folder / f"timed-{gate}"
    layout = Layout(kind, rank, size, optimizer)
    clock, holdfast.Guard._clock = holdfast.Guard._clock, FastClock(rank)
    try:
        run = Guarded(layout, run_dir, config=_config(gate, at_start=False, at_end=False, keep_last=100))
    finally:
        holdfast.Guard._clock = clock
    saved = on_all(sorted(record.step for record in run.guard._run.parts.checkpoints.records.values()))
    assert saved == [saved[0]] * size, saved
    assert len(saved[0]) >= 2 and set(saved[0]) == set(_checkpoints(run_dir)), saved
    same(layout.state(), train_unguarded(Layout(kind, rank, size, optimizer), 1.0, set()))


def everything(folder: Path, rank: int, size: int) -> None:
    for gate in ("host", "device"):
        kept(folder.name, folder, rank, size, gate)
        timed(folder.name, folder, rank, size, gate)
