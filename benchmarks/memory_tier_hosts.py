"""Measures what it takes to keep a state in the memory of two hosts: one write without a copy, one with, and a fetch.

    python -m benchmarks.memory_tier_hosts [--gb 0.5] [--rounds 3]

Two processes are the ranks, one for each host. Both are on this machine and connected by loopback, so they share its
cores and its memory. The tensors that a rank reads at the end are compared bit for bit with those that were written.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.options import count, positive
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.manifest import name_of
from holdfast.core.checkpoints.memory_folder import ROOT_VARIABLE
from holdfast.distributed.checkpoint.memory_store import MemoryCheckpointStore
from holdfast.distributed.checkpoint.replicated_store import ReplicatedMemoryStore
from holdfast.distributed.world import World
from holdfast.runtime.ports.checkpoint_store import CheckpointContents, CheckpointLabel, CopyInspection
from holdfast.runtime.tensors.inspect import checksums

RUN = "0" * 32
LABEL = CheckpointLabel("certified", False, Health.GOOD, "", {}, {})
PARTS = 16


class LoopbackStore(ReplicatedMemoryStore):
    """Connects hosts that are on one machine."""

    def _find_address(self) -> tuple[socket.AddressFamily, str]:
        return socket.AF_INET, "127.0.0.1"


def contents_of(step: int, tensors: dict[str, torch.Tensor]) -> CheckpointContents:
    inspection = CopyInspection(checksums(tensors), None, False)
    lineage = Lineage()
    return CheckpointContents(
        step, lineage, {}, tensors, lambda n: None, lambda: inspection, lambda n: False, lambda: None
    )


def measure_writes(store: MemoryCheckpointStore, tensors: dict[str, torch.Tensor], rounds: int) -> list[float]:
    """Write the state again and again; return the seconds of each write."""
    problem = store.attach(RUN, lambda: None, makes=True)
    assert problem is None, problem
    seconds = []
    for step in range(1, rounds + 1):
        dist.barrier()
        store.save(contents_of(step, tensors), LABEL)
        store.wait()
        event = store.events.popleft()
        assert event.status == "saved", event.why
        seconds.append(event.seconds)
        store.remove([name_of(step - 1, 0)] if step > 1 else [])
        store.wait()
        store.events.clear()
    return seconds


def run_rank(rank: int, folder: str, gb: float, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    world, run_dir = World.current(), Path(folder) / "run"
    generator = torch.Generator().manual_seed(0)
    tensors = {f"t{i}": torch.randn(int(gb * 1e9 / 4 / PARTS), generator=generator) for i in range(PARTS)}
    alone = measure(lambda: MemoryCheckpointStore(run_dir, world, 60), Path(folder) / "one", tensors, rounds)
    twice = measure(
        lambda: LoopbackStore(run_dir, world, 60, ["a", "b"]), Path(folder) / f"host-{rank}", tensors, rounds
    )
    if rank == 1:
        shutil.rmtree(Path(folder) / "host-1")
        (Path(folder) / "host-1").mkdir()
    dist.barrier()
    store = LoopbackStore(run_dir, world, 60, ["a", "b"])
    store.attach(RUN, lambda: None, makes=False)
    began = time.perf_counter()
    (entry,) = store.entries()
    fetched = time.perf_counter() - began
    restored = store.load(entry).tensors
    assert all(torch.equal(restored[name], tensor) for name, tensor in tensors.items()), "not what was written"
    store.close()
    store.delete(RUN)
    if rank == 0:
        print(f"torch {torch.__version__}, {os.cpu_count()} cores, 2 ranks, {gb} GB of state")
        print(f"a write on one host: {describe(alone)}; on two, each with all files: {describe(twice)}")
        print(f"a replaced host fetches and the other verifies the state in {fetched:.2f} s")
    dist.destroy_process_group()


def measure(
    make: Callable[[], MemoryCheckpointStore], shm: Path, tensors: dict[str, torch.Tensor], rounds: int
) -> list[float]:
    shm.mkdir(exist_ok=True)
    os.environ[ROOT_VARIABLE] = str(shm)
    store = make()
    seconds = measure_writes(store, tensors, rounds)
    store.close()
    dist.barrier()
    return seconds


def describe(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=positive, default=0.5, help="state of model and optimizer")
    parser.add_argument("--rounds", type=count, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        (Path(folder) / "run").mkdir()
        mp.spawn(run_rank, (folder, options.gb, options.rounds), nprocs=2)


if __name__ == "__main__":
    main()
