"""The ranks of a run: how many there are, which one this is, and plain values told from one to the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.core.base.errors import HoldfastError


class World:
    """The ranks that run together. What is told is JSON, never a pickle; NaN and Infinity pass.

    Every rank must make the same calls in the same order, and on one group from one thread only: a thread beside the
    training one takes a world of its own (`apart`). Where a rank does not come, the others get a HoldfastError, after
    `seconds` where they are given, otherwise after the group's own timeout. The group is not to be used after that.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank = rank
        self.size = size
        self._group = group

    @staticmethod
    def is_joined() -> bool:
        """Whether this process has joined a group, be it of one."""
        return dist.is_available() and dist.is_initialized()

    @classmethod
    def current(cls) -> World:
        """The ranks of torch.distributed's default group if it is initialised, else one rank."""
        if cls.is_joined():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    def apart(self, seconds: float = 600) -> World:
        """The same ranks on a gloo group of their own, for calls from another thread. Every rank must call it."""
        if self.size == 1:
            return World()
        group = self._bounded(
            "make a group", lambda: dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        )
        return World(self.rank, self.size, group)

    def broadcast_object(self, value: Any, seconds: float | None = None) -> Any:
        """Rank 0's value, on every rank. What the others pass is not looked at."""
        if self.size == 1:
            return json.loads(json.dumps(value))
        told = _encode(value) if self.rank == 0 else None
        length = self._tensor([0 if told is None else len(told)], torch.int64)
        self._wait("share", lambda: dist.broadcast(length, 0, group=self._group, async_op=True), seconds)
        content = torch.empty(int(length), dtype=torch.uint8) if told is None else _bytes(told)
        content = content.to(self._device)
        self._wait("share", lambda: dist.broadcast(content, 0, group=self._group, async_op=True), seconds)
        return _decode(content)

    def all_gather_object(self, value: Any, seconds: float | None = None) -> list[Any]:
        """The values of all ranks, in the order of ranks, on every rank."""
        if self.size == 1:
            return [json.loads(json.dumps(value))]
        told = _encode(value)
        lengths = [self._tensor([0], torch.int64) for _ in range(self.size)]
        mine = self._tensor([len(told)], torch.int64)
        self._wait("gather", lambda: dist.all_gather(lengths, mine, group=self._group, async_op=True), seconds)
        longest = max(int(n) for n in lengths)
        padded = _bytes(told + bytes(longest - len(told))).to(self._device)
        values = [torch.empty_like(padded) for _ in range(self.size)]
        self._wait("gather", lambda: dist.all_gather(values, padded, group=self._group, async_op=True), seconds)
        return [_decode(content[: int(n)]) for content, n in zip(values, lengths, strict=True)]

    def supports_device(self, device: torch.device) -> bool:
        """Whether the group's collectives take tensors that lie there, and leave the host free: gloo takes a GPU's too, but
        over the host, which waits."""
        if self.size == 1:
            return True
        backend = _backends(self._group).get(device.type)
        return backend is not None and (device.type == "cpu" or backend != "gloo")

    def all_gather_rows(self, row: Tensor) -> Tensor:
        """One row of every rank, in the order of ranks: (size, len(row)), bit for bit, where `row` lies."""
        found = torch.empty(self.size * len(row), dtype=row.dtype, device=row.device)
        self._bounded("agree", lambda: _gather_rows(found, row, group=self._group))
        return found.view(self.size, -1)

    def barrier(self, seconds: float) -> None:
        """Returns when every rank has come here; HoldfastError where one has not after `seconds`."""
        if self.size == 1:
            return
        within = timedelta(seconds=seconds)
        if dist.get_backend(self._group) == "gloo":  # it says which rank is missing
            self._bounded("meet", lambda: dist.monitored_barrier(self._group, within, wait_all_ranks=True))
        else:
            self._wait("meet", lambda: dist.barrier(group=self._group, async_op=True), seconds)

    @property
    def _device(self) -> torch.device:
        """Where the group's collectives want their tensors."""
        if "nccl" in dist.get_backend(self._group):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def _tensor(self, values: list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)

    def _wait(self, doing: str, begin: Callable[[], Any], seconds: float | None) -> None:
        def whole() -> None:
            work = begin()
            work.wait() if seconds is None else work.wait(timedelta(seconds=seconds))

        self._bounded(doing, whole)

    def _bounded(self, doing: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            why = (str(error).splitlines() or ["no reason given"])[0][:300]
            raise HoldfastError(
                f"rank {self.rank} of {self.size} could not {doing} with the others: {why}; "
                "see the log of the rank that is missing"
            ) from error


_gather_rows: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""one name of it in older versions of torch, another in newer ones"""


def _backends(group: Any) -> dict[str, str]:
    """Which backend a group has for each kind of device, as in "cpu:gloo,cuda:nccl"."""
    return dict(each.split(":", 1) for each in dist.get_backend_config(group).split(","))


def _encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _decode(content: Tensor) -> Any:
    return json.loads(bytes(content.cpu().numpy()))
