"""The journal: append-only JSON lines, readable after a kill at any byte.

One event is one line, handed to the kernel in one write. A process killed inside that write leaves a torn last line;
the next writer ends it with a newline and records where it is, the reader reports it, and every other line parses.
Numbers that are not finite are written as NaN, Infinity and -Infinity, never as null.
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
    """A line that does not parse: where it starts, and its bytes."""

    line: int
    offset: int
    data: bytes


class JournalContents(NamedTuple):
    """A journal or metrics file as read."""

    events: list[dict[str, Any]]
    torn: list[TornLine]


def dumps(event: dict[str, Any]) -> bytes:
    """One event as one line. Structs become objects, enums their values."""
    return json.dumps(plain(event), default=text, separators=(",", ":")).encode() + b"\n"


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            yield number, offset, line
            offset += len(line)


def _event(line: bytes) -> dict[str, Any] | None:
    """The event a line holds, or None. Nothing short of a whole object parses, so a line needs no newline to count."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


_RENAMED_EVENTS = {"begun_anew": "started_over"}
_RENAMED_FIELDS = {
    "resumed": {"turns": "interventions_kept", "load_path": "by_load_path"},
    "facts": {"was": "previous"},
    "note": {"turn": "intervention", "part": "part_of_rollback"},
    "action": {
        "turns": "interventions_kept",
        "then": "interventions",
        "window": "skip_window",
        "restored": "restored_from",
        "turn": "intervention",
        "part": "part_of_rollback",
    },
}
_RENAMED_SUSPECT_FIELDS = {"part": "micro_batch", "part_data": "micro_batch_data", "broken": "nonfinite_samples"}


def with_current_names(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event of any earlier version with the event, field and configuration names of this one."""
    name = event.get("event")
    if isinstance(name, str):
        event = _renamed(event, _RENAMED_FIELDS.get(name, {}))
        event["event"] = _RENAMED_EVENTS.get(name, name)
    environment = event.get("environment")
    if isinstance(environment, dict) and isinstance(environment.get("config"), dict):
        event["environment"] = {**environment, "config": with_current_keys(environment["config"])}
    evidence = event.get("evidence")
    origin = evidence.get("origin") if isinstance(evidence, dict) else None
    for holder in (event, origin):
        if isinstance(holder, dict) and isinstance(holder.get("suspects"), list):
            holder["suspects"] = [
                _renamed(s, _RENAMED_SUSPECT_FIELDS) if isinstance(s, dict) else s for s in holder["suspects"]
            ]
    return event


def _renamed(fields: dict[str, Any], new_names: dict[str, str]) -> dict[str, Any]:
    return {new_names.get(name, name): value for name, value in fields.items()} if new_names else fields


def read(path: str | os.PathLike[str]) -> JournalContents:
    """Return every event in the file, with the names of this version, and every line that is not an event."""
    events: list[dict[str, Any]] = []
    torn: list[TornLine] = []
    for number, offset, line in _lines(Path(path)):
        if not line.strip():
            continue
        event = _event(line)
        if event is not None:
            events.append(with_current_names(event))
        else:
            torn.append(TornLine(number, offset, line))
    return JournalContents(events, torn)


class LineFile:
    """Appends lines to a file it never rewrites. Opening ends a torn last line and says where it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunDirError(
                f"{path} cannot be opened for writing: {error.strerror}; choose another run_dir"
            ) from None
        self._half_written = False
        self.taken = 0
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
            found = os.pread(self._descriptor, position - begin, begin).rfind(b"\n")
            if found >= 0:
                start = begin + found + 1
                break
            position = begin
        whole = _event(os.pread(self._descriptor, size - start, start)) is not None
        self.append(b"\n")
        return None if whole else start

    def append(self, data: bytes) -> None:
        ending = b"\n" if self._half_written else b""  # else this line would run into the torn one: both would be lost
        view = memoryview(ending + data)
        self.taken = 0
        try:
            while view:
                view = view[durable.write_some(self._descriptor, view) :]
                self.taken = max(0, len(data) - len(view))
            self._half_written = False
        except OSError as error:
            self._half_written = True
            raise RunDirError(f"{self.path} cannot be written: {error.strerror}; nothing more was done") from None

    def sync(self) -> None:
        if self._descriptor < 0:
            return
        try:
            durable.retry_interrupted(os.fsync, self._descriptor)
        except OSError as error:
            raise RunDirError(
                f"{self.path} cannot be forced to disk: {error.strerror}; nothing more was done"
            ) from None

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            try:
                durable.close(descriptor)
            except OSError as error:
                raise RunDirError(f"{self.path} cannot be closed: {error.strerror}; its end may be lost") from None


class Journal:
    """Writes events. `durable` ones are on disk when `write` returns."""

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
    """A journal for a run without a directory: takes everything, keeps nothing."""

    def __init__(self) -> None:
        pass

    def write(self, event: str, *, durable: bool = False, **fields: Any) -> None:
        pass

    def close(self) -> None:
        pass
