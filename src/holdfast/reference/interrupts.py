"""Ctrl-C: the first ends a run after the current step, the second at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.compose import Guard

INTERRUPTED = "interrupted"


@contextmanager
def stops_at_interrupt(guard: Guard) -> Iterator[None]:
    """The first Ctrl-C ends the run after the current step, whole and resumable; the second ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        guard.stop(INTERRUPTED)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def leave_interrupts_to_the_trainer(worker: int) -> None:
    """A terminal sends Ctrl-C to the loader's processes too: they must go on until the current step has its data."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
