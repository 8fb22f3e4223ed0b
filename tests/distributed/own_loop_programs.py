"""Loops of the user's own on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from layouts import GLOBAL, QUICK, Layout, loss_of, on_all, same, train_unguarded

import holdfast


def train(kind: str, how: str, run_dir: Path, rank: int, size: int, faults: dict[int, str]) -> tuple[Layout, Any]:
    """Train one epoch: `classic` with guard.step(loss), `wrap` with the lines of the unguarded loop."""
    layout = Layout(kind, rank, size)
    if how == "wrap":
        guard = holdfast.Guard.wrap(layout.model, layout.optimizer, run_dir=run_dir, config=QUICK)
    else:
        guard = holdfast.Guard(layout.model, layout.optimizer, clip_grad_norm=1.0, run_dir=run_dir, config=QUICK)
    with guard:
        for batch in guard.data(layout.loader(faults)):
            loss = loss_of(layout.model, batch)
            loss.backward()
            if how == "classic":
                guard.step(loss)
            else:
                layout.clip(1.0)
                layout.optimizer.step()
                layout.optimizer.zero_grad()
    return layout, guard


def exact(folder: Path, rank: int, size: int) -> None:
    """No fault: the unguarded loop. A NaN in the data of the last rank: the loop without that step, on every rank."""
    kind, how = folder.name.split("-")
    layout, guard = train(kind, how, folder / "calm", rank, size, {})
    same(layout.state(), train_unguarded(Layout(kind, rank, size), 1.0, set()))
    assert guard.summary().status == "clean"
    dist.barrier()
    layout, guard = train(kind, how, folder / "nan", rank, size, {6 * GLOBAL + size - 1: "nan"})
    same(layout.state(), train_unguarded(Layout(kind, rank, size), 1.0, {7}))
    assert on_all((int(guard.step), guard.summary().skipped)) == [(19, 1)] * size
