"""The journal: append-only JSON lines, readable after a kill at any byte.

One event is one line, written by one call. A process killed inside that call leaves a torn last line: the next writer
ends it with a newline and records its offset, the reader reports it, and every other line parses. Numbers that are not
finite are written as NaN, Infinity and -Infinity, never as null.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.core.base import durable
from holdfast.core.base.clock import Clock, SystemClock
from holdfast.core.base.config import with_current_keys
from holdfast.core.base.errors import RunDirError
from holdfast.core.base.plain import plain, text


class TornLine(NamedTuple):
    """A line that does not parse: its number, its offset in the file and its bytes."""

    line: int
    offset: int
    data: bytes


class JournalContents(NamedTuple):
    """The events and torn lines of a journal or metrics file."""

    events: list[dict[str, Any]]
    torn: list[TornLine]


def dumps(event: dict[str, Any]) -> bytes:
    """Return an event as one line. Structs become objects, enums their values."""
    return json.dumps(plain(event), default=text, separators=(",", ":")).encode() + b"\n"


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            yield number, offset, line
            offset += len(line)


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the event on a line, or None. A line without a newline counts, since only a complete object parses."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


_RENAMED_FIELDS = {
    "turns": "interventions_kept",
    "then": "interventions",
    "turn": "intervention",
    "part": "part_of_rollback",
    "window": "skip_window",
    "restored": "restored_from",
    "load_path": "by_load_path",
    "was": "previous",
}
_RENAMED_SUSPECT_FIELDS = {"part": "micro_batch", "part_data": "micro_batch_data", "broken": "nonfinite_samples"}


def with_current_names(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event of any earlier version with the event, field and configuration names of this one."""
    event = {_RENAMED_FIELDS.get(name, name): value for name, value in event.items()}
    if event.get("event") == "begun_anew":
        event["event"] = "started_over"
    environment = event.get("environment")
    if isinstance(environment, dict) and isinstance(environment.get("config"), dict):
        event["environment"] = {**environment, "config": with_current_keys(environment["config"])}
    evidence = event.get("evidence")
    for holder in (event, evidence.get("origin") if isinstance(evidence, dict) else None):
        if isinstance(holder, dict) and isinstance(holder.get("suspects"), list):
            holder["suspects"] = [
                {_RENAMED_SUSPECT_FIELDS.get(name, name): value for name, value in suspect.items()}
                for suspect in holder["suspects"]
                if isinstance(suspect, dict)
            ]
    return event


def read(path: str | os.PathLike[str]) -> JournalContents:
    """Return every event in the file, with the names of this version, and every line that is not an event."""
    events: list[dict[str, Any]] = []
    torn: list[TornLine] = []
    for number, offset, line in _lines(Path(path)):
        if not line.strip():
            continue
        event = _parse(line)
        if event is not None:
            events.append(with_current_names(event))
        else:
            torn.append(TornLine(number, offset, line))
    return JournalContents(events, torn)


class LineFile:
    """Appends lines to a file. Opening it ends a torn last line; `torn_at` is the offset of that line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunDirError(
                f"{path} cannot be opened for writing: {error.strerror}; choose another run_dir"
            ) from None
        self._half_written = False
        self.bytes_written = 0
        """how many bytes of the last append are in the file"""
        try:
            self.torn_at = self._end_torn_line()
        except OSError as error:
            with contextlib.suppress(OSError):
                durable.close(self._descriptor)
            raise RunDirError(f"{path} cannot be read: {error.strerror}; choose another run_dir") from None

    def _end_torn_line(self) -> int | None:
        size = os.fstat(self._descriptor).st_size
        if size == 0 or os.pread(self._descriptor, 1, size - 1) == b"\n":
            return None
        start, position = 0, size
        while position > 0:
            begin = max(0, position - 65536)
            newline = os.pread(self._descriptor, position - begin, begin).rfind(b"\n")
            if newline >= 0:
                start = begin + newline + 1
                break
            position = begin
        is_complete = _parse(os.pread(self._descriptor, size - start, start)) is not None
        self.append(b"\n")
        return None if is_complete else start

    def append(self, data: bytes) -> None:
        # Without a line end this line would join the torn one, and both would be lost.
        ending = b"\n" if self._half_written else b""
        view = memoryview(ending + data)
        self.bytes_written = 0
        try:
            while view:
                view = view[durable.write_some(self._descriptor, view) :]
                self.bytes_written = max(0, len(data) - len(view))
            self._half_written = False
        except OSError as error:
            self._half_written = True
            raise RunDirError(f"{self.path} cannot be written: {error.strerror}; nothing else was done") from None

    def sync(self) -> None:
        if self._descriptor < 0:
            return
        try:
            durable.retry_interrupted(os.fsync, self._descriptor)
        except OSError as error:
            raise RunDirError(
                f"{self.path} cannot be forced to disk: {error.strerror}; nothing else was done"
            ) from None

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            try:
                durable.close(descriptor)
            except OSError as error:
                raise RunDirError(f"{self.path} cannot be closed: {error.strerror}; its end may be lost") from None


class Journal:
    """Writes events. A `durable` event is on disk when `write` returns."""

    def __init__(self, path: str | os.PathLike[str], *, fsync: bool = True, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._fsync = fsync
        self._lines = LineFile(Path(path))
        self._sequence = 0
        if self._lines.torn_at is not None:
            self.write("torn", offset=self._lines.torn_at)

    def write(self, event: str, *, durable: bool = False, **fields: Any) -> None:
        self._sequence += 1
        self._lines.append(dumps({"event": event, "time": self._clock.wall(), "n": self._sequence, **fields}))
        if durable and self._fsync:
            self._lines.sync()

    def close(self) -> None:
        if self._fsync:
            with contextlib.suppress(RunDirError):
                self._lines.sync()
        self._lines.close()


class NullJournal(Journal):
    """The journal of a run without a directory: it drops every event."""

    def __init__(self) -> None:
        pass

    def write(self, event: str, *, durable: bool = False, **fields: Any) -> None:
        pass

    def close(self) -> None:
        pass
