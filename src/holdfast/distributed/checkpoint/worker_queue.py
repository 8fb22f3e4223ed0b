"""Runs work on a second thread, in order, while the caller continues."""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")
_CRC_BATCH_BYTES = 1 << 20


class WorkerQueue(Generic[T]):
    """Calls `work` on each item given to `put`, in order. `put` blocks while `depth` items are waiting.

    Leaving the `with` block waits for all items and raises what `work` raised. If the block itself raised, waiting items
    are dropped. In both cases the thread has ended.
    """

    def __init__(self, work: Callable[[T], None], depth: int, name: str) -> None:
        self._work = work
        self._queue: queue.Queue[T | None] = queue.Queue(depth)
        self._error: BaseException | None = None
        self._dropping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def put(self, item: T) -> None:
        if self._error is not None:
            raise self._error
        self._queue.put(item)

    def __exit__(self, error_type: type[BaseException] | None, *details: Any) -> None:
        self._dropping = error_type is not None
        self._queue.put(None)
        self._thread.join()
        if self._error is not None and error_type is None:
            raise self._error

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._dropping or self._error is not None:
                continue  # empty the queue, so that `put` never blocks on a dead thread
            try:
                self._work(item)
            except BaseException as error:
                self._error = error


class BackgroundCrc32(WorkerQueue[list[memoryview]]):
    """Computes the CRC-32 of pieces in the given order on a second thread; zlib releases the GIL while it computes.

    The memory of a piece must not change inside the `with` block. After the block `str()` returns the checksum.
    """

    def __init__(self) -> None:
        super().__init__(self._update, 4, "holdfast-crc")
        self._value = 0
        self._batch: list[memoryview] = []
        self._batch_bytes = 0

    def add(self, piece: memoryview) -> None:
        """Add the next piece. Small ones are batched: waking the thread costs more than the checksum of a bias."""
        self._batch.append(piece)
        self._batch_bytes += len(piece)
        if self._batch_bytes >= _CRC_BATCH_BYTES:
            self.put(self._batch)
            self._batch, self._batch_bytes = [], 0

    def __exit__(self, error_type: type[BaseException] | None, *details: Any) -> None:
        try:
            if error_type is None:
                self.put(self._batch)
        finally:
            super().__exit__(error_type, *details)

    def _update(self, pieces: list[memoryview]) -> None:
        for piece in pieces:
            self._value = zlib.crc32(piece, self._value)

    def __str__(self) -> str:
        return f"crc32:{self._value:08x}"
