"""The signals that end a guarded run."""

from __future__ import annotations

import importlib.metadata
import math
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from holdfast.core.base.config import ShutdownSection
from holdfast.resilience.deadline import Deadline, exit_now
from holdfast.resilience.elastic import seconds_left
from holdfast.resilience.signal_handler import ShutdownHandler

_USUAL_SECONDS = 120.0
_KILL_SECONDS = 30.0
"""torchrun and Slurm kill a process this long after SIGTERM, unless they are set otherwise"""
_TORCHRUN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_MOST_SECONDS = 600.0
_MARGIN_SECONDS = 5.0


class RunSignals(ShutdownHandler):
    """Implements ShutdownSignals. Signals that the program handles itself are left to it.

    A run that was never closed hands them over to the next one, and is not kept in memory by them.
    """

    _repeat_seconds = 5.0
    """Slurm signals every process, and torchrun then signals its ranks again"""

    def __init__(self, config: ShutdownSection) -> None:
        super().__init__(config.deadline_seconds, signals=[signal.Signals[name] for name in config.signals])
        self._wanted = self._signals
        self._is_enabled = config.enabled
        self.reason: str | None = None
        self._on_ended_child: Any = None
        """the handler of SIGCHLD, which is put back at the end"""

    def register(  # type: ignore[override]
        self, last_resort: Callable[[], str | None], is_saving: Callable[[], bool], step: Callable[[], int]
    ) -> None:
        if not self._is_enabled or threading.current_thread() is not threading.main_thread():
            return
        self._signals = tuple(s for s in self._wanted if _is_free(s))
        self._last_resort, self._is_saving = weakref.WeakMethod(last_resort), is_saving
        self._step = step
        if self._signals:
            super().register()

    def finish(self) -> None:
        if self._deadline is not None:
            super().finish()
        if self._on_ended_child is not None:
            signal.signal(signal.SIGCHLD, self._on_ended_child)
            self._on_ended_child = None

    def _make_deadline(self) -> Deadline:
        return Deadline(
            self._seconds_after,
            self._signals,
            repeat_seconds=self._repeat_seconds,
            last_resort=self._end_without_training_thread,
            is_saving=self._is_saving,
            is_handled=lambda signum: (
                self._last_resort() is not None and signal.getsignal(signum) == self._handle_signal
            ),
            step=self._step,
        )

    def _seconds_after(self, signum: int) -> float:
        """Return how long the process may take to end after a signal."""
        if self._timeout_sec > 0:
            return self._timeout_sec
        left = seconds_left()
        until_killed = math.inf if left is None else left
        if signum == signal.SIGTERM and left is not None:
            until_killed = min(left, _KILL_SECONDS)
        elif signum == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ:
            until_killed = _torchrun_seconds()
        elif left is not None and {"TORCHELASTIC_RUN_ID", _TORCHRUN_VARIABLE} <= os.environ.keys():
            until_killed = min(left, _torchrun_seconds())  # who sets the time lets torchrun handle the signal, too
        if until_killed == math.inf:
            return _USUAL_SECONDS
        return max(1.0, min(_MOST_SECONDS, until_killed - _MARGIN_SECONDS))

    def _handle_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._last_resort() is None:  # the run was dropped without being closed: the signal is not for it
            self.finish()
            os.kill(os.getpid(), signum)
            return
        super()._handle_signal(signum, frame)
        if self.reason is None:
            self.reason = f"received {signal.Signals(signum).name}"
            # Slurm ends the workers of a loader too, and torch's handler would raise an error out of any line, such as one
            # that saves.
            self._on_ended_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _end_without_training_thread(self) -> None:
        save = self._last_resort()
        saved = None if save is None else save()
        if saved is not None:
            exit_now(f"{self.reason}, and no step ended in time; {saved}")


def _torchrun_seconds() -> float:
    """Return how long torchrun waits for its ranks. A --shutdown-timeout on its command line is not known here."""
    if importlib.metadata.version("torch").startswith("2.11."):  # the only supported one where it cannot be set
        return _KILL_SECONDS
    try:
        return float(os.environ[_TORCHRUN_VARIABLE])
    except (KeyError, ValueError):
        return _KILL_SECONDS


def _is_free(each: signal.Signals) -> bool:
    """Return whether the program has no handler of its own. A shell starts background jobs with SIGINT ignored.

    At a prompt and in a notebook, Ctrl-C interrupts what was typed last, whatever runs are open.
    """
    if each is signal.SIGINT and (hasattr(sys, "ps1") or "ipykernel" in sys.modules):
        return False
    handler = signal.getsignal(each)
    if isinstance(getattr(handler, "__self__", None), RunSignals):
        return True
    ignored = () if each is signal.SIGINT else (signal.SIG_IGN,)
    return handler in (signal.SIG_DFL, signal.default_int_handler, *ignored)
