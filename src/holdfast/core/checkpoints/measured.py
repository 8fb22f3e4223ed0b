"""The measured costs of saving, failing and training, from a run directory. A cost that is not recorded is None."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.core.base import durable
from holdfast.core.base.errors import RunDirError
from holdfast.core.record import facts, journal
from holdfast.core.record.rundir import RunDir, suggest_run

_TAIL_BYTES = 4_000_000
"""bytes read from the end of metrics.jsonl: about the last ten thousand steps"""
_ORDERLY_ENDS = ("KeyboardInterrupt", "PolicyStop", "SystemExit")


class MeasuredCosts(NamedTuple):
    """Medians in seconds, counts and settings."""

    step_time: float | None
    stall: float | None
    write: float | None
    bytes: float | None
    restart: float | None
    saves: int
    failures: int
    running: float
    """seconds during which a failure could have happened"""
    every: int | None
    every_minutes: float | None
    certify_steps: int | None
    world_size: int | None
    limits: list[str]
    """what could not be read"""


class _Process(NamedTuple):
    """One process of the run, from its first event to its last."""

    begin: float
    end: float
    failed: bool
    """it ended without a request"""
    resumed: float | None


def measure(place: str) -> MeasuredCosts:
    """Return the costs recorded in a run directory. Raise RunDirError if `place` is not one."""
    folder = _existing(place)
    limits: list[str] = []
    about = _about(folder.run, limits)
    events = _events(folder.journal, limits)
    processes = list(_processes(events))
    for event in events:  # a later process may have another configuration
        if event.get("event") == "restart" and isinstance(event.get("environment"), dict):
            about = {**about, **event["environment"]}
    saves = [e for e in events if e.get("event") == "checkpoint" and e.get("status") == "saved"]
    checkpoint = _section(_section(about, "config"), "checkpoint")
    return MeasuredCosts(
        step_time=_step_time(folder.metrics, limits),
        stall=_median(e.get("stall_seconds") for e in saves),
        write=_median(e.get("write_seconds") for e in saves),
        bytes=_median(e.get("bytes") for e in saves),
        restart=_median(b.resumed - a.end for a, b in pairwise(processes) if a.failed and b.resumed),
        saves=len(saves),
        failures=sum(process.failed for process in processes[:-1]),
        running=math.fsum(process.end - process.begin for process in processes),
        every=_count(checkpoint.get("every_steps")),
        every_minutes=_number(checkpoint.get("every_minutes")),
        certify_steps=_count(checkpoint.get("certify_after")),
        world_size=_count(about.get("world_size")),
        limits=limits,
    )


def _existing(place: str) -> RunDir:
    folder = RunDir(place)
    if not folder.path.exists():
        raise RunDirError(f"{place}: no such folder; name the run_dir that was given to the Guard")
    if not folder.path.is_dir():
        raise RunDirError(f"{place} is a file; name the run directory, the folder that holds {folder.journal.name}")
    if not any(map(os.path.lexists, (folder.run, folder.journal, folder.metrics))):
        cure = suggest_run(Path(place), "name the run_dir of a Guard")
        raise RunDirError(f"{place} is not a run directory: it has no {folder.journal.name}; {cure}")
    return folder


def _about(path: Path, limits: list[str]) -> dict[str, Any]:
    try:
        about = facts.read_run_json(path)
    except RunDirError as error:
        limits.append(str(error).split(";")[0])
        return {}
    if about is None:
        limits.append(f"{path.name} is missing: the cadence of the run is unknown")
    return about or {}


def _events(path: Path, limits: list[str]) -> list[dict[str, Any]]:
    try:
        record = journal.read(path)
    except OSError as error:
        limits.append(f"{path.name} cannot be read: {error.strerror}")
        return []
    if record.torn:
        limits.append(f"lines of {path.name} that cannot be read: {len(record.torn)}")
    if (skipped := record.describe_skipped()) is not None:
        limits.append(skipped)
    return record.events


def _processes(events: Iterable[dict[str, Any]]) -> Iterator[_Process]:
    process: _Process | None = None
    for event in events:
        name, time = event.get("event"), _number(event.get("time"))
        if time is None or name == "ack" or event.get("by") == "holdfast checkpoints":  # written by a command
            continue
        if name in ("run_begin", "restart") or process is None:
            if process is not None:
                yield process
            process = _Process(time, time, True, None)
        process = process._replace(end=max(process.end, time))
        if name == "resumed" and process.resumed is None:
            process = process._replace(resumed=time)
        elif name == "run_end":
            error = event.get("error")
            process = process._replace(failed=error is not None and not str(error).startswith(_ORDERLY_ENDS))
    if process is not None:
        yield process


def _step_time(path: Path, limits: list[str]) -> float | None:
    """Return the median time of the last committed steps."""
    try:
        with os.fdopen(durable.open_regular(path), "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")[1 if size > _TAIL_BYTES else 0 :]
    except OSError as error:
        limits.append(f"{path.name} cannot be read: {error.strerror}")
        return None
    rows = (_row(line) for line in lines)
    return _median((r.get("seconds") for r in rows if r.get("status", "committed") == "committed"), above_zero=True)


def _row(line: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _median(values: Iterable[Any], *, above_zero: bool = False) -> float | None:
    numbers = [n for n in map(_number, values) if n is not None and (n > 0 or (n == 0 and not above_zero))]
    return statistics.median(numbers) if numbers else None


def _number(value: Any) -> float | None:
    plain = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15
    return float(value) if plain else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None


def _section(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = whole.get(name)
    return section if isinstance(section, dict) else {}
