"""Hands rows and events to a sink, such as TensorBoard, in a thread of its own. A slow or failing sink delays nothing.

The queue of a sink is bounded. What does not fit is dropped, counted, and reported at the end. A sink that fails is left
alone for a while and tried again; the log has its first failure only.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from holdfast.core.base import durable

log = logging.getLogger("holdfast")

_MAX_WAITING = 10_000
_RETRY_SECONDS = 30.0
_CLOSE_SECONDS = 10.0
_PIECE = 1 << 20
_PAUSE_SECONDS = 0.25
"""how long the thread sleeps after it has emptied its queue: rows come one by one, and waking up costs more than a row"""


class SinkRun(NamedTuple):
    """What a sink is given when it opens."""

    identity: str
    """the same in every process of the run"""
    folder: Path
    """the run directory"""
    is_restart: bool
    total_steps: Callable[[], int | None]
    earlier_bytes: int = 0
    """how long metrics.jsonl was when this process began"""

    def count_earlier_attempts(self) -> int:
        """Return how many rows the processes before have written."""
        left, rows = self.earlier_bytes, 0
        if left:
            descriptor = durable.open_regular(self.folder / "metrics.jsonl")
            try:
                while data := os.read(descriptor, min(left, _PIECE)):
                    left -= len(data)
                    rows += data.count(b"\n")
            finally:
                durable.close(descriptor)
        return rows


def size_of(metrics: Path) -> int:
    """Return the length of a file, or 0 if there is none."""
    try:
        return metrics.stat().st_size
    except OSError:
        return 0


class Sink(Protocol):
    """Takes the rows of metrics.jsonl and the events of the journal. All methods are called by one thread."""

    name: str

    def open(self, run: SinkRun) -> None: ...
    def write_row(self, row: dict[str, Any]) -> None: ...
    def write_event(self, event: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class SinkThread:
    """Feeds one sink. Nothing here raises, or waits for the sink, except for `close`, which waits a few seconds."""

    def __init__(self, sink: Sink, *, max_waiting: int = _MAX_WAITING, retry_seconds: float = _RETRY_SECONDS) -> None:
        self._sink, self._max_waiting, self._retry_seconds = sink, max_waiting, retry_seconds
        self._waiting: deque[tuple[bool, dict[str, Any]]] = deque()
        self._wake, self._is_ready = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._run: SinkRun | None = None
        self._is_open = self._is_closing = self._has_failed = False
        self._retry_at = 0.0
        self.dropped = 0

    def start(self, run: SinkRun) -> None:
        """Open the sink, in its thread, and begin with what waits."""
        self._run = run
        self._thread = threading.Thread(target=self._work, name=f"holdfast-sink-{self._sink.name}", daemon=True)
        self._thread.start()

    def wait_until_open(self) -> None:
        """Wait until the sink has imported its library: a process that is forked meanwhile could never import it."""
        if self._thread is not None:
            self._is_ready.wait(_CLOSE_SECONDS)

    def put_row(self, row: dict[str, Any]) -> None:
        self._put((False, row))

    def put_event(self, event: dict[str, Any]) -> None:
        self._put((True, event))
        self._wake.set()

    def _put(self, item: tuple[bool, dict[str, Any]]) -> None:
        if len(self._waiting) >= self._max_waiting:
            self.dropped += 1
            return
        self._waiting.append(item)

    def close(self) -> None:
        """Write what waits and close the sink. A sink that takes too long is left behind."""
        thread, self._thread = self._thread, None
        if thread is None or os.getpid() != self._process:
            return
        self._is_closing = True
        self._wake.set()
        thread.join(_CLOSE_SECONDS)
        lost = self.dropped + len(self._waiting)
        if lost:
            log.warning("holdfast: the metrics sink %s was too slow or failed: %d rows dropped", self._sink.name, lost)
        elif thread.is_alive():
            log.warning(
                "holdfast: the metrics sink %s is still closing after %.0f s, and what it shows may be incomplete; "
                "metrics.jsonl has every row",
                self._sink.name,
                _CLOSE_SECONDS,
            )

    # ---- in the thread

    def _work(self) -> None:
        self._call(self._open)
        self._is_ready.set()
        while not self._is_closing:
            self._wake.wait(_PAUSE_SECONDS)
            self._wake.clear()
            self._write_waiting()
        self._retry_at = 0.0  # the last events, such as a stop, are worth another try
        self._write_waiting()
        if self._is_open:
            self._call(self._sink.close)

    def _open(self) -> None:
        assert self._run is not None
        self._sink.open(self._run)
        self._is_open = True

    def _write_waiting(self) -> None:
        while self._waiting and time.monotonic() >= self._retry_at:
            if not self._is_open:
                self._call(self._open)
            if not self._is_open:
                return
            is_event, item = self._waiting.popleft()
            self._call(self._sink.write_event if is_event else self._sink.write_row, item)

    def _call(self, method: Callable[..., None], *given: Any) -> None:
        try:
            method(*given)
        except Exception as error:  # whatever its library raises: training must not notice
            self._retry_at = time.monotonic() + (0.0 if self._is_closing else self._retry_seconds)
            if given:
                self.dropped += 1
            if not self._has_failed:
                self._has_failed = True
                cure = f"; pip install holdfast[{self._sink.name}]" if isinstance(error, ModuleNotFoundError) else ""
                log.warning(
                    "holdfast: the metrics sink %s failed: %s: %s%s. Training continues, and the sink is tried again every "
                    "%.0f s; metrics.jsonl has every row",
                    self._sink.name, type(error).__name__, error, cure, self._retry_seconds,
                )  # fmt: skip
