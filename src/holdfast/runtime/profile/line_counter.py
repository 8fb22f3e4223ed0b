"""Count the calls into torch by the line of the user's program that makes them, for the length of one step."""

from __future__ import annotations

import os
import sys
from collections import Counter
from types import FrameType
from typing import Any

from torch import Tensor

_READS = frozenset(
    ("cpu", "item", "tolist", "numpy", "to", "cuda", "__float__", "__int__", "__bool__", "__array__", "copy_")
)
_NOT_USERS = ("/site-packages/", "/dist-packages/", "/torch/", "<frozen", "<string>", "/lib/python")
_GUARDS = ("/holdfast/core/", "/holdfast/runtime/", "/holdfast/distributed/")
_MAX_FRAMES = 60


class LineCounter:
    """Uses the interpreter's profile function of this thread. Does nothing if there is one already."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self._is_on, self._process = False, 0

    def start(self) -> None:
        if sys.getprofile() is None:
            self._is_on, self._process = True, os.getpid()
            sys.setprofile(self._on_event)

    def stop(self) -> None:
        if self._is_on:
            self._is_on = False
            if sys.getprofile() == self._on_event:
                sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call":
            return
        if os.getpid() != self._process:  # a worker that was forked meanwhile
            sys.setprofile(None)
            return
        is_tensors = isinstance(getattr(function, "__self__", None), Tensor)
        if not is_tensors and not str(getattr(function, "__module__", "") or "").startswith("torch"):
            return
        line = _user_line(frame)
        if line is not None:
            self.calls[line] += 1
            if is_tensors and function.__name__ in _READS:
                self.copies[line] += 1


def _user_line(frame: FrameType | None) -> str | None:
    """Return the innermost line of the user's program; None for a call that the guard makes."""
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return None
        name = frame.f_code.co_filename
        if any(part in name for part in _GUARDS):
            return None
        if not any(part in name for part in _NOT_USERS):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def new_lines(before: Counter[str], after: Counter[str], steps_before: int = 1, steps_after: int = 1) -> list[str]:
    """Return the lines with more calls in a step than before, most first."""
    grown = {line: count / steps_after - before[line] / steps_before for line, count in after.items()}
    return [line for line, more in sorted(grown.items(), key=lambda item: -item[1]) if more >= 1][:5]
