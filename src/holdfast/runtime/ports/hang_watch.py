"""Defines how a run is watched for hangs from outside its process. `holdfast.supervise` implements it."""

from __future__ import annotations

from typing import Protocol

from holdfast.core.hang.heartbeat import Heartbeat


class HangWatch(Protocol):
    """Shares the heartbeat of a run with a process that outlives a stuck one."""

    def prepare(self) -> None:
        """Make this process able to print its stacks, and with it the loader workers that it forks from now on."""

    def start_if_due(self, heartbeat: Heartbeat) -> str | None:
        """Begin to watch once the run has trained for a while. Call it between two steps, every few steps.

        Return a message, once, if the run cannot be watched.
        """

    def close(self) -> None:
        """Stop watching: the run ends."""


class NoHangWatch:
    """Implements HangWatch for a run that is not watched."""

    def prepare(self) -> None: ...
    def start_if_due(self, heartbeat: Heartbeat) -> str | None:
        return None

    def close(self) -> None: ...
