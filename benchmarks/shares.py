"""Measures a return to a snapshot of which each rank keeps a share, against a return to a checkpoint on disk.

    python -m benchmarks.shares [--mb 300] [--ranks 2] [--rounds 5]

Ranks of this machine train a replicated model over gloo, with room for shares only. Then they find the newest certified
snapshot and gather it, and find and read the newest good checkpoint, by turns; the fastest of each counts. The files are
in the page cache, so the disk itself is not measured: a disk is slower than this.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import holdfast
from benchmarks.checkpoint import Noise
from benchmarks.options import count, positive

WIDTH, STEPS = 512, 8


def train(rank: int, ranks: int, mb: float, rounds: int, folder: str) -> None:
    """Train, then measure on every rank; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    layers = max(ranks, round(mb * 1e6 / 12 / (WIDTH * WIDTH + WIDTH)))
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))))
    nbytes = 3 * sum(p.nbytes for p in model.parameters())
    config = {
        "snapshot": {"every_steps": 2, "certify_after": 1, "memory_gb": 1.9 * nbytes / 1e9},
        "checkpoint": {"every_steps": 2, "certify_after": 1},
    }
    guard = holdfast.Guard(model, torch.optim.AdamW(model.parameters()), run_dir=Path(folder, "run"), config=config)
    with guard:
        for step in guard.steps(DataLoader(Noise(), batch_size=4), max_steps=STEPS):
            with step:
                for batch in step.microbatches():
                    step.backward(model(batch[:, :WIDTH]).square().mean())
        parts = guard._run.parts
        snapshots, checkpoints = parts.snapshots, parts.checkpoints
        gather, read = [], []
        for _ in range(rounds):
            dist.barrier()
            began = time.perf_counter()
            found, _ = snapshots.find_restore_point(STEPS, STEPS)
            assert found is not None and found.share is not None
            snapshots.restorer.restore(found)
            gather.append(time.perf_counter() - began)
            dist.barrier()
            began = time.perf_counter()
            point, _ = checkpoints.find(snapshots, STEPS, STEPS)
            assert point is not None
            read.append(time.perf_counter() - began)
        kept = found.copy.buffer.layout.nbytes
    if rank == 0:
        seconds = [min(gather), min(read)]
        print(f"torch {torch.__version__}, {os.cpu_count()} cores, gloo, {ranks} ranks, {nbytes / 1e6:.0f} MB of state")
        print(
            f"a rank keeps {kept / 1e6:.1f} MB of a snapshot, {kept / nbytes:.3f} of it; 1/{ranks} is {1 / ranks:.3f}"
        )
        for name, each in zip(("gathered from shares", "read from the page cache"), seconds, strict=True):
            print(f"{name}: {each:.2f} s, {nbytes / each / 1e9:.2f} GB/s on each rank")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=positive, default=300.0, help="state of model and optimizer")
    parser.add_argument("--ranks", type=count, default=2)
    parser.add_argument("--rounds", type=count, default=5)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder = tempfile.mkdtemp()
    try:
        spawn = multiprocessing.get_context("spawn")
        work = [
            spawn.Process(target=train, args=(rank, options.ranks, options.mb, options.rounds, folder))
            for rank in range(options.ranks)
        ]
        for each in work:
            each.start()
        for each in work:
            each.join()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
