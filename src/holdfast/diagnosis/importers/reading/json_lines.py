"""Reads files with one JSON object on each line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from holdfast.core.base.plain import loads
from holdfast.diagnosis.importers.reading.log_source import LogSource


class JsonLines:
    """Yields the objects of a file, and counts the lines that hold none."""

    def __init__(self, source: LogSource) -> None:
        self.source = source
        self.unreadable_lines = 0
        self.last_line_is_cut = False
        """the last line stops in the middle of an object: it was still being written"""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        last_line_is_cut = False
        for chunk in self.source.chunks():
            for line in chunk.split(b"\n"):
                if not line.strip():
                    continue
                try:
                    value = load_json(line)
                except ValueError:
                    self.unreadable_lines += 1
                    last_line_is_cut = line.lstrip()[:1] == b"{"
                    continue
                last_line_is_cut = False
                if isinstance(value, dict):
                    yield value
                else:
                    self.unreadable_lines += 1
        self.last_line_is_cut = last_line_is_cut
        self.unreadable_lines -= last_line_is_cut


def sample_objects(sample: bytes) -> list[dict[str, Any]]:
    """Return the first objects of a sample if at least four of five lines are objects, else an empty list."""
    objects: list[dict[str, Any]] = []
    other_lines = 0
    for line in sample[: 256 << 10].split(b"\n")[:200]:
        if not line.strip():
            continue
        try:
            value = load_json(line) if line.lstrip()[:1] == b"{" else None
        except ValueError:
            value = None
        if isinstance(value, dict):
            objects.append(value)
        else:
            other_lines += 1
    return objects if len(objects) >= 4 * other_lines else []


def load_json(data: bytes | str) -> Any:
    """Parse JSON, including Python's NaN and Infinity. Raises ValueError for invalid or too deeply nested JSON."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        pass
    try:
        return loads(data if isinstance(data, bytes) else data.encode())
    except RecursionError:
        raise ValueError("nested too deep") from None
