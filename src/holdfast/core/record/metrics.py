"""metrics.jsonl: one line per settled step. A background thread encodes and writes the rows.

No row is lost: rows that the disk does not accept stay in memory, and if there are too many, training waits. A kill
loses at most the rows of the last `flush_seconds`.
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

    The next call raises an error of the disk; the rows are kept, and written once the disk accepts them. In a forked
    process all calls do nothing.
    """

    def __init__(
        self,
        path: Path,
        flush_seconds: float,
        clock: Clock | None = None,
        encode: Callable[[Any], bytes] = dumps,
    ) -> None:
        self._clock = clock or SystemClock()
        self._lines = LineFile(path)
        self._flush_seconds, self._encode = flush_seconds, encode
        self._rows: deque[Any] = deque()
        self._encoded: list[bytes] = []
        """rows on their way into the file; guarded by `_writing`"""
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
        """Write all queued rows to the file."""
        if self._is_forked():
            return
        error, self._error = self._error, None
        with self._writing:
            while self._rows or self._encoded:
                self._append()
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
        """Write all rows and close the file. Raise the error if some cannot be written; they are lost then."""
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as closing:
            closing.callback(self._lines.close)
            closing.callback(self._encoded.clear)
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
        try:
            while self._rows or self._encoded:
                if self._stop:
                    return
                with self._writing:
                    self._append()
                time.sleep(_PAUSE)
        except Exception as error:  # the next call raises it
            self._error = error
        self._flushed = self._clock.monotonic()

    def _append(self) -> None:
        """Write some rows to the file, in order."""
        rows, encoded = self._rows, self._encoded
        while rows and len(encoded) < _BATCH:
            encoded.append(self._encode(rows.popleft()))
        if encoded:
            try:
                self._lines.append(b"".join(encoded))
            finally:
                self._drop_written(self._lines.bytes_written)

    def _drop_written(self, written: int) -> None:
        """Drop the rows that are in the file. A row that lacks only its newline can be read already."""
        done = 0
        for line in self._encoded:
            if written < len(line) - 1:
                break
            written -= len(line)
            done += 1
        del self._encoded[:done]
