"""Launches a small collective of all ranks every few steps, to detect ranks that no longer reach the same step in time.

The training thread launches it at the same step on every rank and never waits for it. The step alone decides whether to
launch: if one rank left a ping out, its next collective would pair with the others' ping.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.core.base.errors import first_line
from holdfast.distributed.world import collective_device


class Ping(NamedTuple):
    """One collective under way. `nth` counts pings and is equal on every rank."""

    nth: int
    step: int
    sum: Tensor
    work: Any


class PingProblem(NamedTuple):
    """Describes a ping that failed, counted wrong, or (`late`) is not complete in time."""

    ping: Ping
    why: str
    late: bool


class Pings:
    """Holds the pings under way."""

    def __init__(self, size: int, timeout_seconds: float) -> None:
        self._size = size
        self._timeout = timeout_seconds
        self._pending: deque[Ping] = deque()
        self._waiting_since: float | None = None
        self.launched = 0

    def launch(self, step: int) -> None:
        """Start a ping. Call it on the training thread."""
        ones = torch.ones(1, device=collective_device())
        work = dist.all_reduce(ones, async_op=True)
        self._pending.append(Ping(self.launched + 1, step, ones, work))
        self.launched += 1

    @property
    def any_pending(self) -> bool:
        return bool(self._pending)

    def check(self, now: float) -> PingProblem | None:
        """Drop the pings that are complete and correct. Return the problem of the first other one, if it has any yet."""
        while self._pending:
            ping = self._pending[0]
            if not ping.work.is_completed():
                if self._waiting_since is None:
                    self._waiting_since = now
                if now - self._waiting_since < self._timeout:
                    return None
                return PingProblem(ping, f"is not complete after {self._timeout:g} s", True)
            try:
                ping.work.wait()
                total = _read_on_side_stream(ping.sum)
            except RuntimeError as error:
                return PingProblem(ping, f"failed: {first_line(error)}", False)
            if total != self._size:
                return PingProblem(ping, f"counted {total:g} of {self._size} ranks", False)
            self._pending.popleft()
            self._waiting_since = None
        return None

    def clear(self) -> None:
        self._pending.clear()


def _read_on_side_stream(complete: Tensor) -> float:
    """Return the value. The training thread's own stream may hold a whole step of queued work, so do not wait for it."""
    if not complete.is_cuda:
        return float(complete)
    side_stream: Any = torch.cuda.Stream(complete.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side_stream):
        return float(complete)
