"""The runs of a folder, for `holdfast ui`: found without following links, read in parts, kept until they change."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast.core.base import durable
from holdfast.core.base.clean import clean
from holdfast.core.record import journal as journal_file
from holdfast.core.record.goodput import TimedRow, split_seconds
from holdfast.diagnosis.model.run_journal import RunJournal
from holdfast.reports.recorded_run import LIVE_SECONDS, run_status
from holdfast.reports.report_page import VERDICTS

MAX_RUNS, _MAX_DEPTH, _MAX_FOLDERS = 2000, 4, 20_000
_PIECES, _PIECE_BYTES, _TAIL_BYTES = 40, 8192, 16 << 10
_FILES = ("journal.jsonl", "metrics.jsonl")


class ListedRun(msgspec.Struct, kw_only=True):
    """Holds one row of the list. `spark` and `goodput` come from a sample of the steps."""

    name: str
    status: str
    tone: str
    label: str
    step: int | None = None
    loss: float | str | None = None
    goodput: float | None = None
    incidents: int = 0
    open: int = 0
    updated: float = 0.0
    age: float = 0.0
    spark: list[tuple[float, float] | None] = []


class _SampledRow(TimedRow, gc=False):
    loss: float | None = None


_DECODER = msgspec.json.Decoder(_SampledRow)


class _Seen(NamedTuple):
    files: tuple[tuple[int, int], ...]
    listed: ListedRun
    has_ended: bool
    has_journal: bool


class RunList:
    """Finds the runs below a folder and summarizes them. A run is read again only when its files have changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._seen: dict[str, _Seen] = {}

    def paths(self) -> dict[str, Path]:
        """Return every run directory by its name relative to the folder. Links are not followed."""
        found: dict[str, Path] = {}
        visited, waiting = 0, [(self.folder, 0)]
        while waiting and len(found) < MAX_RUNS and visited < _MAX_FOLDERS:
            place, depth = waiting.pop()
            visited += 1
            with contextlib.suppress(OSError):
                entries = list(os.scandir(place))
                if any(e.name in _FILES and e.is_file(follow_symlinks=False) for e in entries):
                    name = place.relative_to(self.folder).as_posix()
                    found["." if name == "." else name] = place
                elif depth < _MAX_DEPTH:
                    folders = (e for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith("."))
                    waiting += [(Path(e.path), depth + 1) for e in folders]
        return {name: found[name] for name in sorted(found) if name.isprintable()}

    def list_runs(self) -> list[ListedRun]:
        """Return a summary of every run."""
        now, paths = time.time(), self.paths()
        self._seen = {name: seen for name, seen in self._seen.items() if name in paths}
        return [self._summarize(name, path, now) for name, path in paths.items()]

    def _summarize(self, name: str, path: Path, now: float) -> ListedRun:
        states = []
        for file in _FILES:
            try:
                status = os.lstat(path / file)
                states.append((status.st_size, status.st_mtime_ns))
            except OSError:
                states.append((0, 0))
        files = tuple(states)
        seen = self._seen.get(name)
        if seen is None or seen.files != files:
            seen = self._seen[name] = _read(name, path, files)
        listed = seen.listed
        listed.updated = max(mtime for _, mtime in files) / 1e9
        listed.age = max(0.0, now - listed.updated)
        is_training = not seen.has_ended and listed.age < LIVE_SECONDS
        if listed.status in ("training", "ended", "unjudged"):
            ended = "ended" if seen.has_journal else "unjudged"
            listed.status = "training" if is_training else ended
            listed.tone, listed.label = VERDICTS[listed.status]
        return listed


def _read(name: str, path: Path, files: tuple[tuple[int, int], ...]) -> _Seen:
    try:
        journal = RunJournal(journal_file.read(path / _FILES[0]).events, 0, path / _FILES[0])
    except OSError:
        journal = RunJournal([], 0, None)
    ends = journal.select("run_begin", "restart", "run_end")
    has_ended = bool(ends) and ends[-1]["event"] == "run_end"
    status = run_status(journal, not has_ended) if journal.summary is not None else "unjudged"
    tone, label = VERDICTS[status]
    listed = ListedRun(name=clean(name), status=status, tone=tone, label=label)
    listed.incidents = len(journal.incidents)
    listed.open = sum(incident.state == "open" for incident in journal.incidents)
    with contextlib.suppress(OSError):
        _sample_metrics(path / _FILES[1], files[1][0], listed, journal)
    return _Seen(files, listed, has_ended, journal.summary is not None)


def _sample_metrics(path: Path, size: int, listed: ListedRun, journal: RunJournal) -> None:
    """Read pieces of the metrics, evenly spaced, and the end: a long file is not read as a whole."""
    descriptor = durable.open_regular(path)
    try:
        sampled: list[_SampledRow] = []
        for rows in _sample_rows(descriptor, size):
            losses = [row.loss for row in rows if row.loss is not None and math.isfinite(row.loss)]
            listed.spark.append((min(losses), max(losses)) if losses else None)
            sampled += [row for row in rows if row.is_committed]
        tail = _rows(os.pread(descriptor, _TAIL_BYTES, max(0, size - _TAIL_BYTES)), is_first=size <= _TAIL_BYTES)
    finally:
        durable.close(descriptor)
    if tail:
        listed.step, loss = tail[-1].step, tail[-1].loss
        listed.loss = loss if loss is None or math.isfinite(loss) else json.dumps(loss)
    times = [t for e in journal.events if isinstance(t := e.get("time"), int | float)]
    ended = max([*times[-1:], *(row.time for row in tail[-1:] if row.time is not None)], default=0.0)
    wall = ended - times[0] if times else 0.0
    productive = split_seconds(sampled, np.array([row.step_seconds for row in sampled]))["productive"]
    if productive > 0 and wall > 0 and listed.step:
        listed.goodput = min(1.0, productive / len(sampled) * listed.step / wall)


def _sample_rows(descriptor: int, size: int) -> Iterator[list[_SampledRow]]:
    """Yield the rows of each piece: all of a short file, and a few of a long one."""
    if size <= _PIECES * _PIECE_BYTES:
        rows = _rows(os.pread(descriptor, size, 0), is_first=True)
        pieces = min(_PIECES, len(rows))
        yield from (rows[len(rows) * k // pieces : len(rows) * (k + 1) // pieces] for k in range(pieces))
        return
    for piece in range(_PIECES):
        start = size * piece // _PIECES
        yield _rows(os.pread(descriptor, min(_PIECE_BYTES, size - start), start), is_first=start == 0)


def _rows(data: bytes, *, is_first: bool) -> list[_SampledRow]:
    """Return the whole lines of a piece; those cut at its ends are left out."""
    start, stop = 0 if is_first else data.find(b"\n") + 1, data.rfind(b"\n") + 1
    try:
        return _DECODER.decode_lines(data[start:stop])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # it holds a NaN, or damage
        pass
    rows = []
    for line in data[start:stop].splitlines():
        with contextlib.suppress(ValueError, RecursionError, msgspec.ValidationError):
            rows.append(msgspec.convert(json.loads(line), _SampledRow))
    return rows
