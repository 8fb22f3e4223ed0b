"""The invariants, one function each. All take a folder of their own and a setting; all assert."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.recipe import GLOBAL, STEPS, Setting, Training, same
from holdfast.distributed.world import World

WHEN = 15
"""the step something happens in"""
SETTLED = 6
"""the step from which on synchronisations are counted"""


def harmless(folder: Path, setting: Setting, mirrored: bool = False) -> str:
    for clip in (0.5, None):
        run = Training(setting).guarded(folder / f"clip-{clip}", clip=clip, mirrored=mirrored)
        assert run.guard.step == STEPS and not run.not_committed(), run.outcomes
        same(run.training, Training(setting).bare(clip))
    return f"{STEPS} steps, clipped and not"


def skipped(folder: Path, setting: Setting, mirrored: bool = False) -> str:
    for fault in ("nan", "spike"):
        bad = (WHEN - 1) * GLOBAL + 1  # dealt out to rank 1 where there is one
        run = Training(setting).guarded(folder / fault, faults={bad: fault}, mirrored=mirrored)
        assert (WHEN, "skipped") in run.outcomes, (fault, run.outcomes)
        barrier()
        without = run.excluded()
        assert without == {WHEN}, without
        same(run.training, Training(setting).bare(without=without))
        if dist.get_world_size() > 1 and dist.get_rank() == 0:
            (action,) = run.events("action")
            assert action["ranks"] == [1], action
    return "a NaN, and a spike"


def rolled_back(folder: Path, setting: Setting, mirrored: bool = False) -> str:
    recover = {"ladder": ["rollback", "stop"], "rollback_margin": 1, "skip_batches": 2, "lr_factor": 1.0}
    config = {"recover": {**recover, "probation_steps": 6}}
    faults = {(WHEN - 1) * GLOBAL + 1: "nan"}
    run = Training(setting).guarded(folder, faults=faults, config=config, mirrored=mirrored)
    assert (WHEN, "rolled_back") in run.outcomes, run.outcomes
    barrier()
    without = run.excluded()
    assert WHEN in without and len(without) == 2, without
    same(run.training, Training(setting).bare(without=without))
    return f"steps {sorted(without)} left out"


def bit_flip(folder: Path, setting: Setting, replicas: bool = False) -> str:
    """Between two updates, on the last rank, once. `replicas`: found by comparing ranks, otherwise by the window."""
    every = {"replicas_every": 1 if replicas else 0, "between_updates_every": 0 if replicas else 1}
    training = Training(setting)
    flipped: list[int] = []

    def flip(number: int) -> None:
        if number == WHEN and not flipped and dist.get_rank() == dist.get_world_size() - 1:
            flipped.append(number)
            training.flip()

    run = training.guarded(folder, config={"integrity": every}, inside=flip)
    assert run.not_committed()[:1] == [(WHEN, "rolled_back")], run.outcomes
    same(training, Training(setting).bare())
    kind = "desync" if replicas else "silent_corruption"
    barrier()
    if dist.get_rank() == 0:
        (found,) = [e for e in run.events("finding") if e["kind"] == kind]
        assert any("blocks.1.up.weight" in name for name in found["evidence"]["tensors"]), found
    return f"found in step {WHEN}, healed"


def resumed(folder: Path, setting: Setting) -> str:
    config = {"checkpoint": {"every_steps": 3, "certify_after": 2}}
    for stop, began in ((9, 1), (10, 10), (None, 11)):
        run = Training(setting).guarded(folder, config=config, max_steps=stop)
        assert run.outcomes[0][0] == began, run.outcomes
    same(run.training, Training(setting).bare())
    return "three lives, ended after steps 9 and 10"


def synchronisations(folder: Path, setting: Setting, mirrored: bool = False) -> str:
    """Implicit ones on the training thread, as torch counts them, over whole steps."""
    with counted() as bare:
        Training(setting).bare(each=bare.after)
    with counted() as ours:
        Training(setting).guarded(folder, each=ours.after, mirrored=mirrored)
    most = bare.count + (0 if setting.gate == "device" else STEPS - SETTLED)
    assert ours.count <= most, f"{ours.count} guarded, {bare.count} bare: {ours.said}"
    per = STEPS - SETTLED
    return f"{ours.count} in {per} steps, bare {bare.count}" + (f", at {', '.join(ours.said)}" if ours.said else "")


class counted:
    """Counts the synchronisations of the steps after SETTLED, inside a `with`."""

    def __enter__(self) -> counted:
        self._caught = warnings.catch_warnings(record=True)
        self._seen: Any = self._caught.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        torch.ones((), device="cuda").item()
        torch.cuda.set_sync_debug_mode("default")
        assert self._found(), "the counter sees nothing"
        self._seen.clear()
        return self

    def after(self, number: int) -> None:
        if number == SETTLED:
            torch.cuda.set_sync_debug_mode("warn")
        elif number == STEPS:
            torch.cuda.set_sync_debug_mode("default")

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self._caught.__exit__(None, None, None)
        self.said, self.count = sorted(set(self._found())), len(self._found())

    def _found(self) -> list[str]:
        return [f"{Path(w.filename).name}:{w.lineno}" for w in self._seen if "synchronizing" in str(w.message)]


def rows_on_nccl(folder: Path, setting: Setting) -> str:
    """The one collective of a step: every bit of a row comes back, and the host does not wait."""
    pattern = torch.tensor([0x7FF8000000000123, -1, 1, 1 << 62, 0x7FF0000000000000], device=setting.device)
    row = pattern.view(torch.float64)
    World(0, 1).all_gather_rows(row)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = World(0, 1).all_gather_rows(row)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.shape == (1, 5) and torch.equal(found[0].view(torch.int64), pattern), found
    return "NaN payloads kept, no synchronisation"


def gloo_does_not_carry(folder: Path, setting: Setting) -> str:
    """Two processes on one GPU: the rows go over the host, and so the host decides, fused optimizer or not."""
    world = World.current()
    assert (
        world.size == 2
        and world.supports_device(torch.device("cpu"))
        and not world.supports_device(torch.device("cuda"))
    )
    run = Training(setting).guarded(folder, max_steps=2)
    gated: Any = run.guard._run
    assert not gated.gate.on_device
    return "the host gate is chosen for a fused optimizer"


def barrier() -> None:
    """What the first rank wrote is there for the others."""
    if dist.get_world_size() > 1:
        dist.barrier()
