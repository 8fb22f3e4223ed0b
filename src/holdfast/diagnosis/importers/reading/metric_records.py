"""Collects records of names and values, and sorts them into training columns and evaluations once all names are known."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.diagnosis.importers.reading.column_blocks import MAX_COLUMNS, Floats
from holdfast.diagnosis.importers.reading.column_names import (
    COARSE_STEPS,
    ColumnRoles,
    is_eval,
    is_part_of_loss,
    is_perplexity,
    is_step,
    snake_case,
)
from holdfast.diagnosis.importers.reading.normalize import MAX_NOT_RISING, is_one_by_one, use_coarse_step
from holdfast.diagnosis.model.table import Series, Table

_NO_METRIC = {"epoch", "_runtime", "_timestamp", "timestamp", "time", "wall_time"}
"""columns that do not make a row a training record"""
_SPLIT_NAMES = ("mode", "split", "phase", "stage", "subset", "dataset", "set", "type", "prefix")
"""names of texts that say on which data a row is measured"""


_SUMMARY_KEYS = {"mean", "std", "num", "min", "max", "count"}


class MetricRecords:
    """Collects `{name: value}` rows. Leaves out values that are not numbers."""

    def __init__(self, path: str, format_name: str) -> None:
        self.path, self.format_name = path, format_name
        self.length = 0
        self.dropped_columns: set[str] = set()
        self.unreadable_rows = 0
        self.text_rows: dict[str, array[int]] = {}
        """the rows in which a column has text that is no number"""
        self._values: dict[str, array[float]] = {}
        self._rows: dict[str, array[int]] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        split = next((row[name] for name in _SPLIT_NAMES if isinstance(row.get(name), str)), "")
        prefix = f"{split}_" if split and is_eval(split) else ""
        for name, item in row.items():
            value = item[0] if isinstance(item, list) and len(item) == 1 else item
            if isinstance(value, dict):
                if "mean" in value and value.keys() <= _SUMMARY_KEYS:
                    self._add_value(name, to_float(value["mean"]))
                    continue
                for inner_name, inner_value in _flatten(value):
                    self._add_value(f"{name}/{inner_name}", inner_value)
            elif not prefix:
                number = to_float(value)
                self._add_value(name, number)
                if number is None and (name in self.text_rows or len(self.text_rows) < MAX_COLUMNS):
                    self.text_rows.setdefault(name, array("q")).append(self.length)
            elif not is_step(name):
                self._add_value(name if is_eval(name) else prefix + name, to_float(value))
        self.length += 1

    def _add_value(self, name: str, value: float | None) -> None:
        if value is None:
            return
        if name not in self._values:
            if len(self._values) >= MAX_COLUMNS or len(name) > 200:
                if len(self.dropped_columns) < MAX_COLUMNS:
                    self.dropped_columns.add(name[:200])
                return
            self._values[name], self._rows[name] = array("d"), array("q")
        self._values[name].append(value)
        self._rows[name].append(self.length)

    def fill(self, name: str, rows: NDArray[np.int64], value: float) -> None:
        """Put one value into these rows of a column."""
        # New arrays, because numpy views of the old ones may be in use.
        self._rows[name] = self._rows[name] + array("q", rows.tolist())
        self._values[name] = self._values[name] + array("d", [value]) * len(rows)

    @property
    def names(self) -> list[str]:
        return list(self._values)

    def count(self, name: str) -> int:
        return len(self._values.get(name, ()))

    def cells(self, name: str) -> tuple[NDArray[np.int64], Floats]:
        """Return the rows in which a column has a value, and the values."""
        if name not in self._values:
            return np.empty(0, dtype=np.int64), np.empty(0)
        return np.frombuffer(self._rows[name], dtype=np.int64), np.frombuffer(self._values[name], dtype=np.float64)

    def to_table(self, roles: ColumnRoles) -> Table:
        """Return the table. A row with a loss is a training record; without any loss, a row with any metric is one."""
        table = Table(self.path, self.format_name, np.empty(0))
        steps = np.full(self.length, np.nan)
        counts_steps = roles.step is not None and roles.step in self._values
        if roles.step is not None and counts_steps:
            rows, values = self.cells(roles.step)
            steps[rows] = values
        elif self.length:
            steps, table.unit = self._coarse_steps(roles)
        sources = [name for name, (column, _) in roles.train.items() if column == "loss"]
        if not any(self.count(name) for name in sources):
            sources = [name for name in roles.train if is_part_of_loss(name)]
        if not any(self.count(name) for name in sources):
            sources = [name for name in roles.train if is_perplexity(name)]
        if not any(self.count(name) for name in sources):
            sources = [name for name, (column, _) in roles.train.items() if column not in _NO_METRIC]
        is_record = np.zeros(self.length, dtype=bool)
        for name in sources:
            is_record[self.cells(name)[0]] = True
        if not counts_steps and not is_one_by_one(steps[is_record]):
            steps, table.unit = np.arange(self.length, dtype=np.float64), "record"
        record_index = np.cumsum(is_record) - 1
        table.step = steps[is_record]
        filled_steps = _fill_forward(steps)
        evals: list[str] = []
        for name, (column, factor) in roles.train.items():
            rows, values = self.cells(name)
            in_record = is_record[rows]
            if in_record.any():
                at = record_index[rows[in_record]]
                table.columns.setdefault(column, np.full(len(table), np.nan))[at] = values[in_record] * factor
                table.present.setdefault(column, np.zeros(len(table), dtype=bool))[at] = True
            elif column not in _NO_METRIC:
                evals.append(name)
        for name in [*evals, *roles.evals]:
            rows, values = self.cells(name)
            if len(rows):
                table.evals[name] = Series(filled_steps[rows], values)
        if counts_steps and len(table) > 1 and np.mean(np.diff(table.step) <= 0) > MAX_NOT_RISING:
            use_coarse_step(table)  # the number of steps in each episode
        if table.unit == "record":
            table.add_limit("no_step", "the records have no step; they are numbered from 0")
        if self.unreadable_rows:
            table.dropped += self.unreadable_rows
            table.add_limit("lines_lost", f"{self.unreadable_rows} lines cannot be read")
        if self.dropped_columns:
            table.add_limit("columns_lost", f"{len(self.dropped_columns)} more columns are not read")
        return table

    def _coarse_steps(self, roles: ColumnRoles) -> tuple[Floats, str]:
        """Return epochs or ticks as the steps of all rows, or the numbers of the rows, and what they count."""
        for name in roles.train:
            unit = COARSE_STEPS.get(snake_case(name))
            rows, values = self.cells(name)
            if unit and len(rows) and (values == np.round(values)).all():
                steps = np.full(self.length, np.nan)
                steps[rows] = values
                return steps, unit
        return np.arange(self.length, dtype=np.float64), "record"


def _flatten(value: Mapping[str, Any], depth: int = 4) -> Iterator[tuple[str, float | None]]:
    """Yield the numbers of an object, and of the objects inside of it, with their paths."""
    for name, inner in value.items():
        if isinstance(inner, dict) and depth:
            for inner_name, number in _flatten(inner, depth - 1):
                yield f"{name}/{inner_name}", number
        else:
            yield name, to_float(inner)


def _fill_forward(steps: Floats) -> Floats:
    """Return the steps with each gap filled by the step before it; 0 before the first step."""
    known = np.flatnonzero(~np.isnan(steps))
    if not len(known):
        return np.zeros(len(steps))
    before = np.searchsorted(known, np.arange(len(steps)), side="right") - 1
    return np.where(before >= 0, steps[known[np.maximum(before, 0)]], 0.0)


def to_float(value: Any) -> float | None:
    """Return a number, or text that holds one, such as "1,024" or the "NaN" of W&B; None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if isinstance(value, str) and len(value) <= 40:
        text = value.strip().replace(",", "")
        if text and "_" not in text and (text[0] in "0123456789.+-" or text.lower() in ("nan", "inf", "infinity")):
            try:
                return float(text)
            except ValueError:
                return None
    return None
