"""Runs jobs one after the other: imports once, which is slow, then forks one process for each rank of each job.

Exits with status 1 as soon as a rank fails, without waiting for the others.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def rank_main(program: str, rank: int, size: int, folder: Path, rendezvous: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    subfolder, _, name = program.rpartition("/")
    module, _, function = name.rpartition(".")
    getattr(importlib.import_module(module), function)(folder / subfolder, rank, size)
    dist.destroy_process_group()


def start(program: str, rank: int, size: int, folder: Path, rendezvous: Path) -> None:
    """Fork one rank. It never returns in the child."""
    if os.fork():
        return
    status = 1
    try:
        rank_main(program, rank, size, folder, rendezvous)
        status = 0
    except BaseException:
        print(f"--- rank {rank} of {size}", traceback.format_exc(), file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def job(program: str, size: int, folder: Path, rendezvous: Path) -> bool:
    (folder / program.rpartition("/")[0]).mkdir(exist_ok=True)
    importlib.import_module(program.rpartition("/")[2].rpartition(".")[0])  # once, and not in every child
    for rank in range(size):
        start(program, rank, size, folder, rendezvous)
    return all(os.waitstatus_to_exitcode(os.wait()[1]) == 0 for _ in range(size))


if __name__ == "__main__":
    root = Path(sys.argv[1])
    jobs = [argument.split(":") for argument in sys.argv[2:]]
    succeeded = all(job(name, int(size), root, root / f"rendezvous-{n}") for n, (name, size) in enumerate(jobs))
    sys.exit(0 if succeeded else 1)
