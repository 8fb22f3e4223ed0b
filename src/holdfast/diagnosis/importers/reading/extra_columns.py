"""The columns of metrics.jsonl that MetricsRow has no field for: each becomes a column of the table under its own name.

A nested object of numbers, such as the seconds of each phase, becomes one column a key: "phases.forward".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from holdfast.diagnosis.importers.reading.column_blocks import MAX_COLUMNS, Floats
from holdfast.diagnosis.importers.reading.log_source import LogSource

_KEY = re.compile(rb'[{,]\s*("(?:[^"\\]|\\.){1,200}")\s*:')
_NO_FIELD = re.compile(r'[\x00-\x1f"\\]')
"""the decoder has no fields with these characters in their names"""
NOT_METRICS = {
    "attempt", "status", "clip", "flags", "overflow", "loss_limit", "grad_limit", "data", "weight", "batches", "group",
    "time",
}  # fmt: skip
"""what a row holds beside measurements"""


def find_extra(source: LogSource, known: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the keys of the rows that are not `known`, in the order of their first use, and those that are not read."""
    lines = source.sample.splitlines()
    keys = dict.fromkeys(key for line in lines for key in _KEY.findall(line))
    names: dict[str, None] = {}
    for key in keys:
        try:
            names[msgspec.json.decode(key, type=str)] = None
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    # A key inside a nested object is found here too: its row lacks it, and it stays without a value.
    extra = [name for name in names if name not in known and name not in NOT_METRICS]
    readable = [name for name in extra if not _NO_FIELD.search(name)][:MAX_COLUMNS]
    return readable, [name for name in extra if name not in readable]


def row_type(base: type[msgspec.Struct], extra: list[str]) -> type[msgspec.Struct]:
    """Return `base` with one more field of any type for each extra name: extra_0, extra_1, ..."""
    fields = {f"extra_{n}": name for n, name in enumerate(extra)}
    names = [(field, Any, None) for field in fields]
    return msgspec.defstruct("ExtendedRow", names, bases=(base,), rename=fields, gc=False)


def to_columns(name: str, values: Iterable[Any]) -> dict[str, Floats]:
    """Return the numbers of one extra key as columns; NaN where there is none. Text gives no column."""
    items = list(values)
    types, columns = set(map(type, items)), {}
    if types & {int, float}:
        columns[name] = _numbers(items)
    if dict in types:
        dicts = items if types == {dict} else [item if type(item) is dict else {} for item in items]
        for key in list(dict.fromkeys(chain.from_iterable(dicts)))[:MAX_COLUMNS]:
            columns[f"{name}.{key}"] = _numbers([each.get(key) for each in dicts])
    arrays = {key: _to_array(column) for key, column in columns.items()}
    return {key: array for key, array in arrays.items() if not np.isnan(array).all()}


def _numbers(items: list[Any]) -> list[Any]:
    if set(map(type, items)) <= {int, float}:
        return items
    return [item if type(item) in (int, float) else None for item in items]


def _to_array(column: list[Any]) -> Floats:
    try:
        return np.array(column, dtype=np.float64)
    except OverflowError:  # an integer beyond the range of a float
        return np.array([None if type(v) is int and abs(v) > 2**1023 else v for v in column], dtype=np.float64)
