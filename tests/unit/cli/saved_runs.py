"""Makes run directories with checkpoints, by real Guards. One of them kills its process."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.runtime.checkpoint.manager import CheckpointManager

BATCH = 4


class RollBackOnce:
    """Rolls back to a given step at the first incident, and ends the run there."""

    def __init__(self, to: int, *, stop: bool = True) -> None:
        self._to, self._stop = to, stop
        self._guard: Any = None

    def on_train_begin(self, guard: Any) -> None:
        self._guard = guard

    def on_instability(self, incident: Any) -> holdfast.Plan:
        return holdfast.Plan(actions=(holdfast.Rollback(before=self._to, at_latest=self._to),))

    def on_recovery(self, outcome: Any) -> None:
        if self._stop:
            self._guard.stop("a person wants to look")


class SaveTwice:
    """Saves after a step, draws from the random stream, and saves again: one step, two states."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._guard: Any = None

    def on_train_begin(self, guard: Any) -> None:
        self._guard = guard

    def between(self, step: int) -> None:
        if step == self._at:
            self._guard.checkpoint("before")
            torch.rand(1)
            self._guard.checkpoint("after")


def train(
    run_dir: Path, steps: int, *, bad_step: int | None = None, hooks: tuple[Any, ...] = (), **checkpoint: Any
) -> None:
    """A small model, a checkpoint every ten steps, good after two. The batch of `bad_step` is NaN."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(BATCH * 200, 8, generator=generator)
    y = x.sum(1, keepdim=True).sin()
    if bad_step is not None:
        x[BATCH * (bad_step - 1) : BATCH * bad_step] = float("nan")
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    config = {
        "checkpoint": {"every_steps": 10, "certify_after": 2, "keep_last": 20, **checkpoint},
        "snapshot": {"every_steps": 5, "certify_after": 2},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", holdfast.HoldfastWarning)
        guard = holdfast.Guard(
            model, torch.optim.AdamW(model.parameters(), 1e-3), run_dir=run_dir, config=config, hooks=list(hooks)
        )
        with guard:
            for step in guard.steps(DataLoader(TensorDataset(x, y), BATCH), max_steps=steps):
                with step:
                    for batch, target in step.microbatches():
                        step.backward(torch.nn.functional.mse_loss(model(batch), target))
                for hook in hooks:
                    getattr(hook, "between", lambda step: None)(step.number)
                _settle(guard)


def _settle(guard: Any) -> None:
    """Wait for the disk, so that the moment a checkpoint becomes good does not depend on the machine."""
    book = guard._run.parts.checkpoints
    if book.store is not None:
        book.store.wait()
        book.poll()


def straight(run_dir: Path) -> None:
    """One branch: steps 0, 10, 20 and 30 are good; 35 was saved at the end."""
    train(run_dir, 35)


def forked(run_dir: Path) -> None:
    """Two processes; the second resumes from 35, trains to 65 and rolls back to 40, abandoning 50.b1 and 60.b1."""
    train(run_dir, 35)
    train(run_dir, 100, bad_step=66, hooks=(RollBackOnce(45),), at_end=False)


def killed_in_rollback(run_dir: Path) -> None:
    """As `forked`, but the process dies when the rollback is in the journal and nothing else of it is done."""

    def die(self: CheckpointManager, why: str) -> None:
        if "rollback" in why:
            os.kill(os.getpid(), signal.SIGKILL)
        quarantine_abandoned(self, why)

    train(run_dir, 35)
    quarantine_abandoned = CheckpointManager.quarantine_abandoned
    CheckpointManager.quarantine_abandoned = die  # type: ignore[method-assign]
    train(run_dir, 100, bad_step=66, hooks=(RollBackOnce(45),), at_end=False)


KINDS = {"straight": straight, "forked": forked, "killed": killed_in_rollback}
