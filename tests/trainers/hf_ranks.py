"""Runs the Hugging Face Trainer on two ranks, over gloo."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

FORK = multiprocessing.get_context("fork")


def ending(run: Any) -> dict[str, Any]:
    """What a rank ended as: its parameters, optimizer state, log, schedule and random state."""
    trainer = run.trainer

    def local(value: Any) -> Any:
        return value.to_local().clone() if hasattr(value, "to_local") else value

    return {
        "model": {name: local(value) for name, value in trainer.model.state_dict().items()},
        "optimizer": [{k: local(v) for k, v in state.items()} for state in trainer.optimizer.state.values()],
        "log": repr(run.log()),
        "schedule": trainer.lr_scheduler.state_dict()["last_epoch"],
        "random": [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()],
    }


def _rank_main(program: Callable[[Path], Any], folder: Path, rank: int, port: int, environment: dict[str, str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
        }
    )
    os.environ.update({"MASTER_PORT": str(port), **environment})
    for state in (AcceleratorState, PartialState, GradientState):  # of runs in the process that forked this one
        state._reset_state()
    torch.save(ending(program(folder)), folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


def run_on_two_ranks(program: Callable[[Path], Any], folder: Path, **environment: str) -> list[dict[str, Any]]:
    """Run a program on two ranks, and return what each ended as. The program returns a `Run`."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = [FORK.Process(target=_rank_main, args=(program, folder, r, port, environment)) for r in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0, 0], codes
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def assert_same_ending(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare two ranks bit for bit."""
    assert (one["log"], one["schedule"]) == (other["log"], other["schedule"])
    for name, value in one["model"].items():
        assert torch.equal(value, other["model"][name]), name
    for a, b in zip(one["optimizer"], other["optimizer"], strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)
    assert torch.equal(one["random"][0], other["random"][0])
    assert one["random"][1:] == other["random"][1:]
