"""Reads tables with named columns: CSV, JSON lines, JSON arrays, lists by name. A TableDescription holds what is special."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis.importers.reading.column_names import ColumnRoles, columns_and_hint
from holdfast.diagnosis.importers.reading.csv_file import read_csv_table
from holdfast.diagnosis.importers.reading.json_lines import JsonLines, load_json
from holdfast.diagnosis.importers.reading.log_source import LogSource
from holdfast.diagnosis.importers.reading.metric_records import MetricRecords
from holdfast.diagnosis.importers.reading.normalize import add_averaged_limit, add_source_limits, normalize
from holdfast.diagnosis.model.table import Table

CSV, JSON_LINES, JSON_VALUE = "csv", "json_lines", "json_value"
MAX_JSON_BYTES = 64 << 20
_MAX_EPOCHS = 2000
"""longer lists by name hold a value for each step"""


@dataclass(frozen=True)
class TableDescription:
    """Describes one format of tables. A file is of this format if it holds all columns in `needs` and `when` is true."""

    name: str
    description: str
    kind: str
    needs: tuple[str, ...] = ()
    when: Callable[[list[str]], bool] | None = None
    skip: tuple[str, ...] = ()
    """names that are not read"""
    signals: Mapping[str, str] = field(default_factory=dict)
    """Holdfast's column -> name in the log, where the name alone does not tell"""
    facts: Mapping[str, str] = field(default_factory=dict)
    """name in the log -> fact about the run"""
    parts: tuple[str, ...] = ()
    """columns whose sum is the loss"""
    blanks_may_be_nan: bool = True
    counts_within_epoch: bool = True
    drop_repeats: bool = True
    averaged: bool = False
    """a logged loss is the mean of the steps since the record before"""

    def fits(self, kind: str, names: list[str]) -> bool:
        return kind == self.kind and set(self.needs) <= set(names) and (self.when is None or self.when(names))

    def read(self, source: LogSource, mapping: Mapping[str, str] | None = None) -> list[Table]:
        """Return the table of a file. Raises LogRefused if it holds no metric."""
        mapping = {**self.signals, **(mapping or {})}
        if self.kind == CSV:
            table = read_csv_table(source, self.name, mapping, blanks_may_be_nan=self.blanks_may_be_nan)
        else:
            table = self._read_json(source, mapping)
        if self.averaged and table.has("loss"):
            add_averaged_limit(table)
        normalize(table, unfold_epochs=self.counts_within_epoch, drop_repeats=self.drop_repeats, parts=self.parts)
        return [table]

    def _read_json(self, source: LogSource, mapping: Mapping[str, str] | None) -> Table:
        records = MetricRecords(source.name, self.name)
        lines = JsonLines(source)
        skipped = {*self.skip, *self.facts}
        facts: dict[str, Any] = {}
        for row in lines if self.kind == JSON_LINES else rows_of_json(source):
            facts |= {self.facts[name]: row[name] for name in self.facts if isinstance(row.get(name), int | float)}
            records.add({name: value for name, value in row.items() if name not in skipped})
        records.unreadable_rows = lines.unreadable_lines
        table = records.to_table(ColumnRoles(records.names, mapping))
        if not table.has("loss") and not table.evals and not (len(table) and set(table.columns) - {"epoch", "tokens"}):
            reason = f"{records.length} JSON records with no loss or other metric. {columns_and_hint(records.names)}"
            raise LogRefused(source.name, reason)
        table.facts.update(facts)
        if lines.last_line_is_cut:
            table.add_limit("truncated", "the last line is incomplete")
        add_source_limits(table, source)
        return table


def rows_of_json(source: LogSource) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSON value: a list of objects, or an object of lists with one value for each record.

    Raises LogRefused if the value holds neither.
    """
    try:
        value = load_json(source.text(MAX_JSON_BYTES))
    except ValueError as error:
        raise LogRefused(source.name, f"not complete JSON: {str(error)[:200]}") from None
    rows = find_rows(value)
    if rows is None:
        raise LogRefused(source.name, "JSON without a list of records, and without lists of numbers by name")
    yield from rows


def find_rows(value: Any, depth: int = 3) -> list[dict[str, Any]] | None:
    """Return the records in a JSON value: the longest list of objects, or lists of numbers by name as records."""
    if isinstance(value, list):
        objects = [row for row in value if isinstance(row, dict)]
        return objects if len(objects) * 2 > len(value) else None
    if not isinstance(value, dict) or depth == 0:
        return None
    # pandas writes a column as an object: {"loss": {"0": 2.5, "1": 2.4}}
    columns = {k: list(v.values()) if isinstance(v, dict) and all(map(str.isdigit, v)) else v for k, v in value.items()}
    lists = {name: inner for name, inner in columns.items() if isinstance(inner, list) and _is_numeric(inner)}
    if lists:
        length = max(len(inner) for inner in lists.values())
        lists = {name: inner for name, inner in lists.items() if len(inner) == length}
        has_step = length > _MAX_EPOCHS or any(name in ("epoch", "step", "iteration") for name in lists)
        return [
            {**({} if has_step else {"epoch": i + 1}), **{name: inner[i] for name, inner in lists.items()}}
            for i in range(length)
        ]
    found = [rows for inner in value.values() if (rows := find_rows(inner, depth - 1))]
    return max(found, key=len, default=None)


def _is_numeric(values: list[Any]) -> bool:
    """Return whether a list holds numbers only, or None for a number that JSON cannot write."""
    return bool(values) and all((isinstance(v, int | float) and not isinstance(v, bool)) or v is None for v in values)
