"""Jobs one after the other: imports once, which is what takes long, then forks one process a rank for each.

Ends with status 1 as soon as a rank fails, whatever the others of its job wait for.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import programs
import torch
import torch.distributed as dist
import worlds


def rank_main(program: str, rank: int, size: int, folder: Path, meeting: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    place, _, name = program.rpartition("/")
    module, _, function = name.rpartition(".")
    known = importlib.import_module(module) if module else programs if hasattr(programs, name) else worlds
    getattr(known, function)(folder / place, rank, size)
    dist.destroy_process_group()


def start(program: str, rank: int, size: int, folder: Path, meeting: Path) -> None:
    """Fork one rank. It never returns from here in the child."""
    if os.fork():
        return
    status = 1
    try:
        rank_main(program, rank, size, folder, meeting)
        status = 0
    except BaseException:
        print(f"--- rank {rank} of {size}", traceback.format_exc(), file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def job(program: str, size: int, folder: Path, meeting: Path) -> bool:
    (folder / program.rpartition("/")[0]).mkdir(exist_ok=True)
    module = program.rpartition("/")[2].rpartition(".")[0]
    if module:
        importlib.import_module(module)  # once, and not in every child
    for rank in range(size):
        start(program, rank, size, folder, meeting)
    return all(os.waitstatus_to_exitcode(os.wait()[1]) == 0 for _ in range(size))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    jobs = [words.split(":") for words in sys.argv[2:]]
    done = all(job(name, int(size), place, place / f"meeting-{n}") for n, (name, size) in enumerate(jobs))
    sys.exit(0 if done else 1)
