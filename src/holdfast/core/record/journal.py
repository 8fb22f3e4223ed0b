"""The journal: append-only JSON lines, readable after a kill at any byte.

One event is one line, written by one call. A process killed inside that call leaves a torn last line: the next writer
ends it with a newline and records its offset, the reader reports it, and every other line parses. Numbers that are not
finite are written as NaN, Infinity and -Infinity, never as null.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import deque
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.core.base import durable
from holdfast.core.base.clock import Clock, SystemClock
from holdfast.core.base.config import with_current_keys
from holdfast.core.base.errors import RunDirError
from holdfast.core.base.masking import mask
from holdfast.core.base.plain import loads, plain, text
from holdfast.core.record.events import event_problem
from holdfast.core.record.outage import DiskOutage

log = logging.getLogger("holdfast")

MAX_WAITING_BYTES = 64 << 20
"""most bytes of lines that wait for the disk"""
MAX_BYTES, MAX_LINE_BYTES = 1 << 30, 16 << 20
"""of a journal that is read; of a longer line the rest is skipped"""
_LINES_A_WRITE = 64
_NAMED_LINES = 3


class TornLine(NamedTuple):
    """A line that does not parse: its number, its offset in the file and its bytes."""

    line: int
    offset: int
    data: bytes


class JournalContents(NamedTuple):
    """The events and torn lines of a journal or metrics file."""

    events: list[dict[str, Any]]
    torn: list[TornLine]
    skipped: list[str]
    """why each line that is JSON, but no event of this version, was skipped"""

    def describe_skipped(self) -> str | None:
        """Return how many lines were skipped, and the first of them; None if there are none."""
        if not self.skipped:
            return None
        more = f"; and {len(self.skipped) - _NAMED_LINES} more" if len(self.skipped) > _NAMED_LINES else ""
        return f"skipped {len(self.skipped)} journal events: {'; '.join(self.skipped[:_NAMED_LINES])}{more}"


def dumps(event: dict[str, Any]) -> bytes:
    """Return an event as one line. Structs become objects, enums their values; secrets are masked."""
    return mask(json.dumps(plain(event), default=text, separators=(",", ":"))).encode() + b"\n"


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the event on a line, or None. A line without a newline counts, since only a complete object parses."""
    try:
        event = loads(line)
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
    """Return every event of a journal, with the names and types of this version, and every line that is not an event.

    Raises OSError if it is not a regular file, or longer than `MAX_BYTES`.
    """
    return _read(path, event_problem)


def read_rows(path: str | os.PathLike[str]) -> JournalContents:
    """Return every row of a file of JSON lines that is not a journal, such as metrics.jsonl."""
    return _read(path, lambda row: None)


def _read(path: str | os.PathLike[str], problem_of: Callable[[dict[str, Any]], str | None]) -> JournalContents:
    contents = JournalContents([], [], [])
    for number, (offset, line) in enumerate(durable.read_lines(Path(path), MAX_BYTES, MAX_LINE_BYTES), 1):
        if not line.strip():
            continue
        event = _parse(line)
        if event is None:
            contents.torn.append(TornLine(number, offset, line))
        elif (problem := problem_of(event := with_current_names(event))) is not None:
            contents.skipped.append(f"line {number}: {problem}")
        else:
            contents.events.append(event)
    return contents


class LineFile:
    """Appends lines to a file, in order. Opening it ends a torn last line; `torn_at` is the offset of that line.

    With an `outage`, lines that the disk refuses wait in memory, and the next `write_out` continues where the disk stopped.
    Beyond `MAX_WAITING_BYTES` the oldest of them are lost. Without one, a refused line is dropped, and RunDirError raised.
    `check` is called before every write: it raises OSError while the run directory is gone, and RunDirError if this
    process has no right to write there any more.
    """

    def __init__(self, path: Path, outage: DiskOutage | None = None, check: Callable[[], None] | None = None) -> None:
        self.path, self._outage, self._check = path, outage, check
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_half_written = False
        """the first waiting line is the rest of a line whose beginning is in the file"""
        self._waited = self._lost = 0
        """lines of the present outage"""
        self._is_refused = self._must_sync = False
        try:
            self._descriptor = durable.open_to_append(path)
        except OSError as error:
            raise RunDirError(
                f"{path} cannot be opened for writing: {error.strerror}; choose another run_dir"
            ) from None
        try:
            self._status = durable.retry_interrupted(os.fstat, self._descriptor)
            self.size_at_open = self.length = self._status.st_size
            """bytes in the file when it was opened; and with every line added since, written or not"""
            self.torn_at = self._end_torn_line()
        except OSError as error:
            with contextlib.suppress(OSError):
                durable.close(self._descriptor)
            raise RunDirError(f"{path} cannot be read: {error.strerror}; choose another run_dir") from None

    def _end_torn_line(self) -> int | None:
        size = self.size_at_open
        if size == 0 or os.pread(self._descriptor, 1, size - 1) == b"\n":
            return None
        start = position = size
        while position > max(0, size - MAX_LINE_BYTES):
            begin = max(0, position - 65536)
            newline = os.pread(self._descriptor, position - begin, begin).rfind(b"\n")
            if newline >= 0:
                start = begin + newline + 1
                break
            start = position = begin
        is_complete = _parse(os.pread(self._descriptor, size - start, start)) is not None
        self.add(b"\n")
        self._is_half_written = True
        return None if is_complete else start

    @property
    def has_waiting(self) -> bool:
        """Return whether lines are not in the file yet."""
        return bool(self._waiting)

    def add(self, line: bytes) -> None:
        """Queue one line. Call `write_out` to write it."""
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        self.length += len(line)
        while self._waiting_bytes > MAX_WAITING_BYTES and len(self._waiting) > 2:
            oldest = int(self._is_half_written)
            self._waiting_bytes -= len(self._waiting[oldest])
            del self._waiting[oldest]
            self._lost += 1
            if self._lost == 1:
                log.warning(
                    "holdfast: %s: more than %d MB wait for the disk; the oldest lines are lost from here on",
                    self.path,
                    MAX_WAITING_BYTES >> 20,
                )

    def write_out(self, *, sync: bool = False) -> bool:
        """Write every waiting line, and force the file to disk if asked. Return whether the disk accepted all of it."""
        if self._descriptor < 0:
            return not self._waiting
        self._must_sync = self._must_sync or sync
        operation = "written"
        try:
            if self._check is not None:
                self._check()
            self._follow_path()
            while self._waiting:
                batch = b"".join(islice(self._waiting, _LINES_A_WRITE))
                self._drop_written(durable.write_some(self._descriptor, batch))
            if self._must_sync:
                operation = "forced to disk"
                durable.retry_interrupted(os.fsync, self._descriptor)
                self._must_sync = False
        except RunDirError as error:
            self._drop_waiting()
            if self._outage is None:
                raise
            self._outage.end_writing(error)
            return False
        except OSError as error:
            if self._outage is None:
                self._drop_waiting()
                raise RunDirError(
                    f"{self.path} cannot be {operation}: {error.strerror}; nothing else was done"
                ) from None
            self._is_refused, self._waited = True, max(self._waited, len(self._waiting))
            self._outage.begin(self.path, error)
            return False
        if self._is_refused and self._outage is not None:
            self._outage.end(self.path, self._waited, self._lost)
            self._is_refused, self._waited, self._lost = False, 0, 0
        return True

    def _follow_path(self) -> None:
        """Open the path again if it leads to another file now: it was deleted, or a network disk has come back."""
        try:
            if os.path.samestat(durable.retry_interrupted(os.lstat, self.path), self._status):
                return
        except OSError:
            pass
        descriptor, self._descriptor = self._descriptor, durable.open_to_append(self.path)
        self._status = durable.retry_interrupted(os.fstat, self._descriptor)
        with contextlib.suppress(OSError):
            durable.close(descriptor)
        if self._is_half_written:  # its beginning is not in this file
            self._waiting_bytes -= len(self._waiting.popleft())
            self._is_half_written, self._lost = False, self._lost + 1
        log.warning("holdfast: %s was deleted or replaced; what follows goes to the file of that name", self.path)

    def _drop_written(self, count: int) -> None:
        """Drop the waiting lines whose first `count` bytes are in the file now."""
        self._waiting_bytes -= count
        while count:
            line = self._waiting.popleft()
            self._is_half_written = count < len(line)
            if self._is_half_written:
                self._waiting.appendleft(line[count:])
            count -= min(count, len(line))

    def _drop_waiting(self) -> int:
        """Drop the waiting lines. Only the end of a line that is half in the file stays: the next one must not join it."""
        count = len(self._waiting)
        self._waiting.clear()
        if self._is_half_written:
            self._waiting.append(b"\n")
        self._waiting_bytes, self._must_sync = len(self._waiting), False
        return count

    def close(self) -> None:
        """Close the file. Lines that still wait are lost."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        lost = self._lost + self._drop_waiting() if self._outage is not None else 0
        if lost:
            log.warning("holdfast: %s: lines lost because the disk refused them: %d", self.path, lost)
        try:
            durable.close(descriptor)
        except OSError as error:
            message = f"{self.path} cannot be closed: {error.strerror}; its end may be lost"
            if self._outage is None:
                raise RunDirError(message) from None
            log.warning("holdfast: %s", message)


class Journal:
    """Writes events. A `durable` event is on disk when `write` returns.

    With an `outage`, an event that the disk refuses waits in memory, and the caller goes on; without one, RunDirError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        fsync: bool = True,
        clock: Clock | None = None,
        outage: DiskOutage | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._fsync = fsync
        lines = LineFile(Path(path), outage, check)
        self.lines: LineFile | None = lines
        self._sequence = 0
        self.listener: Callable[[dict[str, Any]], None] | None = None
        """is given every event that is written"""
        if lines.torn_at is not None:
            self.write("torn", offset=lines.torn_at)

    def write(self, event: str, *, durable: bool = False, **fields: Any) -> None:
        assert self.lines is not None
        self._sequence += 1
        written = {"event": event, "time": self._clock.wall(), "n": self._sequence, **fields}
        self.lines.add(dumps(written))
        self.lines.write_out(sync=durable and self._fsync)
        if self.listener is not None:
            self.listener(written)

    def write_out(self) -> None:
        """Write the events that wait for the disk."""
        if self.lines is not None:
            self.lines.write_out()

    def close(self) -> None:
        assert self.lines is not None
        with contextlib.suppress(RunDirError):
            self.lines.write_out(sync=self._fsync)
        self.lines.close()


class NullJournal(Journal):
    """The journal of a run without a directory: it drops every event."""

    def __init__(self) -> None:
        self.lines = None

    def write(self, event: str, *, durable: bool = False, **fields: Any) -> None:
        pass

    def close(self) -> None:
        pass
