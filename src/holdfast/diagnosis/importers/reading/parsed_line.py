"""Describes one parsed line: which columns its numbers belong to, and at which bytes they are."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

TRAIN = "train"
EVAL = "eval"
NUMBER = rb"[-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf)"
"""a regular expression for a number as most logs write it"""


class Field(NamedTuple):
    """One number of a line: its column, its first and last byte, and the factor to the column's unit."""

    name: str
    start: int
    end: int
    factor: float = 1.0


class ParsedLine(NamedTuple):
    """The numbers of a training record (TRAIN) or an evaluation (EVAL). The field `step` is the step."""

    kind: str
    fields: tuple[Field, ...]

    def has(self, name: str) -> bool:
        return any(field.name == name for field in self.fields)

    def values(self, line: bytes) -> dict[str, float]:
        values: dict[str, float] = {}
        for field in self.fields:
            value = parse_number(line[field.start : field.end])
            if value is not None:
                values.setdefault(field.name, value * field.factor)
        return values


LineParser = Callable[[bytes], ParsedLine | None]
"""Parses one line; None if it is no record. The result must not depend on the digits of the line: all lines that differ
in digits only are parsed like the first of them."""


def parse_number(text: bytes) -> float | None:
    """Return the number that a log writes as, for example, `7,034`, `100%` or `nan`; None for other text."""
    if len(text) > 64 or b"_" in text:
        return None
    try:
        return float(text.strip().strip(b"%'\"").replace(b",", b""))
    except ValueError:
        return None


def find_pairs(
    line: bytes, pattern: re.Pattern[bytes], columns: Mapping[bytes, tuple[str, float]], start: int = 0
) -> list[Field]:
    """Return a field for each key and number that the pattern finds as groups 1 and 2, from byte `start`.

    `columns` gives column and factor for each key. Other keys are columns of the same name.
    """
    fields: dict[str, Field] = {}
    for match in pattern.finditer(line, start):
        key = match[1].strip()
        name, factor = columns.get(key) or (key.decode("utf-8", "replace")[:80], 1.0)
        if name not in fields and parse_number(match[2]) is not None:
            fields[name] = Field(name, *match.span(2), factor)
    return list(fields.values())
