"""The invariants, one function each. Each takes an empty folder and a setting, raises AssertionError if it fails, and
returns what it checked."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.recipe import GLOBAL, STEPS, Setting, Training, same
from holdfast.distributed.world import World

FAULT_STEP = 15
COUNT_AFTER = 6
"""synchronisations are counted after this step"""


def harmless(folder: Path, setting: Setting, mirrored: bool = False) -> str:
    for clip in (0.5, None):
        run = Training(setting).guarded(folder / f"clip-{clip}", clip=clip, mirrored=mirrored)
        assert run.guard.step == STEPS and not run.not_committed(), run.outcomes
        same(run.training, Training(setting).bare(clip))
    return f"{STEPS} steps, clipped and not"


def skipped(folder: Path, setting: Setting, mirrored: bool = False) -> str:
    for fault, clip in (("nan", 1.0), ("huge", None)):
        bad = (FAULT_STEP - 1) * GLOBAL + 1  # rank 1 reads it, if there is one
        run = Training(setting).guarded(folder / fault, faults={bad: fault}, clip=clip, mirrored=mirrored)
        assert (FAULT_STEP, "skipped") in run.outcomes, (fault, run.outcomes)
        barrier()
        without = run.excluded()
        assert without == {FAULT_STEP}, without
        same(run.training, Training(setting).bare(clip, without=without))
        if dist.get_world_size() > 1 and dist.get_rank() == 0:
            actions = run.events("action")
            assert [action["action"] for action in actions] == ["replay", "skip"], actions
            assert actions[1]["ranks"] == [1], actions
    return "a NaN and a huge gradient"


def rolled_back(folder: Path, setting: Setting, mirrored: bool = False) -> str:
    recover = {"ladder": ["rollback", "stop"], "rollback_margin": 1, "skip_batches": 2, "lr_factor": 1.0}
    config = {"recover": {**recover, "probation_steps": 6}}
    faults = {(FAULT_STEP - 1) * GLOBAL + 1: "nan"}
    run = Training(setting).guarded(folder, faults=faults, config=config, mirrored=mirrored)
    assert (FAULT_STEP, "rolled_back") in run.outcomes, run.outcomes
    barrier()
    without = run.excluded()
    assert FAULT_STEP in without and len(without) == 2, without
    same(run.training, Training(setting).bare(without=without))
    return f"steps {sorted(without)} left out"


def bit_flip(folder: Path, setting: Setting, replicas: bool = False) -> str:
    """Flip a bit between two updates, on the last rank, once. With `replicas` it is found by comparing ranks, otherwise by
    comparing checksums between updates."""
    every = {"replicas_every": 1 if replicas else 0, "between_updates_every": 0 if replicas else 1}
    training = Training(setting)
    flipped: list[int] = []

    def flip(number: int) -> None:
        if number == FAULT_STEP and not flipped and dist.get_rank() == dist.get_world_size() - 1:
            flipped.append(number)
            training.flip()

    run = training.guarded(folder, config={"integrity": every}, inside=flip)
    assert run.not_committed()[:1] == [(FAULT_STEP, "rolled_back")], run.outcomes
    same(training, Training(setting).bare())
    kind = "desync" if replicas else "silent_corruption"
    barrier()
    if dist.get_rank() == 0:
        (finding,) = [e for e in run.events("finding") if e["kind"] == kind]
        assert any("blocks.1.up.weight" in name for name in finding["evidence"]["tensors"]), finding
    return f"found in step {FAULT_STEP}, healed"


def resumed(folder: Path, setting: Setting) -> str:
    config = {"checkpoint": {"every_steps": 3, "certify_after": 2}}
    for stop, first in ((9, 1), (10, 10), (None, 11)):
        run = Training(setting).guarded(folder, config=config, max_steps=stop)
        assert run.outcomes[0][0] == first, run.outcomes
    same(run.training, Training(setting).bare())
    return "three processes, ended after steps 9 and 10"


def synchronisations(folder: Path, setting: Setting, mirrored: bool = False) -> str:
    """Count implicit synchronisations on the training thread, as torch reports them, over whole steps."""
    with SyncCounter() as bare:
        Training(setting).bare(each=bare.after)
    with SyncCounter() as ours:
        Training(setting).guarded(folder, each=ours.after, mirrored=mirrored)
    limit = bare.count + (0 if setting.gate == "device" else STEPS - COUNT_AFTER)
    assert ours.count <= limit, f"{ours.count} guarded, {bare.count} bare: {ours.places}"
    counted = f"{ours.count} in {STEPS - COUNT_AFTER} steps, bare {bare.count}"
    return counted + (f", at {', '.join(ours.places)}" if ours.places else "")


class SyncCounter:
    """Counts the synchronisations of the steps after COUNT_AFTER, inside a `with`."""

    def __enter__(self) -> SyncCounter:
        self._catcher = warnings.catch_warnings(record=True)
        self._warnings: Any = self._catcher.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        torch.ones((), device="cuda").item()
        torch.cuda.set_sync_debug_mode("default")
        assert self._places(), "the counter counts nothing"
        self._warnings.clear()
        return self

    def after(self, number: int) -> None:
        if number == COUNT_AFTER:
            torch.cuda.set_sync_debug_mode("warn")
        elif number == STEPS:
            torch.cuda.set_sync_debug_mode("default")

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self._catcher.__exit__(None, None, None)
        self.places, self.count = sorted(set(self._places())), len(self._places())

    def _places(self) -> list[str]:
        return [f"{Path(w.filename).name}:{w.lineno}" for w in self._warnings if "synchronizing" in str(w.message)]


def rows_on_nccl(folder: Path, setting: Setting) -> str:
    """Check a step's one collective: every bit of a row comes back, and the host does not wait."""
    pattern = torch.tensor([0x7FF8000000000123, -1, 1, 1 << 62, 0x7FF0000000000000], device=setting.device)
    row = pattern.view(torch.float64)
    World(0, 1).all_gather_rows(row)
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows = World(0, 1).all_gather_rows(row)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert rows.shape == (1, 5) and torch.equal(rows[0].view(torch.int64), pattern), rows
    return "NaN payloads kept, no synchronisation"


def gloo_gates_on_the_host(folder: Path, setting: Setting) -> str:
    """Check two processes on one GPU: gloo gathers rows on the host, so the host decides even with a fused optimizer."""
    world = World.current()
    assert (
        world.size == 2
        and world.supports_device(torch.device("cpu"))
        and not world.supports_device(torch.device("cuda"))
    )
    run = Training(setting).guarded(folder, max_steps=2)
    internals: Any = run.guard._run
    assert not internals.parts.gate.on_device
    return "the host gate is chosen for a fused optimizer"


def barrier() -> None:
    """Wait until rank 0 has written its files."""
    if dist.get_world_size() > 1:
        dist.barrier()
