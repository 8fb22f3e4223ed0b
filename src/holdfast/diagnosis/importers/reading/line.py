"""One line, read with care: which numbers it holds, where they stand, and which columns they belong to."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

TRAIN = "train"
EVAL = "eval"


class Field(NamedTuple):
    """One number of a line: its column, the bytes it stands in, and what to multiply it with."""

    name: str
    start: int
    end: int
    factor: float = 1.0


class Reading(NamedTuple):
    """What a line holds: a training record or an evaluation. A field named `step` is the step."""

    kind: str
    fields: tuple[Field, ...]

    def has(self, name: str) -> bool:
        return any(field.name == name for field in self.fields)

    def values(self, line: bytes) -> dict[str, float]:
        found = {}
        for field in self.fields:
            value = number(line[field.start : field.end])
            if value is not None and field.name not in found:
                found[field.name] = value * field.factor
        return found


Parse = Callable[[bytes], Reading | None]
"""Reads one line; None where it is not a record. Must look at the line's shape only, not at what the numbers say:
every line that is the same but for its digits is taken to read the same."""


def number(text: bytes) -> float | None:
    """A number as logs write it, 7,034 and 100% and 'nan' included; None if it is none."""
    if len(text) > 64:
        return None
    text = text.strip().strip(b"%'\"").replace(b",", b"")
    try:
        value = float(text)
    except ValueError:
        return None
    return value if b"_" not in text else None


def whole(value: float) -> bool:
    return math.isfinite(value) and value == int(value)


def pairs(
    line: bytes, pattern: re.Pattern[bytes], names: Mapping[bytes, tuple[str, float]] | None = None, at: int = 0
) -> list[Field]:
    """Every `key value` the pattern finds (its groups 1 and 2) from `at` on; keys not in `names` keep their own."""
    found: dict[str, Field] = {}
    for match in pattern.finditer(line, at):
        key = match[1].strip()
        name, factor = (names or {}).get(key, ("", 1.0))
        if not name:
            name = key.decode("utf-8", "replace")[:80]
        if name not in found and number(match[2]) is not None:
            found[name] = Field(name, *match.span(2), factor)
    return list(found.values())
