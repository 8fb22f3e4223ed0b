"""Holdfast's own run directory: metrics.jsonl, journal.jsonl, run.json.

The curve is what the run kept: of all committed attempts at a step the last, so that what a rollback undid is not in it.
Undone attempts and those that were never committed stay visible: as events, and as the series `undone_loss` and
`undone_grad_norm`.
"""

from __future__ import annotations

import json
import re
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis.importers.reading.json_lines import JsonLines
from holdfast.diagnosis.importers.reading.normalize import finish, limit
from holdfast.diagnosis.importers.reading.records import loads
from holdfast.diagnosis.importers.reading.source import Source
from holdfast.diagnosis.model.table import MAX_EVENTS, Event, Series, Table

NAME = "rundir"
DESCRIPTION = "a Holdfast run directory: journal.jsonl, metrics.jsonl, run.json"

_NUMBERS = ("loss", "grad_norm", "lr", "loss_scale", "update_rms", "weight_norm", "seconds", "samples", "length")
_COLUMNS = {"samples": "batch_size", "length": "sequence_length"}
# What JSON cannot say is written as Python writes it; these stand for it while a strict and fast decoder is at work.
# Of moderate size: a decoder may be slow with numbers at the end of the range.
_NAN, _INF = -31415926535897.75, 27182818284590.25
_STAND_IN = {b"NaN": b":%.2f" % _NAN, b"Infinity": b":%.2f" % _INF, b"-Infinity": b":%.2f" % -_INF}
_WORD = re.compile(rb":\s*(NaN|-?Infinity)\b")
_KINDS = {
    "run_begin": "begin", "restart": "restart", "resumed": "restart", "run_end": "end", "finding": "finding", "plan": "plan",
    "action": "action", "outcome": "outcome", "shift": "shift", "incident_opened": "incident", "incident_closed": "incident",
    "stop_requested": "stop", "snapshot_saved": "checkpoint", "note": "note", "quarantine": "quarantine",
}  # fmt: skip
_STATUS = {"overflowed": "overflow", "skipped": "skipped", "stopped": "stop"}


class Row(msgspec.Struct, gc=False):
    """One line of metrics.jsonl."""

    step: Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
    status: str = "committed"
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    loss_scale: float | None = None
    update_rms: float | None = None
    weight_norm: float | None = None
    seconds: float | None = None
    samples: float | None = None
    length: float | None = None


_DECODER = msgspec.json.Decoder(Row)


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory: its metrics or its journal say so."""
    for name, word in (("metrics.jsonl", b'"status"'), ("journal.jsonl", b'"event"')):
        file = path / name
        try:
            if file.is_file():
                with file.open("rb") as stream:
                    if word in stream.read(65536):
                        return True
        except OSError:
            continue
    return False


def read(path: Path) -> list[Table]:
    table = Table(str(path), NAME, np.empty(0))
    _journal(path, table)
    _about(path, table)
    metrics = path / "metrics.jsonl"
    if metrics.is_file() and metrics.stat().st_size:
        _metrics(Source(metrics), table)
    if not len(table) and not table.events:
        raise LogRefused(str(path), "a run directory whose metrics.jsonl and journal.jsonl hold no step and no event")
    return [finish(table, unfold=False, repeats=False)]


def _about(path: Path, table: Table) -> None:
    try:
        with (path / "run.json").open("rb") as file:
            facts = loads(file.read(4 << 20))
    except (OSError, ValueError):
        return
    if isinstance(facts, dict):
        table.facts.update(facts)


def _metrics(source: Source, table: Table) -> None:
    steps: list[np.ndarray[Any, np.dtype[np.float64]]] = []
    parts: dict[str, list[np.ndarray[Any, np.dtype[np.float64]]]] = {name: [] for name in _NUMBERS}
    kept: list[np.ndarray[Any, np.dtype[np.bool_]]] = []
    odd: list[Row] = []
    count = bad = 0
    for chunk in source.chunks():
        rows, broken = _rows(chunk)
        bad += broken
        if not rows:
            continue
        steps.append(np.array([row.step for row in rows], dtype=np.float64))
        kept.append(np.array([row.status == "committed" for row in rows]))
        for name in _NUMBERS:
            parts[name].append(_floats(list(map(attrgetter(name), rows))))
        if not kept[-1].all():
            odd += [row for row in rows if row.status != "committed"]
        count += len(rows)
    if not count:
        return
    step, committed = np.concatenate(steps), np.concatenate(kept)
    stays = _last_of_each(step, committed)
    undone = committed & ~stays
    table.step = step[stays]
    for name in _NUMBERS:
        values = np.concatenate(parts.pop(name))
        there = ~np.isnan(values)
        values[values == _NAN] = np.nan
        values[np.abs(values) == _INF] *= np.inf
        if name in ("loss", "grad_norm") and ((undone | ~committed) & there).any():
            at = (undone | ~committed) & there
            table.evals[f"undone_{name}"] = Series(step[at], values[at])
        if there[stays].any():
            ours = _COLUMNS.get(name, name)
            table.columns[ours], table.present[ours] = values[stays], there[stays]
    _tell(table, odd, int(undone.sum()), bad)


def _floats(values: list[float | None]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What was not measured becomes NaN; what was, and is NaN, has its stand-in."""
    if values[0] is None and values.count(None) == len(values):
        return np.full(len(values), np.nan)
    return np.array(values, dtype=np.float64)


def _rows(chunk: bytes) -> tuple[list[Row], int]:
    if b"NaN" in chunk or b"Infinity" in chunk:
        chunk = _WORD.sub(lambda word: _STAND_IN[word[1]], chunk)
    try:
        return _DECODER.decode_lines(chunk), 0
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    rows, broken = [], 0
    for line in chunk.split(b"\n"):
        if line.strip():
            try:
                rows.append(_DECODER.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError):
                broken += 1
    return rows, broken


def _last_of_each(
    step: np.ndarray[Any, np.dtype[np.float64]], committed: np.ndarray[Any, np.dtype[np.bool_]]
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Committed rows that no later committed row of the same or an earlier step has undone."""
    ahead = np.where(committed, step, np.inf)
    later = np.minimum.accumulate(ahead[::-1])[::-1]
    later = np.append(later[1:], np.inf)
    result: np.ndarray[Any, np.dtype[np.bool_]] = committed & (step < later)
    return result


def _tell(table: Table, odd: list[Row], undone: int, bad: int) -> None:
    for row in odd[:MAX_EVENTS]:
        loss = "" if row.loss is None else f", loss {_shown(row.loss)}"
        norm = "" if row.grad_norm is None else f", grad norm {_shown(row.grad_norm)}"
        table.events.append(Event(row.step, _STATUS.get(row.status, row.status), f"attempt {row.status}{loss}{norm}"))
    table.events.sort(key=lambda event: -1 if event.step is None else event.step)
    if undone:
        limit(
            table,
            "rolled_back",
            f"{undone} committed steps were undone by rollbacks and run again; only the last run counts",
        )
    if odd:
        limit(table, "not_committed", f"{len(odd)} attempts were not committed; they are events, not records")
    if bad:
        table.dropped += bad
        limit(table, "lines_lost", f"{bad} lines of metrics.jsonl cannot be read")


def _shown(value: float) -> str:
    return "NaN" if value == _NAN else "Inf" if abs(value) == _INF else f"{value:.6g}"


def _journal(path: Path, table: Table) -> None:
    file = path / "journal.jsonl"
    try:
        source = Source(file)
    except LogRefused:
        table.add_limit(
            "no_journal", "the directory has no journal that can be read: findings and actions are not known"
        )
        return
    lines, lost = JsonLines(source), 0
    for event in lines:
        kind = _KINDS.get(str(event.get("event")))
        if event.get("event") == "facts" and isinstance(event.get("facts"), dict):
            table.facts.update(event["facts"])
        if kind is None:
            continue
        step = event.get("step", event.get("from_step"))
        at = float(step) if isinstance(step, int) and abs(step) < 2**53 else None
        lost += not table.add_event(at, kind, _said(event))
    if lost:
        table.add_limit("events_lost", f"{lost} further events of the journal are not kept")
    if lines.broken or lines.torn:
        table.add_limit(
            "torn", f"{lines.broken + lines.torn} lines of the journal were torn by a kill and cannot be read"
        )


def _said(event: dict[str, Any]) -> str:
    """An event in a line: its name, and its message or the rest of it."""
    rest = {
        key: value for key, value in event.items() if key not in ("event", "time", "n", "step", "policy", "environment")
    }
    message = rest.get("message") or rest.get("reason")
    if isinstance(message, str):
        kind = rest.get("kind") or rest.get("action") or ""
        return f"{event['event']}: {kind + ': ' if isinstance(kind, str) and kind else ''}{message}"
    return f"{event['event']}: {json.dumps(rest, default=str)}"[:300] if rest else str(event["event"])
