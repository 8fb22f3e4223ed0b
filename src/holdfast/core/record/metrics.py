"""metrics.jsonl: one line a settled step. Whoever trains hands rows over; a thread turns them into lines and writes them.

No row is lost: what the disk does not take waits in memory, and where too much waits there, so does training. What a kill
may cost is what was handed over in the last `flush_seconds`.
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

_AT_ONCE = 0.01
"""who asks for lines more often than that has each written before `write` returns"""
_EARLY, _MOST = 1000, 20_000
"""rows that are written before their time; rows at which training waits"""
_BATCH, _PAUSE = 16, 0.001
"""rows encoded in one go, and the seconds after it in which whoever trains has the interpreter to itself"""
_LONGEST = 3600.0


class MetricsFile:
    """Rows of any kind, as `encode` writes them; in the file at least every `flush_seconds`, and after `flush` and `close`.

    An error of the disk is raised by the next call; the rows are kept, and written once it takes them again. A process that
    was forked off has no part in it: there nothing is written and nothing waited for.
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
        """rows on their way into the file; touched only by who holds `_writing`"""
        self._writing = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._stop = self._closed = False
        self._error: Exception | None = None
        """what the thread met with, and nobody has been told of"""
        self._process = os.getpid()
        self._flushed = self._clock.monotonic()
        self.waits = 0
        """how often training has waited for the disk"""

    def write(self, row: Any) -> None:
        """Hand one row over. Nobody may change it afterwards."""
        rows = self._rows
        rows.append(row)
        if self._flush_seconds < _AT_ONCE:
            self.flush()
        elif self._thread is None:
            self._begin()
        elif self._error is not None or len(rows) >= _EARLY or self._due():
            self._attend()

    def flush(self) -> None:
        """All that was handed over is in the file."""
        if self._foreign():
            return
        met, self._error = self._error, None
        with self._writing:
            while self._rows or self._encoded:
                self._append()
            self._flushed = self._clock.monotonic()
        if met is not None:
            raise met

    def idle(self) -> None:
        """The same as `flush`, and no thread runs until the next row comes, so that a process may be forked."""
        thread, self._thread = self._thread, None
        if thread is not None and not self._foreign():
            self._stop = True
            self._wake.set()
            thread.join()
        self.flush()

    def close(self) -> None:
        """All of it is in the file, and nothing is held any more. What cannot be written is lost, and said."""
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as closing:
            closing.callback(self._lines.close)
            closing.callback(self._encoded.clear)
            closing.callback(self._rows.clear)
            self.idle()

    # ---- who trains

    def _due(self) -> bool:
        return self._clock.monotonic() - self._flushed >= self._flush_seconds

    def _attend(self) -> None:
        """Something is not as at other times."""
        if self._foreign():
            self._rows.clear()
            return
        met, self._error = self._error, None
        if met is not None:
            raise met
        if len(self._rows) >= _MOST:
            self.waits += 1
            if self.waits == 1:
                log.warning("%s: the disk is too slow, and training waits for it", self._lines.path)
            self.flush()
        else:
            self._wake.set()

    def _foreign(self) -> bool:
        return os.getpid() != self._process

    def _begin(self) -> None:
        if self._foreign() or self._closed:
            self._rows.clear()
            return
        self._stop = False
        self._wake.clear()
        self._thread = threading.Thread(target=self._work, name="holdfast-metrics", daemon=True)
        self._thread.start()

    # ---- the thread

    def _work(self) -> None:
        while not self._stop:
            left = self._flushed + self._flush_seconds - self._clock.monotonic()
            self._wake.wait(min(max(left, _PAUSE), _LONGEST))
            self._wake.clear()
            if self._error is None and (len(self._rows) >= _EARLY or self._due()):
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
        """Some rows into the file, in the order they came."""
        rows, encoded = self._rows, self._encoded
        while rows and len(encoded) < _BATCH:
            encoded.append(self._encode(rows.popleft()))
        if encoded:
            try:
                self._lines.append(b"".join(encoded))
            finally:
                self._forget(self._lines.taken)

    def _forget(self, taken: int) -> None:
        """Drop the rows that are in the file. One that lacks its newline only reads as a row already."""
        done = 0
        for line in self._encoded:
            if taken < len(line) - 1:
                break
            taken -= len(line)
            done += 1
        del self._encoded[:done]
