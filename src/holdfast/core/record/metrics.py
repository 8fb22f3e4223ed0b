"""metrics.jsonl: one line per settled step. A background thread encodes and writes the rows.

Rows that a full disk refuses wait in memory, up to a bound, and training continues. If the disk is only slow, no row is
lost: with too many rows queued, training waits. A kill loses at most the rows of the last `flush_seconds`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.core.base.clock import Clock, SystemClock
from holdfast.core.record.journal import LineFile, dumps
from holdfast.core.record.outage import DiskOutage

log = logging.getLogger("holdfast")

_IMMEDIATE_SECONDS = 0.01
"""with a shorter `flush_seconds`, each row is written before `write` returns"""
_WRITE_ROWS, _WAIT_ROWS = 1000, 20_000
"""pending rows that are written before they are due; pending rows at which training waits"""
_BATCH, _PAUSE = 16, 0.001
"""rows encoded at a time, and the seconds after that in which the training thread has the interpreter"""
_MAX_WAIT = 3600.0


class MetricsFile:
    """Writes rows, encoded by `encode`, at least every `flush_seconds`, and at `flush` and `close`.

    Rows that the disk refuses are kept and tried again as often; `outage` reports it. An error of `encode` is raised by the
    next call. In a forked process all calls do nothing.
    """

    def __init__(
        self,
        path: Path,
        flush_seconds: float,
        clock: Clock | None = None,
        encode: Callable[[Any], bytes] = dumps,
        outage: DiskOutage | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._lines = LineFile(path, outage or DiskOutage(self._clock), check)
        """guarded by `_writing`"""
        self._flush_seconds, self._encode = flush_seconds, encode
        self._rows: deque[Any] = deque()
        self._writing = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._stop = self._closed = False
        self._error: Exception | None = None
        """an error of the thread that no call has raised yet"""
        self._process = os.getpid()
        self._flushed = self._clock.monotonic()
        self.waits = 0
        """how often training waited for the disk"""

    def write(self, row: Any) -> None:
        """Queue one row. The caller must not change it afterwards."""
        rows = self._rows
        rows.append(row)
        if self._flush_seconds < _IMMEDIATE_SECONDS:
            self.flush()
        elif self._thread is None:
            self._start_thread()
        elif self._error is not None or len(rows) >= _WRITE_ROWS or self._due():
            self._handle_backlog()

    def flush(self) -> None:
        """Write all queued rows to the file, as far as the disk accepts them."""
        if self._is_forked():
            return
        error, self._error = self._error, None
        with self._writing:
            is_accepted = True
            while self._rows or (is_accepted and self._lines.has_waiting):
                is_accepted = self._write_some(is_accepted)
            self._flushed = self._clock.monotonic()
        if error is not None:
            raise error

    def idle(self) -> None:
        """Flush and stop the thread until the next row, so that the process may fork."""
        thread, self._thread = self._thread, None
        if thread is not None and not self._is_forked():
            self._stop = True
            self._wake.set()
            thread.join()
        self.flush()

    def close(self) -> None:
        """Write all rows and close the file. Rows that cannot be written now are lost, and the log tells how many."""
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as closing:
            if not self._is_forked():
                closing.callback(self._lines.close)
            closing.callback(self._rows.clear)
            self.idle()

    # ---- in the training thread

    def _due(self) -> bool:
        return self._clock.monotonic() - self._flushed >= self._flush_seconds

    def _handle_backlog(self) -> None:
        """Wake the thread, raise its error, or wait for the disk if too many rows are queued."""
        if self._is_forked():
            self._rows.clear()
            return
        error, self._error = self._error, None
        if error is not None:
            raise error
        if len(self._rows) >= _WAIT_ROWS:
            self.waits += 1
            if self.waits == 1:
                log.warning("holdfast: %s: training waits because the disk is too slow", self._lines.path)
            self.flush()
        else:
            self._wake.set()

    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    def _start_thread(self) -> None:
        if self._is_forked() or self._closed:
            self._rows.clear()
            return
        self._stop = False
        self._wake.clear()
        self._thread = threading.Thread(target=self._work, name="holdfast-metrics", daemon=True)
        self._thread.start()

    # ---- in the background thread

    def _work(self) -> None:
        while not self._stop:
            left = self._flushed + self._flush_seconds - self._clock.monotonic()
            self._wake.wait(min(max(left, _PAUSE), _MAX_WAIT))
            self._wake.clear()
            if self._error is None and (len(self._rows) >= _WRITE_ROWS or self._due()):
                self._write_out()

    def _write_out(self) -> None:
        is_accepted = True
        try:
            while self._rows or (is_accepted and self._lines.has_waiting):
                if self._stop:
                    return
                with self._writing:
                    is_accepted = self._write_some(is_accepted)
                time.sleep(_PAUSE)
        except Exception as error:  # the next call raises it
            self._error = error
        self._flushed = self._clock.monotonic()

    def _write_some(self, is_accepted: bool) -> bool:
        """Encode some rows, in order, and write them unless the disk has just refused. Return whether it accepted them."""
        for _ in range(min(_BATCH, len(self._rows))):
            self._lines.add(self._encode(self._rows.popleft()))
        return is_accepted and self._lines.write_out()
