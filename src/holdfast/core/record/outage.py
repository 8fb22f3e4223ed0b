"""A disk that refuses what a run writes: training continues, and what is not written waits in memory.

A full disk, a used-up quota or a failing network disk is no reason to end a run. `LineFile` keeps lines, `WaitingFiles`
the newest content of small files, and both write them when the disk accepts them again. `DiskOutage` reports it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.core.base import durable
from holdfast.core.base.clock import Clock, SystemClock
from holdfast.core.base.errors import RunDirError

log = logging.getLogger("holdfast")


class DiskOutage:
    """Logs once when a file of the run cannot be written, and once when all of them are again. Any thread may call it."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._refused: set[Path] = set()
        """files of which something waits"""
        self.is_active = False
        """from the first failure until the end was returned by `pop_finished`"""
        self.error: RunDirError | None = None
        """why nothing may be written any more"""
        self._begin = 0.0
        self._summary: dict[str, Any] = {}

    def begin(self, path: Path, error: OSError) -> None:
        """Report that the disk refused to write a file. Only the first report of an outage is logged."""
        with self._lock:
            is_first = not self._refused
            self._refused.add(path)
            if is_first and not self.is_active:
                self._begin = self._clock.monotonic()
                self._summary = {"files": [], "why": error.strerror or str(error), "lines_waited": 0, "lines_lost": 0}
            self.is_active = True
            if path.name not in self._summary["files"]:
                self._summary["files"].append(path.name)
        if is_first:
            problem = durable.run_dir_error(path, "written", error)
            log.warning(
                "holdfast: %s. Training continues; what is not written waits in memory until it can be", problem
            )

    def end_writing(self, error: RunDirError) -> None:
        """Report that this process may not write to the run directory any more. Only the first report is logged."""
        with self._lock:
            is_first, self.is_active = self.error is None, True
            self.error = self.error or error
        if is_first:
            log.error("holdfast: %s", error)

    def end(self, path: Path, waited: int = 0, lost: int = 0) -> None:
        """Report that a file is written again, and how many of its lines waited and how many were lost."""
        with self._lock:
            if path not in self._refused:
                return
            self._refused.discard(path)
            summary = self._summary
            summary["lines_waited"] += waited
            summary["lines_lost"] += lost
            is_over = not self._refused
            summary["seconds"] = seconds = self._clock.monotonic() - self._begin
        if is_over:
            log.warning(
                "holdfast: %s can be written again after %.0f s: %d lines that waited are in the files, %d were lost",
                path.parent,
                seconds,
                summary["lines_waited"],
                summary["lines_lost"],
            )

    def pop_finished(self) -> dict[str, Any] | None:
        """Return a summary of the outage, for the journal, once it is over; None before that and afterwards."""
        with self._lock:
            if self._refused or not self.is_active:
                return None
            self.is_active = False
            return self._summary


class WaitingFiles:
    """Replaces small files of a run directory. If the disk refuses, the newest content of each waits in memory."""

    def __init__(self, folder: Path, outage: DiskOutage, check: Callable[[], None] | None = None) -> None:
        self._folder, self._outage, self._check = folder, outage, check
        self.contents: dict[Path, str] = {}
        """what waits, by file"""

    def write(self, path: Path, content: str) -> None:
        """Replace a file, now or as soon as the disk accepts it."""
        self.contents[path] = content
        self._write(path)

    def write_out(self) -> None:
        """Write what waits."""
        for path in list(self.contents):
            self._write(path)

    def close(self) -> None:
        """Write what waits, for the last time."""
        self.write_out()
        if self.contents and self._outage.error is None:
            log.warning("holdfast: the disk refused the last content of %s", ", ".join(map(str, self.contents)))

    def _write(self, path: Path) -> None:
        try:
            if self._check is not None:
                self._check()
            durable.make_folder_inside(self._folder, path.parent)
            durable.replace_file(path, self.contents[path].encode())
        except RunDirError as error:
            self._outage.end_writing(error)
        except OSError as error:
            self._outage.begin(path, error)
        else:
            del self.contents[path]
            self._outage.end(path)
