"""Trains ranks of which one raises while the others wait for it. Run it under torchrun, which restarts all of them."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts import Layout, loss_of

import holdfast

FIRST_FAULT_STEP = 6


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken in backward")


REASONS = {"same": [ValueError("row 7 is bad")] * 9, "other": [ValueError("one"), KeyError("two"), ValueError("three")]}


def main(folder: Path, kind: str, reasons: str = "") -> None:
    """Fail in the first attempt in forward on rank 1, in the second in backward on rank 0, in the third in the update.

    reasons: fail in forward of rank 1 at the same step in each attempt, for the same reason or another one each time.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, size = dist.get_rank(), dist.get_world_size()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    layout = Layout(kind, rank, size)
    where, culprit = {0: ("forward", 1), 1: ("backward", 0), 2: ("update", 1)}.get(attempt, ("nowhere", -1))
    breaks, when = rank == culprit, FIRST_FAULT_STEP + 4 * attempt
    failures = REASONS.get(reasons, [])
    if reasons:
        where, when, breaks = "forward", 12, rank == 1 and attempt < len(failures)

    def update(*_: Any) -> None:
        if breaks and guard.step == when - 1:
            moment(folder, where)
            raise ValueError("broken in the update")

    if where == "update":
        layout.optimizer.register_step_pre_hook(update)
    config = {
        "checkpoint": {"every_steps": 2, "certify_after": 1, "rank_timeout_seconds": 30},
        "liveness": {"poll_seconds": 0.1},
    }
    guard = holdfast.Guard(layout.model, layout.optimizer, clip_grad_norm=1.0, run_dir=folder / "run", config=config)
    with guard:
        for step in guard.steps(layout.loader(), epochs=1):
            bad = breaks and step.number == when
            with step:
                for batch in step.microbatches():
                    if bad and where == "forward":
                        moment(folder, where)
                        raise failures[attempt] if reasons else ValueError("broken in forward")
                    loss = loss_of(layout.model, batch)
                    if bad and where == "backward":
                        moment(folder, where)
                        loss = Raises.apply(loss)
                    step.backward(loss)
    state = [t.tolist() for t in layout.state()]
    (folder / f"end-{rank}.json").write_text(json.dumps({"attempt": attempt, "step": guard.step, "state": state}))
    dist.destroy_process_group()


def moment(folder: Path, where: str) -> None:
    (folder / f"raised-{where}").write_text(str(time.time()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
