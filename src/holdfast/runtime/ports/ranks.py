"""Defines how a run communicates with its other ranks. `holdfast.distributed` implements it; one process needs no peers.

Every rank makes the same calls in the same order. A healthy step needs one collective, `all_gather_rows`. The others
exchange JSON values at the start and end of a run, and values or tensors when something goes wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from holdfast.core.hang.heartbeat import COLLECTIVE, Heartbeat


class Ranks(Protocol):
    """Communicates with the ranks that train together."""

    rank: int
    size: int

    def supports_device(self, device: torch.device) -> bool:
        """Return whether `all_gather_rows` takes a tensor on `device` without blocking the host."""

    def all_gather_rows(self, row: Tensor) -> Tensor:
        """Return the float64 rows of all ranks in rank order, as (size, len(row)) on the device of `row`, bit for bit.
        On a GPU the call is only enqueued: the host does not wait."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks in rank order."""

    def broadcast_object(self, value: Any) -> Any:
        """Return the value of rank 0."""

    def broadcast_tensors(self, tensors: Sequence[Tensor], source: int) -> None:
        """Write the values of rank `source`'s tensors into those of the other ranks, bit for bit. Shapes and dtypes must
        be equal on every rank; devices may differ."""


class SingleRank:
    """Implements Ranks for one process."""

    rank = 0
    size = 1

    def supports_device(self, device: torch.device) -> bool:
        return True

    def all_gather_rows(self, row: Tensor) -> Tensor:
        return row.unsqueeze(0)

    def all_gather_object(self, value: Any) -> list[Any]:
        return [self.broadcast_object(value)]

    def broadcast_object(self, value: Any) -> Any:
        return json.loads(json.dumps(value))

    def broadcast_tensors(self, tensors: Sequence[Tensor], source: int) -> None:
        pass


class MonitoredRanks:
    """Reports each exchange of objects to the watchdog, which finds exchanges that not every rank will join."""

    def __init__(self, ranks: Ranks, watchdog: Callable[[], RankWatchdog], heartbeat: Heartbeat) -> None:
        self._ranks, self._watchdog, self._heartbeat = ranks, watchdog, heartbeat
        self.rank, self.size = ranks.rank, ranks.size

    def supports_device(self, device: torch.device) -> bool:
        return self._ranks.supports_device(device)

    def all_gather_rows(self, row: Tensor) -> Tensor:
        return self._ranks.all_gather_rows(row)

    def all_gather_object(self, value: Any) -> list[Any]:
        with self._exchange():
            return self._ranks.all_gather_object(value)

    def broadcast_object(self, value: Any) -> Any:
        with self._exchange():
            return self._ranks.broadcast_object(value)

    def broadcast_tensors(self, tensors: Sequence[Tensor], source: int) -> None:
        with self._exchange():
            self._ranks.broadcast_tensors(tensors, source)

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        watchdog = self._watchdog()
        watchdog.begin_exchange()
        before = self._heartbeat.enter(COLLECTIVE)
        yield
        self._heartbeat.enter(before)
        watchdog.end_exchange()  # after an error, report_failure follows instead


class RankWatchdog(Protocol):
    """Ends the process when this rank waits for one that will never come. Its work runs outside the training thread."""

    def start(self) -> None:
        """Begin watching: the run is open on this rank."""

    def enter_step(self, step: int) -> None:
        """Note that the training thread is in the forward or backward pass of `step`."""

    def leave_step(self) -> None:
        """Note that the training thread is between two steps."""

    def begin_exchange(self) -> None:
        """Note that the training thread waits for all other ranks to join an exchange of objects."""

    def end_exchange(self) -> None:
        """Note that the exchange is complete."""

    def ping(self, step: int) -> None:
        """Launch a small collective with a time limit every [liveness] every_steps steps. All ranks call it in each step."""

    def report_failure(
        self, error: BaseException, step: int, where: str, *, gives_up: bool = False, split: int = 0
    ) -> None:
        """Report to the other ranks, which may wait for this one, that it cannot continue. Takes at most a few seconds.

        gives_up: the run must not be restarted.
        split: memory ran out, and the next processes are to split every micro-batch into so many parts.
        """

    def wait_for_others_to_finish(self, step: int) -> None:
        """Report that this rank left its loop after `step` committed steps. Wait, with a time limit, for the others."""

    def close(self, *, may_restart: bool = False) -> None:
        """Stop watching. may_restart: the process ends with an error, and a launcher may start the ranks again."""


class NoWatchdog:
    """Implements RankWatchdog for one process, which waits for no other."""

    def start(self) -> None: ...
    def enter_step(self, step: int) -> None: ...
    def leave_step(self) -> None: ...
    def begin_exchange(self) -> None: ...
    def end_exchange(self) -> None: ...
    def ping(self, step: int) -> None: ...
    def report_failure(
        self, error: BaseException, step: int, where: str, *, gives_up: bool = False, split: int = 0
    ) -> None: ...
    def wait_for_others_to_finish(self, step: int) -> None: ...
    def close(self, *, may_restart: bool = False) -> None: ...


class LateWatchdog:
    """Creates the watchdog when the run opens: only then are all ranks known to be there."""

    def __init__(self, make: Callable[[], RankWatchdog]) -> None:
        self._make = make
        self._watchdog: RankWatchdog = NoWatchdog()

    def get(self) -> RankWatchdog:
        """Return the watchdog; before `start`, one that does nothing."""
        return self._watchdog

    def start(self) -> None:
        """Create the watchdog and begin watching."""
        self._watchdog = self._make()
        self._watchdog.start()
