"""Records that come as names and values: sorted into training columns and evaluations once all names are known."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from holdfast.diagnosis.importers.reading.blocks import MOST_COLUMNS
from holdfast.diagnosis.importers.reading.column_names import Columns
from holdfast.diagnosis.model.table import Limit, Series, Table


class Records:
    """Collects `{name: value}` rows. What is not a number is left out, and counted when it should have been one."""

    def __init__(self, path: str, form: str) -> None:
        self.path, self.form = path, form
        self.length = 0
        self.columns_lost: set[str] = set()
        self.broken = 0
        """rows that could not be read"""
        self._values: dict[str, array[float]] = {}
        self._rows: dict[str, array[int]] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        at = self.length
        self.length += 1
        for name, value in row.items():
            if isinstance(value, dict):
                self._nested(at, name, value)
            elif (number := as_number(value)) is not None:
                self._put(at, name, number)

    def _nested(self, at: int, name: str, values: Mapping[str, Any]) -> None:
        for inner, value in values.items():
            if (number := as_number(value)) is not None:
                self._put(at, f"{name}/{inner}", number)

    def _put(self, at: int, name: str, number: float) -> None:
        column = self._values.get(name)
        if column is None:
            if len(self._values) >= MOST_COLUMNS or len(name) > 200:
                if len(self.columns_lost) < MOST_COLUMNS:
                    self.columns_lost.add(name[:200])
                return
            column = self._values[name] = array("d")
            self._rows[name] = array("q")
        column.append(number)
        self._rows[name].append(at)

    def fill(self, name: str, rows: Any, value: float) -> None:
        """Put one value into these rows of a column."""
        count = len(rows)  # new arrays: the old ones may be in use as views
        self._rows[name] = self._rows[name] + array("q", [int(row) for row in rows])
        self._values[name] = self._values[name] + array("d", [value]) * count

    @property
    def names(self) -> list[str]:
        return list(self._values)

    def count(self, name: str) -> int:
        return len(self._values.get(name, ()))

    def table(
        self, mapping: Mapping[str, str] | None = None, *, columns: Columns | None = None, first: int = 0
    ) -> Table:
        """The table. Rows without any training column but the step and epoch are evaluations only."""
        columns = columns or Columns(self.names, mapping)
        table = Table(self.path, self.form, np.empty(0))
        steps = np.full(self.length, np.nan)
        if columns.step is not None and columns.step in self._values:
            rows, values = self.raw(columns.step)
            steps[rows] = values
        elif self.length:
            steps = np.arange(first, first + self.length, dtype=np.float64)
            table.limits.append(
                Limit("no_step", f"the records carry no step; their running number, from {first}, stands for it")
            )
        return self._fill(table, columns, steps)

    def _fill(self, table: Table, columns: Columns, steps: np.ndarray[Any, np.dtype[np.float64]]) -> Table:
        weak = {"epoch", "_runtime", "_timestamp", "timestamp", "time", "wall_time"}
        train = np.zeros(self.length, dtype=bool)
        strong = [name for name, (ours, _) in columns.train.items() if ours == "loss"]
        if not any(self.count(name) for name in strong):
            strong = [name for name, (ours, _) in columns.train.items() if ours not in weak]
        for name in strong:
            train[self.raw(name)[0]] = True
        place = np.cumsum(train) - 1
        table.step = steps[train]
        for name, (ours, factor) in columns.train.items():
            rows, values = self.raw(name)
            inside = train[rows]
            if inside.any():
                column = table.columns.setdefault(ours, np.full(len(table.step), np.nan))
                there = table.present.setdefault(ours, np.zeros(len(table.step), dtype=bool))
                column[place[rows[inside]]] = values[inside] * factor
                there[place[rows[inside]]] = True
            elif len(rows) and ours not in weak:
                table.evals[name] = Series(_forward(steps)[rows], values)
        for name in columns.evals:
            rows, values = self.raw(name)
            if len(rows):
                table.evals[name] = Series(_forward(steps)[rows], values)
        if self.broken:
            table.dropped += self.broken
            table.limits.append(Limit("lines_lost", f"{self.broken} lines cannot be read"))
        if self.columns_lost:
            table.limits.append(Limit("columns_lost", f"{len(self.columns_lost)} further columns are not kept"))
        return table

    def raw(self, name: str) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.float64]]]:
        """The rows a column has a value in, and the values."""
        if name not in self._values:
            return np.empty(0, dtype=np.int64), np.empty(0)
        return np.frombuffer(self._rows[name], dtype=np.int64), np.frombuffer(self._values[name], dtype=np.float64)


def _forward(steps: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Steps with the gaps filled by the step before."""
    known = np.flatnonzero(~np.isnan(steps))
    if not len(known):
        return np.zeros(len(steps))
    before = np.searchsorted(known, np.arange(len(steps)), side="right") - 1
    return np.where(before >= 0, steps[known[np.maximum(before, 0)]], 0.0)


def as_number(value: Any) -> float | None:
    """A number, or text that is one, or the words W&B and strict JSON writers use for what JSON lacks."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if isinstance(value, str) and len(value) <= 40:
        text = value.strip().replace(",", "")
        if not text or "_" in text or not (text[0] in "0123456789.+-" or text.lower() in ("nan", "inf", "infinity")):
            return None
        try:
            return float(text)
        except ValueError:
            return None
    return None


def loads(data: bytes | str) -> Any:
    """JSON, with NaN and Infinity as Python writes them. ValueError for anything else, however deep."""
    import json

    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        pass
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deep") from None
