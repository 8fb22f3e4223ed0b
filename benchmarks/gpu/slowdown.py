"""Slows a training down in six ways, and checks that step, phase and cause are named.

From one step on: tensors are copied to the host, Python loops over tensors, the data loader is slow, one of two ranks is
throttled, shapes change under torch.compile, or a checkpoint competes for the disk. The program prints one line for each,
and exits with 1 if one is not found within 20 steps, or its phase or cause is wrong.

    python -m benchmarks.gpu.slowdown                  one CUDA device; two ranks share it over gloo
    python -m benchmarks.gpu.slowdown --device cpu     the same in small
    python -m benchmarks.gpu.slowdown --cases loop disk
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import holdfast
from benchmarks.blocks import say

ONSET, STEPS = 160, 190
WITHIN = 20
CASES = {
    "loader": ("input_bound", "data"),
    "copies": ("host_device_copies", "forward"),
    "loop": ("framework_overhead", "forward"),
    "shapes": ("recompilation_storm", "forward"),
    "disk": ("checkpoint_interference", "data"),
    "rank": ("one_slow_rank", "compute"),
}
"""fault -> its cause and its phase"""
WIDTH = {"cuda": 2048, "cpu": 256}
WORK_SECONDS, THROTTLED_SECONDS = 0.015, 0.06
"""a wait in the forward: other programs of a busy machine do not disturb it"""


class Disk:
    """A disk that serves one request after the other. A slow one takes long to sync a checkpoint, request by request."""

    def __init__(self) -> None:
        self.lock, self.is_slow, self._sync = threading.Lock(), False, os.fsync
        self.step = 0
        self.onset: int | None = None
        """the step during which the first slow request began"""

    def fsync(self, descriptor: int) -> None:
        self._sync(descriptor)
        for _ in range(40):
            if self.is_slow and threading.current_thread() is not threading.main_thread():
                self.onset = self.onset or self.step
                with self.lock:
                    time.sleep(0.06)
                time.sleep(0.001)


class Rows(Dataset[torch.Tensor]):
    def __init__(self, width: int) -> None:
        self.seconds, self.disk, self._width = 0.0, Disk(), width

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        if index % 16 == 0:  # the second read of a batch waits for a whole request
            with self.disk.lock:
                pass
        return torch.full((self._width,), float(index % 5))


def train(
    folder: Path,
    fault: str,
    *,
    device: str = "cpu",
    steps: int = STEPS,
    rank: int = 0,
    after_step: Callable[[int], None] = lambda number: None,
    **metrics: Any,
) -> tuple[list[dict[str, Any]], int]:
    """Train with a fault from step ONSET on. Return the findings of slowdowns, and the first step that was slow."""
    torch.manual_seed(0)
    width = WIDTH[device]
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(6))).to(device)
    runs: Any = DistributedDataParallel(model) if fault == "rank" else model
    compiled = torch.compile(model, backend="eager", dynamic=False) if fault == "shapes" else runs
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rows, large = Rows(width), torch.randn(1500, 1500, device=device)
    config = {
        "metrics": {"flush_seconds": 0.1, "profile": "on", **metrics},
        "hang": {"enabled": False},
        "checkpoint": {"every_steps": ONSET // 2},
    }
    with (
        torch._dynamo.config.patch(recompile_limit=1000),
        patch.object(os, "fsync", rows.disk.fsync),
        holdfast.Guard(runs, optimizer, run_dir=folder, config=config) as guard,
    ):
        for step in guard.steps(DataLoader(rows, batch_size=32), max_steps=steps):
            is_slow = step.number >= ONSET
            rows.disk.step = step.number
            rows.seconds = 0.002 if is_slow and fault == "loader" else 0.0
            rows.disk.is_slow = is_slow and fault == "disk" and step.number < steps
            with step:
                for batch in step.microbatches():
                    time.sleep(THROTTLED_SECONDS if is_slow and fault == "rank" and rank == 1 else WORK_SECONDS)
                    if is_slow and fault == "shapes":
                        batch = batch[: 2 + step.number % 30]
                    loss = (compiled(batch.to(device)) - 1).square().mean()
                    if is_slow and fault == "copies":
                        for _ in range(50):
                            large.to("cpu", copy=True)
                    if is_slow and fault == "loop":
                        total = torch.zeros((), device=device)
                        for _ in range(10_000):
                            total = total + 1
                    step.backward(loss)
            after_step(step.number)
    lines = (folder / "journal.jsonl").read_text().splitlines() if rank == 0 else []
    events = [json.loads(line) for line in lines]
    found = [event for event in events if event["event"] == "finding" and event["kind"] == "slowdown"]
    return found, rows.disk.onset or ONSET  # a checkpoint is written for some steps before the disk must sync it


def judge(fault: str, found: list[dict[str, Any]], onset: int) -> tuple[bool, str]:
    """Return whether a slowdown was found as it should be, and what was found."""
    near = [each["evidence"] for each in found if abs(each["onset"] - onset) <= 8]  # other programs may slow it too
    if not near:
        return False, f"{fault}: not found; other findings: {[each['onset'] for each in found]}"
    first = near[0]
    after, cause, phase = first["step"] - onset, first["slowdown_cause"], first["phase"]
    is_right = after <= WITHIN and (cause, phase) == CASES[fault] and (fault != "rank" or first["rank"] == 1)
    where = f", at {first['line']}" if first.get("line") else ""
    seen = "" if is_right else f"\n      {json.dumps(first)}"
    return (
        is_right,
        f"{fault}: since step {first['onset']}, found {after} steps after {onset}: {phase}, {cause}{where}{seen}",
    )


def _run_rank(rank: int, folder: str, device: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    found, _ = train(Path(folder) / "run", "rank", device=device, rank=rank)
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def run_case(fault: str, device: str) -> tuple[bool, str]:
    with tempfile.TemporaryDirectory() as folder:
        if fault != "rank":
            return judge(fault, *train(Path(folder), fault, device=device))
        torch.multiprocessing.spawn(_run_rank, (folder, device), nprocs=2)
        return judge(fault, json.loads((Path(folder) / "found.json").read_text()), ONSET)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; use --device cpu")
    is_right = True
    for fault in options.cases:
        is_this_right, text = run_case(fault, options.device)
        is_right = is_right and is_this_right
        say(f"{'ok   ' if is_this_right else 'WRONG'} {text}")
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
