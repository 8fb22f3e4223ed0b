"""Defines how a run learns that a signal asks it to end. `holdfast.resilience` implements it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class ShutdownSignals(Protocol):
    """Receives signals from `register` to `finish`, and ends a process that does not end in time."""

    reason: str | None
    """which signal was received; the run reads it before every step"""

    def register(
        self, last_resort: Callable[[], str | None], is_saving: Callable[[], bool], step: Callable[[], int]
    ) -> None:
        """Receive signals. Does nothing outside the main thread.

        last_resort: called on another thread when half of the time is over. It saves what it can without the training
        thread and returns what it saved, or None. The process then ends.
        step: the number of committed steps. If it changes, the training thread runs, and with it its signal handlers.
        """

    def finish(self) -> None:
        """Cancel the deadline: everything is saved. Signals do what they did before."""


class NoSignals:
    """Implements ShutdownSignals for a run that saves nothing."""

    reason: str | None = None

    def register(
        self, last_resort: Callable[[], str | None], is_saving: Callable[[], bool], step: Callable[[], int]
    ) -> None: ...
    def finish(self) -> None: ...
