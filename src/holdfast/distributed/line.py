"""Calls that may block for ever, made so that nobody waits for them longer than it likes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Unanswered(Exception):
    """A call has not come back yet."""


class Line:
    """Makes calls on a thread of its own, one at a time, so that who asks waits no longer than it likes."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def ask(self, call: Callable[[], T], seconds: float) -> T:
        """What `call` returns or raises; Unanswered where it, or one before it, has not come back in time."""
        if not self._idle.wait(seconds):
            raise Unanswered
        answer: list[T] = []
        error: list[Exception] = []

        def whole() -> None:
            try:
                answer.append(call())
            except Exception as raised:
                error.append(raised)

        self._idle.clear()
        self._calls.put(whole)
        if not self._idle.wait(seconds):
            raise Unanswered
        if error:
            raise error[0]
        return answer[0]

    def close(self, seconds: float = 1.0) -> None:
        """An interpreter that ends while a thread is inside a call of C++ may be aborted: that is waited for, a little."""
        self._calls.put(None)
        self._thread.join(seconds)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            self._idle.set()


def bounded(call: Callable[[], Any], seconds: float) -> bool:
    """Make the call on a thread of its own: a disk or a pipe that blocks holds nobody up. Whether it has come back."""
    thread = threading.Thread(target=call, name="holdfast-bounded", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads, or the interpreter is ending
        call()
        return True
    thread.join(seconds)
    return not thread.is_alive()
