"""Measures how long a restart took, from the start of the process to the first committed step, in parts."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from holdfast.core.base import durable

log = logging.getLogger("holdfast")

_LABELS = {
    "start": "start and imports",
    "groups": "process groups and model",
    "restore": "restore",
    "first_step": "first step",
}
_PROCESS_FIELDS, _START_FIELD = ")", 19
"""in /proc/self/stat: what ends the name of the process, and the place of its start after that"""


def _seconds_since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


_imported_at = _seconds_since_boot()
"""when `import holdfast` ran, which most programs do after they have imported torch"""
_import_seconds = 0.0
"""imports on first use, which come after that"""
_timed_process = 0
"""the process whose start and imports were counted: a second run of it did not wait for them"""


@contextlib.contextmanager
def timed_import() -> Iterator[None]:
    """Count what is imported inside as part of the start."""
    global _import_seconds
    began = _seconds_since_boot()
    yield
    _import_seconds += _seconds_since_boot() - began


class RestartTime:
    """Holds the seconds of each part of a restart. `end` ends a part, and the next one begins."""

    def __init__(self) -> None:
        global _timed_process
        is_first, _timed_process = _timed_process != os.getpid(), os.getpid()
        self.seconds: dict[str, float] = {}
        self._began = _imported_at if is_first else _seconds_since_boot()
        if is_first and (started := _process_start()) is not None:
            is_fork = started > _imported_at  # it has its imports from its parent
            self.seconds["start"] = 0.0 if is_fork else _imported_at - started + _import_seconds
            self._began = started if is_fork else _imported_at + _import_seconds

    def end(self, part: str) -> None:
        now = _seconds_since_boot()
        self.seconds[part], self._began = now - self._began, now

    def report(self, write: Callable[..., Any], step: int, source: str) -> None:
        """Journal and log the parts. step: where the run resumed; source: disk or memory."""
        total = sum(self.seconds.values())
        rounded = {part: round(seconds, 3) for part, seconds in self.seconds.items()}
        write("restart_time", step=step, source=source, total_seconds=round(total, 3), seconds=rounded)
        parts = ", ".join(f"{seconds:.1f} s {_LABELS[part]}" for part, seconds in self.seconds.items())
        log.info("holdfast: resumed at step %d from %s in %.1f s: %s", step, source, total, parts)


def _process_start() -> float | None:
    """Return when the kernel started this process, in seconds since boot; None if it does not tell."""
    try:
        fields = (
            durable.read_file(Path("/proc/self/stat"), 4096)
            .decode(errors="replace")
            .rpartition(_PROCESS_FIELDS)[2]
            .split()
        )
        return int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
