"""Holdfast's own run directory: metrics.jsonl, journal.jsonl, run.json.

The curve holds the steps that the run kept: of all committed attempts at a step the last. Attempts that a rollback undid
or that were never committed are events, and the series `undone_loss` and `undone_grad_norm`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from holdfast.core.base import durable
from holdfast.core.base.errors import LogRefused
from holdfast.core.hang import incident_files
from holdfast.core.record.events import event_problem
from holdfast.core.record.journal import with_current_names
from holdfast.diagnosis.importers.reading.column_blocks import Bools, Floats
from holdfast.diagnosis.importers.reading.extra_columns import find_extra, row_type, to_columns
from holdfast.diagnosis.importers.reading.json_lines import JsonLines, load_json
from holdfast.diagnosis.importers.reading.log_source import LogSource
from holdfast.diagnosis.importers.reading.normalize import normalize
from holdfast.diagnosis.model.table import MAX_EVENTS, Event, Series, Table

NAME = "rundir"
DESCRIPTION = "a Holdfast run directory: journal.jsonl, metrics.jsonl, run.json"

_NUMBERS = (
    "loss", "grad_norm", "lr", "loss_scale", "update_rms", "weight_norm", "seconds", "samples", "length",
    "memory_allocated", "memory_reserved", "memory_peak", "memory_inactive_split", "memory_host", "memory_workers",
)  # fmt: skip
_COLUMNS = {"samples": "batch_size", "length": "sequence_length"}
# Stand-ins for NaN and infinity, which the fast JSON decoder rejects. Numbers near the end of the float range would make
# it slow.
_NAN, _INF = -31415926535897.75, 27182818284590.25
_STAND_INS = {b"NaN": b":%.2f" % _NAN, b"Infinity": b":%.2f" % _INF, b"-Infinity": b":%.2f" % -_INF}
_NONFINITE = re.compile(rb":\s*(NaN|-?Infinity)\b")
_EVENT_KINDS = {
    "run_begin": "begin", "restart": "restart", "resumed": "restart", "run_end": "end", "finding": "finding", "plan": "plan",
    "action": "action", "outcome": "outcome", "shift": "shift", "incident_opened": "incident", "incident_closed": "incident",
    "stop_requested": "stop", "snapshot_saved": "checkpoint", "note": "note", "quarantine": "quarantine",
}  # fmt: skip
_MAX_BYTES = 4 << 30
_STATUS_KINDS = {"overflowed": "overflow", "skipped": "skipped", "stopped": "stop"}


class MetricsRow(msgspec.Struct, gc=False):
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
    memory_allocated: float | None = None
    memory_reserved: float | None = None
    memory_peak: float | None = None
    memory_inactive_split: float | None = None
    memory_host: float | None = None
    memory_workers: float | None = None


def _row_decoder(extra: list[str]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(row_type(MetricsRow, extra) if extra else MetricsRow)


def is_run_directory(path: Path) -> bool:
    """Return whether the folder holds the metrics or the journal of a run."""
    for name, word in (("metrics.jsonl", b'"status"'), ("journal.jsonl", b'"event"')):
        with contextlib.suppress(OSError), os.fdopen(durable.open_regular(path / name), "rb") as stream:
            if word in stream.read(65536):
                return True
    return False


def read(path: Path, *, metrics_end: int | None = None) -> list[Table]:
    """Read a run directory into one table. Raises LogRefused if it holds neither a step nor an event.

    `metrics_end`: read metrics.jsonl, which may be growing, up to this byte.
    """
    table = Table(str(path), NAME, np.empty(0))
    _read_journal(path, table)
    _read_hangs(path, table)
    try:
        facts = load_json(durable.read_file(path / "run.json", 4 << 20))
        table.facts.update(facts if isinstance(facts, dict) else {})
    except (OSError, ValueError):
        pass
    try:
        source = _open(path / "metrics.jsonl", table)
        if metrics_end is not None and metrics_end < source.size:
            source.end = metrics_end
        if source.end != 0:
            _read_metrics(source, table)
    except (FileNotFoundError, LogRefused):  # no file, or an empty one
        pass
    except OSError as error:
        table.add_limit("lines_lost", f"metrics.jsonl is not read: {error.strerror}")
    if not len(table) and not table.events:
        raise LogRefused(str(path), "a run directory whose metrics.jsonl and journal.jsonl hold no step and no event")
    return [normalize(table, unfold_epochs=False, drop_repeats=False)]


def _open(file: Path, table: Table) -> LogSource:
    """Open a file of a run for reading. Raise OSError if it is a link, which another tool's log may be, or a hole."""
    durable.check_readable(file)
    source = LogSource(file)
    if source.size > _MAX_BYTES:
        table.add_limit("lines_lost", f"only the first {_MAX_BYTES >> 30} GB of {file.name} are read")
        source.end = _MAX_BYTES
    return source


def _read_metrics(source: LogSource, table: Table) -> None:
    step_parts: list[Floats] = []
    committed_parts: list[Bools] = []
    value_parts: dict[str, list[Floats]] = {name: [] for name in _NUMBERS}
    rejected: list[MetricsRow] = []
    unreadable, rows_before = 0, 0
    extra, unread = find_extra(source, MetricsRow.__struct_fields__)
    if unread:
        names = f"{', '.join(repr(name) for name in unread[:3])}{' ...' if len(unread) > 3 else ''}"
        table.add_limit("columns_left_out", f"{len(unread)} columns of metrics.jsonl are not read: {names}")
    decoder = _row_decoder(extra)
    for chunk in source.chunks():
        rows, unreadable_in_chunk = _decode_rows(chunk, decoder)
        unreadable += unreadable_in_chunk
        if not rows:
            continue
        step_parts.append(np.array([row.step for row in rows], dtype=np.float64))
        committed_parts.append(np.array([row.status == "committed" for row in rows]))
        for name in _NUMBERS:
            value_parts[name].append(_to_array(list(map(attrgetter(name), rows))))
        for n, name in enumerate(extra):
            for column, values in to_columns(name, map(attrgetter(f"extra_{n}"), rows)).items():
                value_parts.setdefault(column, [np.full(rows_before, np.nan)] if rows_before else []).append(values)
        rows_before += len(rows)
        for parts in value_parts.values():  # a column that these rows lack
            missing = rows_before - sum(map(len, parts))
            parts += [np.full(missing, np.nan)] if missing else []
        if not committed_parts[-1].all():
            rejected += [row for row in rows if row.status != "committed"]
    if not step_parts:
        return
    step, committed = np.concatenate(step_parts), np.concatenate(committed_parts)
    kept = committed & (step < _lowest_later_step(step, committed))
    table.step = step[kept]
    for name in list(value_parts):
        values = np.concatenate(value_parts.pop(name))
        present = ~np.isnan(values)
        values[values == _NAN] = np.nan
        values[np.abs(values) == _INF] *= np.inf
        undone = present & ~kept
        if name in ("loss", "grad_norm") and undone.any():
            table.evals[f"undone_{name}"] = Series(step[undone], values[undone])
        if present[kept].any():
            column = name if name in extra else _COLUMNS.get(name, name)
            table.columns[column], table.present[column] = values[kept], present[kept]
    for row in rejected[:MAX_EVENTS]:
        loss = "" if row.loss is None else f", loss {_format(row.loss)}"
        norm = "" if row.grad_norm is None else f", grad norm {_format(row.grad_norm)}"
        kind = _STATUS_KINDS.get(row.status, row.status)
        table.events.append(Event(row.step, kind, f"attempt {row.status}{loss}{norm}"))
    table.events.sort(key=lambda event: -1 if event.step is None else event.step)
    rolled_back = int((committed & ~kept).sum())
    if rolled_back:
        table.add_limit(
            "rolled_back", f"{rolled_back} committed steps were rolled back; only the last attempt is shown"
        )
    if rejected:
        table.add_limit("not_committed", f"{len(rejected)} attempts were not committed; they are shown as events")
    if unreadable:
        table.dropped += unreadable
        table.add_limit("lines_lost", f"{unreadable} lines of metrics.jsonl cannot be read")


def _to_array(values: list[float | None]) -> Floats:
    """Return a column. A value that was not measured is None and becomes NaN; a measured NaN is still its stand-in."""
    if values.count(None) == len(values):  # most columns of most runs, and slow to convert
        return np.full(len(values), np.nan)
    return np.array(values, dtype=np.float64)


def _decode_rows(chunk: bytes, decoder: msgspec.json.Decoder[Any]) -> tuple[list[MetricsRow], int]:
    """Return the rows of a chunk, and the number of unreadable lines."""
    if b"NaN" in chunk or b"Infinity" in chunk:
        chunk = _NONFINITE.sub(lambda match: _STAND_INS[match[1]], chunk)
    try:
        return decoder.decode_lines(chunk), 0
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    rows, unreadable = [], 0
    for line in filter(bytes.strip, chunk.split(b"\n")):
        try:
            rows.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            unreadable += 1
    return rows, unreadable


def _lowest_later_step(step: Floats, committed: Bools) -> Floats:
    """Return for each row the lowest step that a later row commits; infinity after the last."""
    lowest = np.minimum.accumulate(np.where(committed, step, np.inf)[::-1])[::-1]
    return np.append(lowest[1:], np.inf)


def _format(value: float) -> str:
    return "NaN" if value == _NAN else "Inf" if abs(value) == _INF else f"{value:.6g}"


def _read_journal(path: Path, table: Table) -> None:
    try:
        source = _open(path / "journal.jsonl", table)
    except (OSError, LogRefused):
        table.add_limit("no_journal", "journal.jsonl is missing or unreadable, so findings and actions are not known")
        return
    lines, dropped, skipped = JsonLines(source), 0, 0
    for line in lines:
        event = with_current_names(line)
        if event_problem(event) is not None:
            skipped += 1
            continue
        kind = _EVENT_KINDS.get(event["event"])
        if event["event"] == "facts":
            table.facts.update(event["facts"])
        if kind is not None:
            step = event.get("step", event.get("from_step"))
            step = float(step) if step is not None and abs(step) < 2**53 else None
            dropped += not table.add_event(step, kind, _describe(event))
    if dropped:
        table.add_limit("events_lost", f"{dropped} more events of the journal are not kept")
    if skipped:
        table.add_limit("events_skipped", f"{skipped} lines of the journal are no events of this version")
    torn = lines.unreadable_lines + lines.last_line_is_cut
    if torn:
        table.add_limit(
            "torn", f"{torn} lines of the journal cannot be read: the process was killed while it wrote them"
        )


def _read_hangs(path: Path, table: Table) -> None:
    """Add the verdicts of the hang watch as events."""
    for incident in incident_files.list_incidents(path):
        verdict = incident_files.read_verdict(incident) or {}
        step, summary, line = verdict.get("step"), verdict.get("summary"), verdict.get("line")
        if isinstance(summary, str):
            at = f", at {line}" if isinstance(line, str) and line else ""
            at_step = float(step) if isinstance(step, int) and 0 <= step < 2**53 else None
            table.add_event(at_step, "hang", f"hang: {summary}{at}"[:600])


def _describe(event: dict[str, Any]) -> str:
    """Return an event as one line: its name, and its message or its other fields."""
    hidden = ("event", "time", "n", "step", "policy", "environment")
    details = {key: value for key, value in event.items() if key not in hidden}
    message = details.get("message") or details.get("reason")
    if isinstance(message, str):
        kind = details.get("kind") or details.get("action") or ""
        return f"{event['event']}: {kind + ': ' if isinstance(kind, str) and kind else ''}{message}"
    return f"{event['event']}: {json.dumps(details, default=str)}"[:300] if details else str(event["event"])
