"""A small collective of all ranks now and then: whether they still come to the same place, and within a bound.

It is launched by the training thread, at the same step on every rank, and never waited for there. Whether one is launched
depends on the step alone: a rank that left one out would meet the others' next collective with a different one of its own.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Ping(NamedTuple):
    """One that is under way: the how-manieth it is, on every rank alike."""

    nth: int
    step: int
    sum: Tensor
    work: Any


class Trouble(NamedTuple):
    """What is wrong with one; `late`: it is not complete in time."""

    ping: Ping
    why: str
    late: bool


class Pings:
    def __init__(self, size: int, timeout_seconds: float) -> None:
        self._size = size
        self._timeout = timeout_seconds
        self._pending: deque[Ping] = deque()
        self._since: float | None = None
        self.launched = 0

    def launch(self, step: int) -> None:
        """On the training thread."""
        ones = torch.ones(1, device=_device())
        work = dist.all_reduce(ones, async_op=True)
        self._pending.append(Ping(self.launched + 1, step, ones, work))
        self.launched += 1

    @property
    def under_way(self) -> bool:
        return bool(self._pending)

    def look(self, now: float) -> Trouble | None:
        """What is wrong with the oldest. They complete in order; those that are complete and right are forgotten."""
        while self._pending:
            ping = self._pending[0]
            if not ping.work.is_completed():
                if self._since is None:
                    self._since = now
                if now - self._since < self._timeout:
                    return None
                return Trouble(ping, f"is not complete after {self._timeout:g} s", True)
            try:
                ping.work.wait()
                total = _value(ping.sum)
            except RuntimeError as error:
                return Trouble(ping, f"has failed: {(str(error).splitlines() or ['no reason given'])[0]}", False)
            if total != self._size:
                return Trouble(ping, f"counted {total:g} of {self._size} ranks", False)
            self._pending.popleft()
            self._since = None
        return None

    def forget(self) -> None:
        self._pending.clear()


def _device() -> torch.device:
    """Where the default group's collectives want their tensors."""
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _value(complete: Tensor) -> float:
    """Read beside the training thread's own stream, which may have a step's work queued."""
    if not complete.is_cuda:
        return float(complete)
    aside: Any = torch.cuda.Stream(complete.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(aside):
        return float(complete)
