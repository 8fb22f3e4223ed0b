"""Trains ranks of which the last one hangs in the first attempt. Run it under torchrun, which restarts them.

    hang_program.py FOLDER FAULT [FLOOR_SECONDS]

FOLDER gets `fault`, the time of the fault, and `end-RANK.json`, the step that the last attempt reached.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast

FAULT_STEP, STEPS, BATCH = 200, 220, 2
"""by step 200 the sidecar runs, since a step takes longer if the floor is higher"""
STEP_SECONDS = 0.02
FOREVER = 600.0


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Loops forever in one sample, if it is asked to."""

    def __init__(self, size: int, bad: int, mark: Any) -> None:
        self.x = torch.randn(size, 4, generator=torch.Generator().manual_seed(1))
        self.bad, self.mark = bad, mark

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self.bad:
            self.mark()
            while True:  # the endless loop
                index += 1
        return self.x[index], self.x[index].sum(0, keepdim=True)


def hold_gil() -> None:
    """Call C code that sleeps and keeps the GIL."""
    ctypes.PyDLL(None).sleep(int(FOREVER))


def own_collectives(fault: str, is_bad: bool) -> None:
    """Make the two collectives of the loop itself, or make them wrong."""
    first, second = torch.ones(3), torch.ones(5)
    if fault == "shape" and is_bad:
        first = torch.ones(7)
    gathered = [torch.empty_like(second) for _ in range(dist.get_world_size())]
    if fault == "order" and is_bad:
        dist.all_gather(gathered, second)
        dist.all_reduce(first)
        return
    if not (fault == "left_out" and is_bad):
        dist.all_reduce(first)
    dist.all_gather(gathered, second)


def main(folder: Path, fault: str, floor: str = "2.0") -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rank, size = dist.get_rank(), dist.get_world_size()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    is_culprit = rank == size - 1 and attempt == 0

    def mark() -> None:
        (folder / "fault").write_text(str(time.time()))

    bad = BATCH * (FAULT_STEP - 1) * size + size - 1 if is_culprit and fault in ("loader", "worker") else -1
    data = Samples(STEPS * BATCH * size, bad, mark)
    sampler: Any = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=2 if fault == "worker" else 0)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    config = {
        "hang": {"floor_seconds": float(floor), "restart_seconds": float(floor) + 0.5},
        "checkpoint": {"every_steps": 50, "certify_after": 1},
        "liveness": {"every_steps": 0},
    }
    with holdfast.Guard(model, optimizer, run_dir=folder / "run", config=config) as guard:
        for step in guard.steps(loader, epochs=1):
            is_bad = is_culprit and step.number == FAULT_STEP
            with step:
                for x, y in step.microbatches():
                    time.sleep(STEP_SECONDS * max(1.0, float(floor) / 2))
                    if is_bad and fault not in ("loader", "worker"):
                        mark()
                    if is_bad and fault == "stop":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    elif is_bad and fault == "gil":
                        threading.Thread(target=hold_gil, daemon=True).start()
                    elif is_bad and fault == "forward":
                        time.sleep(FOREVER)
                    elif fault == "partition" and attempt == 0 and step.number > FAULT_STEP:
                        time.sleep(0.5)  # the test cuts the network now
                    if fault in ("left_out", "order", "shape"):
                        own_collectives(fault, is_bad)
                    step.backward(((model(x) - y) ** 2).mean())
    (folder / f"end-{rank}.json").write_text(json.dumps({"attempt": attempt, "step": int(guard.step)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
