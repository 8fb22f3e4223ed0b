"""Ranks with room for exactly two copies of their state: a fault on one rank, and all return exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from agreement_programs import OPTIMIZER, NanGradientOnce
from layouts import QUICK, Guarded, Layout, on_all, same, train_unguarded

from holdfast.core.base.types import Health

FAULT_STEP = 14


def room_for_two(folder: Path, rank: int, size: int) -> None:
    """The last rank has room for two, or for two shares. The fault does not come back: all is as before."""
    kind, gate, *shared = folder.name.split("-")
    optimizer = OPTIMIZER[gate]
    snapshot: dict[str, Any] = {**QUICK["snapshot"], "certify_after": 2, "memory_gb": 1.0}
    snapshot["shared"] = "auto" if shared else "off"
    config = {"detect": {"gate": gate, "warmup_steps": 8}, "recover": {"ladder": ["rollback", "stop"]}}
    probe = Guarded(Layout(kind, rank, size, optimizer), folder / "probe", config={**config, "snapshot": snapshot})
    parts = probe.guard._run.parts
    layout = parts.snapshots.ring.snapshots[-1].copy.buffer.layout
    nbytes = layout.nbytes
    if shared:
        nbytes = parts.snapshots._shares.sizes(probe.guard._run.context.state.update_tensors(), layout)[1]
    if rank == size - 1:
        snapshot = {**snapshot, "memory_gb": (2 * nbytes + 1) / 1e9}
    recover = {"ladder": ["rollback", "stop"], "rollback_margin": 1, "probation_steps": 20}
    layout = Layout(kind, rank, size, optimizer)
    fault = NanGradientOnce(layout, FAULT_STEP)
    held: list[list[int]] = []

    def each(guard: Any, step: Any) -> None:
        snapshots = guard._run.parts.snapshots
        held.append([s.step for s in snapshots.ring])
        assert snapshots._copier.count("update_tensors", on_host=True) <= 2
        assert len(held) < 3 or any(s.health is Health.GOOD for s in snapshots.ring), held
        fault(guard, step)

    run = Guarded(layout, folder / "run", config={**config, "snapshot": snapshot, "recover": recover}, each=each)
    assert run.guard._run.parts.snapshots.ring.max_snapshots() == 2
    assert [o for o in run.outcomes if o[2] != "committed"] == [(FAULT_STEP, 1, "rolled_back")], run.outcomes
    assert on_all(held) == [held] * size, on_all(held)
    same(layout.state(), train_unguarded(Layout(kind, rank, size, optimizer), 1.0, set()))
    dist.barrier()
    if rank == 0:
        (back,) = (e for e in run.events("action") if e["action"] == "rollback")
        assert FAULT_STEP - 9 <= back["to_step"] < FAULT_STEP, back
        notes = [e["message"] for e in run.events("note") if "in the making" in e.get("message", "")]
        assert notes and notes[-1].startswith(f"rank {size - 1}: a snapshot takes ") and "2 fit" in notes[-1], notes
