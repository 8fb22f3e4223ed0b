"""Accelerate's own loop in several processes: killed and resumed, and on two ranks."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

import torch
import torch.distributed as dist
from accelerate_case import AccelerateCase, ending
from cases import _equal
from test_exact import at, quick, without

from marks import slow

FORK = multiprocessing.get_context("fork")


def nan(x: torch.Tensor) -> torch.Tensor:
    return x * float("nan")


def killed_loop(case: AccelerateCase, path: Path, at_batch: int, at_end: Path) -> None:
    """Train; die in the forward of a batch of this process."""
    drawn = 0

    def die(prepared: Any) -> None:
        nonlocal drawn
        drawn += 1
        if drawn == at_batch:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save(ending(case.guarded(path, before_step=die)), at_end)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return _equal(a, b)


OTHER_WAYS = [
    {"augment": True},
    {"augment": True, "accumulate": 5},
    {"augment": True, "shuffle": "unique_generator"},
    {"augment": True, "seedable": True, "shuffle": "global"},
    {"augment": True, "workers": 2},
    {"augment": True, "precision": "fp16"},
]


@pytest.mark.shows("accelerate", "killed")
@pytest.mark.parametrize(
    ("way", "kills"), [({"augment": True, "epochs": 3}, [20]), *slow(*[(way, None) for way in OTHER_WAYS])], ids=str
)
def test_killed_and_resumed_it_ends_as_if_it_never_was(way, kills, tmp_path):
    case = AccelerateCase(**{"shuffle": "unique", "epochs": 6, **way})
    case.config = quick() | {"checkpoint": {"every_steps": 3, "certify_after": 2, "keep_last": 3}}
    excluded = None
    if case.shuffle == "unique":
        case.faults = at(case, 9, how=nan)
        excluded = without(case, *(range(5, 10) if case.accumulate == 5 else [9]))
    dice, end = random.Random(5), tmp_path / "end.pt"
    begin = 8 if case.accumulate == 1 else 30  # later than the first good checkpoint of a process
    kills = [dice.randint(begin, begin + 15) for _ in range(20)] if kills is None else [*kills, -1]
    processes = 0
    for batch in kills:
        processes += 1
        process = FORK.Process(target=killed_loop, args=(case, tmp_path / "run", batch, end))
        process.start()
        process.join(60)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert processes > 1 and end.exists()
    saved, plain = torch.load(end, weights_only=False), ending(case.plain(excluded))
    del saved["losses"], plain["losses"]
    for name in plain:
        assert same(saved[name], plain[name]), name


def on_rank(case: AccelerateCase, rank: int, folder: Path, at_batch: int | None) -> None:
    """Train on one of two ranks: die in the forward of a batch, or go on to the end and compare with the reference."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous-{at_batch}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    if at_batch is not None:
        killed_loop(case, folder / "run", at_batch, folder / "end.pt")
    guarded = case.guarded(folder / "run")
    excluded = without(case, *([9] if case.split else [8, 9])) if case.faults else None
    saved, plain = ending(guarded), ending(case.plain(excluded))
    if len(saved["losses"]) != len(plain["losses"]):  # the guarded run met a fault, or began in another process
        del saved["losses"], plain["losses"]
    for name in plain:
        assert same(saved[name], plain[name]), f"{name} differs on rank {rank}"
    dist.destroy_process_group()


RANK_WAYS = [
    {"augment": True, "accumulate": 2},
    {"augment": True, "workers": 2},
    {"shuffle": "none"},
    {"augment": True, "shuffle": "unique"},
    {"augment": True, "shuffle": "unique", "split": True},
]


@pytest.mark.slow
@pytest.mark.shows("accelerate", "ranks")
@pytest.mark.parametrize("way", RANK_WAYS, ids=str)
def test_two_ranks_end_as_the_reference(way, tmp_path):
    """Killed once and resumed. One rank meets a NaN: the batches of both ranks in that step are left out."""
    case = AccelerateCase(epochs=3, count=144, **way)
    case.config = quick() | {"checkpoint": {"every_steps": 3, "certify_after": 2}}
    if case.shuffle == "unique":
        case.faults = at(case, 9, how=nan)
    for at_batch, exits in ((24, [-signal.SIGKILL] * 2), (None, [0, 0])):
        ranks = [FORK.Process(target=on_rank, args=(case, rank, tmp_path, at_batch)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(90)
        assert [process.exitcode for process in ranks] == exits
