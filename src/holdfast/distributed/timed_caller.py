"""Runs calls that may block forever with a time limit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class CallTimeout(Exception):
    """A call did not return in time. It may still be running."""


class TimedCaller:
    """Runs calls on its own thread, one at a time."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T], seconds: float) -> T:
        """Return or raise what `function` does. CallTimeout if it, or the call before it, takes longer than `seconds`."""
        if not self._idle.wait(seconds):
            raise CallTimeout
        results: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                results.append(function())
            except Exception as error:
                errors.append(error)

        self._idle.clear()
        self._calls.put(run)
        if not self._idle.wait(seconds):
            raise CallTimeout
        if errors:
            raise errors[0]
        return results[0]

    def close(self, seconds: float = 1.0) -> None:
        """Stop the thread and wait up to `seconds`: an interpreter that exits during a C++ call may abort."""
        self._calls.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            self._idle.set()


def call_with_timeout(function: Callable[[], Any], seconds: float) -> bool:
    """Run `function` on a new thread, since a disk or pipe may block it. Return whether it finished in time."""
    thread = threading.Thread(target=function, name="holdfast-call", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads, or the interpreter is shutting down
        function()
        return True
    thread.join(seconds)
    return not thread.is_alive()
