"""Describes one parsed line: which columns its numbers belong to, and at which bytes they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

TRAIN = "train"
EVAL = "eval"


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
