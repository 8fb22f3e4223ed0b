"""What saving, failing and training have cost a run, out of its directory. What cannot be known from it is None."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.core.base.errors import RunDirError
from holdfast.core.record import facts, journal
from holdfast.core.record.rundir import RunDir

_TAIL = 4_000_000
"""bytes of metrics.jsonl that are read, from its end: some ten thousand steps, the latest"""
_ORDERLY = ("KeyboardInterrupt", "PolicyStop", "SystemExit")


class MeasuredCosts(NamedTuple):
    """Medians, in seconds; the rest counts and settings."""

    step_time: float | None
    stall: float | None
    write: float | None
    bytes: float | None
    restart: float | None
    saves: int
    failures: int
    running: float
    """seconds in which a failure could have come"""
    every: int | None
    certify_steps: int | None
    world_size: int | None
    limits: list[str]
    """what of the record could not be read"""


class _Life(NamedTuple):
    """From one start of the process to the next."""

    begin: float
    end: float
    failed: bool
    """it ended by itself, without anyone's asking"""
    resumed: float | None


def measure(place: str) -> MeasuredCosts:
    """What a run directory tells; RunDirError where `place` is not one."""
    folder = _existing(place)
    limits: list[str] = []
    about = _about(folder.run, limits)
    events = _events(folder.journal, limits)
    lives = list(_lives(events))
    for event in events:  # a later life may have been started with another configuration
        if event.get("event") == "restart" and isinstance(event.get("environment"), dict):
            about = {**about, **event["environment"]}
    saves = [e for e in events if e.get("event") == "checkpoint" and e.get("status") == "saved"]
    checkpoint = _section(_section(about, "config"), "checkpoint")
    failures = sum(life.failed for life in lives[:-1])
    return MeasuredCosts(
        step_time=_step_time(folder.metrics, limits),
        stall=_median(e.get("stall_seconds") for e in saves),
        write=_median(e.get("write_seconds") for e in saves),
        bytes=_median(e.get("bytes") for e in saves),
        restart=_median(b.resumed - a.end for a, b in pairwise(lives) if a.failed and b.resumed),
        saves=len(saves),
        failures=failures,
        running=math.fsum(life.end - life.begin for life in lives),
        every=_count(checkpoint.get("every_steps")),
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
    if not (folder.run.is_file() or folder.journal.is_file() or folder.metrics.is_file()):
        raise RunDirError(
            f"{place} is not a run directory: it has no {folder.journal.name}; name the run_dir of a Guard"
        )
    return folder


def _about(path: Path, limits: list[str]) -> dict[str, Any]:
    try:
        about = facts.read_run_json(path)
    except RunDirError as error:
        limits.append(str(error).split(";")[0])
        return {}
    if about is None:
        limits.append(f"{path.name} is not there: the cadence the run has is not known")
    return about or {}


def _events(path: Path, limits: list[str]) -> list[dict[str, Any]]:
    try:
        record = journal.read(path)
    except OSError as error:
        limits.append(f"{path.name} cannot be read: {error.strerror}")
        return []
    if record.torn:
        limits.append(f"lines of {path.name} that cannot be read: {len(record.torn)}")
    return record.events


def _lives(events: Iterable[dict[str, Any]]) -> Iterator[_Life]:
    life: _Life | None = None
    for event in events:
        kind, time = event.get("event"), _number(event.get("time"))
        if time is None or kind == "ack" or event.get("by") == "holdfast checkpoints":  # no sign of life
            continue
        if kind in ("run_begin", "restart") or life is None:
            if life is not None:
                yield life
            life = _Life(time, time, True, None)
        life = life._replace(end=max(life.end, time))
        if kind == "resumed" and life.resumed is None:
            life = life._replace(resumed=time)
        elif kind == "run_end":
            error = event.get("error")
            life = life._replace(failed=error is not None and not str(error).startswith(_ORDERLY))
    if life is not None:
        yield life


def _step_time(path: Path, limits: list[str]) -> float | None:
    """The median of the steps that were committed lately."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL))
            lines = file.read().split(b"\n")[1 if size > _TAIL else 0 :]
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
