"""Shutdown on a signal: a flag for the training loop, and a deadline that holds even if the loop is stuck."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

from holdfast.core.base.errors import SetupError
from holdfast.resilience.deadline import REPEAT_SECONDS, Deadline, exit_now

log = logging.getLogger("holdfast")


class ShutdownHandler:
    """Sets a flag on SIGTERM and SIGUSR1; ends the process if the loop does not finish in time.

        handler = ShutdownHandler(timeout_sec=120)
        handler.register()
        for step in range(max_steps):
            train_step()
            if handler.should_shutdown():
                save_checkpoint()
                handler.finish()
                break

    timeout_sec: seconds from the first signal to a forced exit with status 75; 0 sets no deadline. Only `finish` cancels
    it, and `unregister` before any signal. A loop stuck in C code that holds the GIL is killed half a second later.
    signals: the signals to handle.
    A second signal exits at once. Repeats within 0.25 s are one signal: launchers and Slurm often deliver both.
    """

    _repeat_seconds = REPEAT_SECONDS

    def __init__(
        self, timeout_sec: float = 600.0, *, signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)
    ) -> None:
        if math.isnan(timeout_sec) or timeout_sec < 0:
            raise ValueError(f"timeout_sec is {timeout_sec}; give seconds, or 0 for no deadline")
        self._timeout_sec = float(timeout_sec)
        self._signals = tuple(signal.Signals(s) for s in signals)
        self._earlier: dict[signal.Signals, Any] = {}
        self._deadline: Deadline | None = None
        self._received_at: float | None = None
        self._signal_received: signal.Signals | None = None
        self._is_logged = False

    @property
    def shutdown_requested(self) -> bool:
        """Whether a shutdown signal has been received."""
        return self._received_at is not None

    @property
    def signal_received(self) -> signal.Signals | None:
        """The first shutdown signal, or None."""
        return self._signal_received

    @property
    def _timer(self) -> threading.Thread | None:
        return None if self._deadline is None else self._deadline.thread

    def should_shutdown(self) -> bool:
        """Return whether the training loop should save and end. Call it after each step."""
        if self._signal_received is not None and not self._is_logged:
            self._is_logged = True
            limit = f"; the process ends in {self._timeout_sec:g} s at the latest" if self._deadline else ""
            log.warning("holdfast: received %s: a shutdown is requested%s", self._signal_received.name, limit)
        return self.shutdown_requested

    def register(self) -> None:
        """Handle the signals from now on. Raise SetupError outside the main thread; a second call does nothing."""
        if not _in_main_thread():
            raise SetupError(
                f"ShutdownHandler.register() was called in thread {threading.current_thread().name!r}, but Python lets only "
                "the main thread handle signals: call it there, before starting threads"
            )
        if self._earlier or self._deadline is not None:
            return
        self._received_at = self._signal_received = None
        self._is_logged = False
        self._deadline = self._make_deadline()
        for each in self._signals:
            self._earlier[each] = signal.signal(each, self._handle_signal)
        _registered.add(self)
        log.info("holdfast: shutdown handler registered (%s)", ", ".join(s.name for s in self._signals))

    def _make_deadline(self) -> Deadline | None:
        if self._timeout_sec == 0:
            return None
        deadline = Deadline(self._timeout_sec, self._signals)
        if not deadline.survives_gil:
            log.warning("holdfast: the shutdown deadline cannot end a process that is stuck holding the GIL")
        return deadline

    def unregister(self) -> None:
        """Restore the earlier handlers. If a signal was received, the deadline stays until `finish`."""
        if not self._restore_handlers():
            return
        if self._deadline is not None and not self.shutdown_requested:
            self._deadline.cancel()
            self._close_deadline()

    def finish(self) -> None:
        """Cancel the deadline and restore the earlier handlers. Call it when everything is saved."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self._restore_handlers():
            self._close_deadline()
        if self.shutdown_requested:
            log.info("holdfast: shutdown finished")

    def _handle_signal(self, signum: int, frame: FrameType | None) -> None:
        # Only flags: logging or starting a thread here could deadlock with the code that was interrupted.
        now = time.monotonic()
        if self._received_at is None:
            self._signal_received = signal.Signals(signum)
            self._received_at = now
            if self._deadline is not None:
                self._deadline.confirm(signum)
        elif now - self._received_at >= (REPEAT_SECONDS if signum == signal.SIGINT else self._repeat_seconds):
            exit_now(f"a second signal came ({signal.Signals(signum).name})")

    def _restore_handlers(self) -> bool:
        """Return False outside the main thread, which cannot change handlers."""
        if not _in_main_thread():
            log.warning("holdfast: the earlier signal handlers stay replaced: call finish() in the main thread too")
            return False
        if self._deadline is not None:
            self._deadline.stop_listening()
        for each, handler in self._earlier.items():
            if signal.getsignal(each) == self._handle_signal:  # else another was set since: leave it
                # None: it was set by C code, which Python cannot restore.
                signal.signal(each, signal.SIG_DFL if handler is None else handler)
            for later in _registered:  # it would restore this one, which handles nothing any more
                if later._earlier.get(each) == self._handle_signal:
                    later._earlier[each] = handler
        self._earlier.clear()
        _registered.discard(self)
        return True

    def _close_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.close()
            self._deadline = None

    def _forget_in_child(self) -> None:
        """Undo the registration in a forked process, such as a loader worker."""
        if self._deadline is not None:
            self._deadline.forget_in_child()
            self._deadline = None
        self._restore_handlers()
        for each in self._signals:
            # Slurm and a terminal signal every process. A worker must outlive it; SIGTERM is how its parent ends it.
            if each is not signal.SIGTERM and signal.getsignal(each) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(each, signal.SIG_IGN)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_registered: weakref.WeakSet[ShutdownHandler] = weakref.WeakSet()


def _forget_all_in_child() -> None:
    for handler in list(_registered):
        handler._forget_in_child()


os.register_at_fork(after_in_child=_forget_all_in_child)
