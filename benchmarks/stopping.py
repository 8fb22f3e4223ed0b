"""When to stop: the time budget is used up, or a signal asked for it. The results so far are printed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Patience:
    """How long to go on. `told`: nothing further begins, not even a block; `over`: no further case and no further round."""

    def __init__(self, budget: float | None = None) -> None:
        self._ends = None if budget is None else time.monotonic() + budget
        self.told = False

    def over(self) -> bool:
        return self.told or (self._ends is not None and time.monotonic() > self._ends)


@contextmanager
def asked_to_stop(patience: Patience) -> Iterator[None]:
    """A first SIGTERM, as from `timeout`, or Ctrl-C says so; a second one ends the process as ever."""
    before: dict[int, Any] = {}

    def give_back() -> None:
        while before:
            signal.signal(*before.popitem())

    def stop(number: int, frame: Any) -> None:
        patience.told = True
        give_back()
        os.write(2, b"asked to stop: what has been measured follows\n")

    if threading.current_thread() is threading.main_thread():
        before.update({each: signal.signal(each, stop) for each in (signal.SIGTERM, signal.SIGINT)})
    try:
        yield
    finally:
        give_back()
