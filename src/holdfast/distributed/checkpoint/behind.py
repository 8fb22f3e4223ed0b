"""Work done on a thread of its own, in order, while the caller goes on with what it waits for."""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")
_HANDED_OVER = 1 << 20


class Behind(Generic[T]):
    """`work` on each item given to `put`, one after the other, at most `depth` behind.

    Leaving the `with` block waits for all of it and raises what the work raised; when the block itself raised, what is
    left is dropped. Either way the thread has ended.
    """

    def __init__(self, work: Callable[[T], None], depth: int, name: str) -> None:
        self._work = work
        self._queue: queue.Queue[T | None] = queue.Queue(depth)
        self._error: BaseException | None = None
        self._dropping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Behind[T]:
        self._thread.start()
        return self

    def put(self, item: T) -> None:
        if self._error is not None:
            raise self._error
        self._queue.put(item)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._dropping = kind is not None
        self._queue.put(None)
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._dropping or self._error is not None:
                continue  # to the end of the queue, so that `put` never waits for a thread that is gone
            try:
                self._work(item)
            except BaseException as error:
                self._error = error


class Crc:
    """The crc32 of pieces, in the order they are given, taken on a thread of its own: zlib lets go of the interpreter
    while it computes. The memory of a piece must stay as it is until the `with` block is left. Then it is complete."""

    def __init__(self) -> None:
        self._value = 0
        self._behind: Behind[list[memoryview]] = Behind(self._sum, 4, "holdfast-crc")
        self._gathered: list[memoryview] = []
        self._bytes = 0

    def __enter__(self) -> Crc:
        self._behind.__enter__()
        return self

    def add(self, piece: memoryview) -> None:
        """Small ones are handed over many at a time: waking a thread costs more than summing a bias."""
        self._gathered.append(piece)
        self._bytes += len(piece)
        if self._bytes >= _HANDED_OVER:
            self._behind.put(self._gathered)
            self._gathered, self._bytes = [], 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._behind.put(self._gathered)
        finally:
            self._behind.__exit__(kind, error, trace)

    def _sum(self, pieces: list[memoryview]) -> None:
        for piece in pieces:
            self._value = zlib.crc32(piece, self._value)

    def __str__(self) -> str:
        return f"crc32:{self._value:08x}"
