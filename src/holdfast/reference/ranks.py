"""The process group and device of each rank, and the collectives that the trainer needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.core.base.errors import ConfigError, first_line
from holdfast.distributed.world import World


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Initialize the process group of the ranks that torchrun started; do nothing for one process or an existing group.

    Raises ConfigError if the ranks cannot connect.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or dist.is_initialized():
        yield
        return
    chosen = select_device(device, is_distributed=True)
    try:
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    except (ValueError, RuntimeError) as error:
        reason = first_line(error)
        raise ConfigError(
            [f"WORLD_SIZE = {size} is set, but the ranks could not connect: {reason}; start them with torchrun"],
            "train",
        ) from None
    yield
    # Not after an error: the other ranks may be inside a collective, and destroying the group would wait for them.
    dist.destroy_process_group()


def world_size_and_rank() -> tuple[int, int]:
    current = World.current()
    return current.size, current.rank


def select_device(name: str, *, is_distributed: bool) -> torch.device:
    """Return the device of this process: of several ranks, each gets the GPU with its local rank.

    Raises ConfigError if there is no such GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(['[train] device = "cuda": torch sees no GPU; set it to "auto" or "cpu"'], "train")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if not is_distributed:
        return torch.device("cuda")
    local_rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= gpus:
        raise ConfigError(
            [f"local rank {local_rank} has no GPU: this machine has {gpus}; start at most {gpus} processes on it"],
            "train",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def mean_over_ranks(value: Tensor) -> Tensor:
    """Return the mean over all ranks, with the same bits on each."""
    total = value.double()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def broadcast_from_rank_0(value: Any) -> Any:
    """Return rank 0's `value` on every rank; `value` is a msgspec struct."""
    return msgspec.convert(World.current().broadcast_object(msgspec.to_builtins(value)), type(value))
