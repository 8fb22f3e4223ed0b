"""Runs jobs of several ranks: imports once, which is slow, then forks one process for each request and one for each rank.

Reads one JSON request a line: {"folder", "log", "jobs", "environment"}. Answers with two lines: the process group that runs
it, then its exit status. The status is 1 as soon as a rank fails, even if other ranks still wait for it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SLOW_IMPORTS = ("holdfast.compose", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "pytest")


def rank_main(program: str, rank: int, size: int, folder: Path, rendezvous: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    subfolder, _, name = program.rpartition("/")
    module, _, function = name.rpartition(".")
    getattr(importlib.import_module(module), function)(folder / subfolder, rank, size)
    dist.destroy_process_group()


def fork(function: Callable[..., bool | None], *arguments: Any) -> int:
    """Call a function in a child process and return its pid. The child exits with 1 if the call raises or returns False."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        status = int(function(*arguments) is False)
    except BaseException:
        print(f"--- {function.__name__}{arguments}", traceback.format_exc(), file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def run_job(program: str, size: int, folder: Path, rendezvous: Path) -> bool:
    (folder / program.rpartition("/")[0]).mkdir(parents=True, exist_ok=True)
    importlib.import_module(program.rpartition("/")[2].rpartition(".")[0])  # once, and not in every child
    for rank in range(size):
        fork(rank_main, program, rank, size, folder, rendezvous)
    return all(os.waitstatus_to_exitcode(os.wait()[1]) == 0 for _ in range(size))


def run_request(request: dict[str, Any]) -> bool:
    """Run the jobs of a request one after the other, in a process group, with the output in its log."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(request["environment"])
    folder = Path(request["folder"])
    jobs = [job.split(":") for job in request["jobs"]]
    return all(run_job(name, int(size), folder, folder / f"rendezvous-{n}") for n, (name, size) in enumerate(jobs))


if __name__ == "__main__":
    for module in SLOW_IMPORTS:
        importlib.import_module(module)
    for line in sys.stdin:
        pid = fork(run_request, json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
