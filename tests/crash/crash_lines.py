"""The lines of Holdfast that a process runs; at a chosen one it is killed, or a KeyboardInterrupt is raised.

A site is a line and the thread that runs it, such as "main core/decide/engine.py:120". An interrupt is raised in the main
thread, as Python's own handler of Ctrl-C does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import holdfast

_HOME = str(Path(holdfast.__file__).parent) + "/"
KILL, INTERRUPT = "KILL", "INTERRUPT"


def applies(how: str, site: str) -> bool:
    return how == KILL or site.startswith("main ")


def first_line(function: FunctionType) -> str:
    """Return the site of the first line that a function runs in the main thread."""
    code = function.__code__
    line = min(line for _, _, line in code.co_lines() if line and line > code.co_firstlineno)
    return f"main {code.co_filename.removeprefix(_HOME)}:{line}"


class Lines:
    """From `install` on every line of Holdfast is counted by its site; the nth run of `site` is met with `how`.

    With a site only that line is watched, so that the process is hardly slower.
    """

    def __init__(self, tell: Callable[[str], None], *, how: str = "", site: str = "", nth: int = 1) -> None:
        self._tell, self._how, self._nth, self._site = tell, how, nth, site
        self._thread, _, place = site.partition(" ")
        name, _, line = place.partition(":")
        self._file, self._line = _HOME + name, int(line or 0)
        self._main: Counter[tuple[str, int]] = Counter()
        self._other: Counter[tuple[str, int]] = Counter()
        self._seen = 0

    @property
    def sites(self) -> dict[str, int]:
        """Return how often each line was run, if no site was chosen."""
        threads = (("main", self._main), ("other", self._other))
        return {f"{t} {file[len(_HOME) :]}:{line}": n for t, c in threads for (file, line), n in c.items() if n}

    def install(self) -> None:
        enter = self._enter_watched if self._site else self._enter
        threading.settrace(enter)
        sys.settrace(enter)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_HOME):
            return None
        is_main = threading.current_thread() is threading.main_thread()
        return self._count_main if is_main else self._count_other

    def _count_main(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._main[frame.f_code.co_filename, frame.f_lineno] += event == "line"
        return self._count_main

    def _count_other(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._other[frame.f_code.co_filename, frame.f_lineno] += event == "line"
        return self._count_other

    def _enter_watched(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._watch if frame.f_code.co_filename == self._file else None

    def _watch(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and frame.f_lineno == self._line:
            is_main = threading.current_thread() is threading.main_thread()
            if is_main != (self._thread == "main"):
                return self._watch
            self._seen += 1
            if self._seen == self._nth:
                self._tell(f"{self._site}, number {self._nth}")
                if self._how == INTERRUPT:
                    raise KeyboardInterrupt
                os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()
        return self._watch
