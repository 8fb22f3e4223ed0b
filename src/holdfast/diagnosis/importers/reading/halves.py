"""The second half of a large log, read by a second process at the same time.

The helper is a fresh interpreter, not a fork: the caller may have threads and a CUDA context.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import IO, Any

import msgspec
import numpy as np

from holdfast.diagnosis.importers.reading.blocks import Block
from holdfast.diagnosis.importers.reading.source import Source
from holdfast.diagnosis.importers.reading.text_log import MOST_EVENTS, ROW, TextLog

HELPER = "holdfast.diagnosis.importers.reading.helper"


def middle(source: Source) -> int:
    """Where the first line after the middle of the file begins."""
    at = source.size // 2
    with source.open() as file:
        file.seek(at)
        for _ in range(64):
            data = file.read(1 << 16)
            found = data.find(b"\n")
            if found >= 0:
                return at + found + 1
            at += len(data)
    return source.size


def read_halves(first: TextLog, form: str, mapping: Mapping[str, str] | None, source: Source) -> TextLog | None:
    """The first half read into `first`, the second by the helper, as one; None if no helper could do its half."""
    cut = middle(source)
    if cut >= source.size:
        return None
    words = [form, json.dumps(dict(mapping or {})), str(source.path.resolve()), str(cut), str(source.size)]
    command = [sys.executable, "-m", HELPER, *words]
    try:
        helper = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    except OSError:
        return None
    try:
        part = Source(source.path, end=cut)
        first.read(part)
        assert helper.stdout is not None
        whole = _join(first, helper.stdout, source)
        source.lines_cut, source.broken = source.lines_cut + part.lines_cut, source.broken or part.broken
        return whole
    except (EOFError, msgspec.DecodeError, ValueError):
        return None
    finally:
        helper.kill()
        helper.wait()
        if helper.stdout is not None:
            helper.stdout.close()


def _join(first: TextLog, stream: IO[bytes], source: Source) -> TextLog:
    head = msgspec.msgpack.decode(_exactly(stream, int.from_bytes(_exactly(stream, 8), "little")))
    rows = first.rows
    before = rows.seen
    mine = rows.join() if rows.blocks else Block(0)
    length, theirs = mine.length, head["length"]
    whole = Block(length + theirs)
    names = dict.fromkeys([*mine.columns, *[name for name, _ in head["columns"]]])
    for name, partial in head["columns"]:
        values = np.full(whole.length, np.nan)
        there = None
        if partial or name not in mine.columns or name in mine.present:
            there = np.ones(whole.length, dtype=bool)
            there[:length] = mine.there(name)
        if name in mine.columns:
            values[:length] = mine.columns.pop(name)
        _into(stream, values[length:])
        if partial:
            assert there is not None
            _into(stream, there[length:])
        if name == ROW or (name == "step" and head["without_step"]):
            values[length:] += before
        whole.columns[name] = values
        if there is not None:
            whole.present[name] = there
    for name in names:
        if name not in whole.columns:
            there = np.zeros(whole.length, dtype=bool)
            there[:length] = mine.there(name)
            whole.present[name] = there
            whole.columns[name] = np.concatenate([mine.columns.pop(name), np.full(theirs, np.nan)])
    rows.blocks, rows.kept, rows.seen = [whole], whole.length, rows.seen + head["seen"]
    rows.columns = set(whole.columns)
    _tail(first, head, stream, before)
    source.lines_cut += head["lines_cut"]
    source.broken = source.broken or head["broken"]
    return first


def _tail(first: TextLog, head: dict[str, Any], stream: IO[bytes], before: int) -> None:
    first.carried |= set(head["carried"])
    for name, count in head["evals"]:
        steps, values = np.empty(count), np.empty(count)
        _into(stream, steps)
        _into(stream, values)
        first.evals.setdefault(name, []).append((steps + before if name in first.carried else steps, values))
    for row, kind, text in head["events"]:
        if len(first.events) < MOST_EVENTS:
            first.events.append((row + before, kind, text))
        else:
            first.events_lost += 1
    first.events_lost += head["events_lost"]
    first.unreadable += head["unreadable"]
    first.without_step += head["without_step"]


def _exactly(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise EOFError
    return data


def _into(stream: IO[bytes], array: np.ndarray[Any, Any]) -> None:
    view = memoryview(array.view(np.uint8).data)
    while len(view):
        got = stream.readinto(view[: 1 << 20])  # type: ignore[attr-defined]
        if not got:
            raise EOFError
        view = view[got:]
