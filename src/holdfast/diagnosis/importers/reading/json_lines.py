"""One JSON object a line, read line by line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.diagnosis.importers.reading.records import loads
from holdfast.diagnosis.importers.reading.source import Source


class JsonLines:
    """The objects of a file; lines that are none are counted. A last line that stops in the middle was being written."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.broken = 0
        self.torn = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        last_bad = False
        for chunk in self.source.chunks():
            for line in chunk.split(b"\n"):
                if not line.strip():
                    continue
                try:
                    value = loads(line)
                except ValueError:
                    self.broken += 1
                    last_bad = line.lstrip()[:1] == b"{"
                    continue
                last_bad = False
                if isinstance(value, dict):
                    yield value
                else:
                    self.broken += 1
        if last_bad:
            self.torn = True
            self.broken -= 1


def looks_like(sample: bytes) -> list[dict[str, Any]]:
    """The first objects of a sample, if nearly all of its lines are objects."""
    found: list[dict[str, Any]] = []
    bad = 0
    for line in sample[: 256 << 10].split(b"\n")[:200]:
        if not line.strip():
            continue
        if line.lstrip()[:1] != b"{":
            bad += 1
            continue
        try:
            value = loads(line)
        except ValueError:
            bad += 1
            continue
        if isinstance(value, dict):
            found.append(value)
    return found if len(found) >= 4 * bad and found else []
