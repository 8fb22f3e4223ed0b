"""The processes of a run: joined into one group, each with its device, and what they tell one another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.core.base.errors import ConfigError
from holdfast.distributed.world import World


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Inside, the processes that torchrun has started are one group. One process, or a group that is there already, is left
    as it is."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or dist.is_initialized():
        yield
        return
    chosen = device_of(device, several=True)
    try:
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    except (ValueError, RuntimeError) as error:
        why = (str(error).splitlines() or ["no reason given"])[0]
        raise ConfigError(
            [f"WORLD_SIZE = {size} is set, and the ranks could not meet: {why}; start them with torchrun"], "train"
        ) from None
    yield
    # Only at an orderly end: after an error of this rank's own the others may be amid a collective, and be waited for.
    dist.destroy_process_group()


def world() -> tuple[int, int]:
    """How many ranks there are, and which one this is."""
    here = World.current()
    return here.size, here.rank


def device_of(name: str, *, several: bool) -> torch.device:
    """Where this process trains. Of several, each has the GPU of its number on this machine."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(['[train] device = "cuda": no GPU is to be seen; set it to "auto" or "cpu"'], "train")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if not several:
        return torch.device("cuda")
    number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= count:
        raise ConfigError(
            [
                f"rank {number} of this machine has no GPU of its own, there are {count}: start {count} processes, or fewer"
            ],
            "train",
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def mean(value: Tensor) -> Tensor:
    """The mean over all ranks, to the same bits on each."""
    total = value.double()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def first_ranks(value: Any) -> Any:
    """The first rank's value, on every rank: one message struct."""
    return msgspec.convert(World.current().broadcast_object(msgspec.to_builtins(value)), type(value))
