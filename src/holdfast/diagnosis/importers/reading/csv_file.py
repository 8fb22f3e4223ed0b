"""Reads comma-separated files, and restores NaN that a writer left as an empty cell."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping

import numpy as np

from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis.importers.reading.column_blocks import MAX_COLUMNS
from holdfast.diagnosis.importers.reading.column_names import ColumnRoles, canonical_column, is_step, loss_rank
from holdfast.diagnosis.importers.reading.log_source import LogSource, decode
from holdfast.diagnosis.importers.reading.metric_records import MetricRecords, to_float
from holdfast.diagnosis.importers.reading.normalize import add_source_limits
from holdfast.diagnosis.model.table import Table

MAX_HEADER_COLUMNS = 65536
_DELIMITERS = (",", "\t", ";")
_HEAD_BYTES = 1 << 20
_COMMENTS = re.compile(rb"\A(?:\s*#[^\n]*\n)+(?=\s*['\"]?[A-Za-z_])")
_MIN_NUMBERS = 8
_LOGGED_WITH_LOSS = 0.8
"""A column is logged with the loss if it has a value in this share of the rows that have a loss."""


class CsvFile:
    """Reads a file row by row, and counts the rows that do not fit the header."""

    def __init__(self, source: LogSource) -> None:
        self.source = source
        self.unreadable_rows = 0
        sample = _without_comments(source.sample)
        first_line = sample.lstrip(b"\n").split(b"\n", 1)[0]
        self.delimiter = max(_DELIMITERS, key=lambda mark: first_line.count(mark.encode()))
        self.header = _parse_header(sample, self.delimiter)
        self.is_bare = not self.header
        if name := _name_of_numbers(sample, source.path.stem):
            self.header, self.is_bare = [name], _is_number(sample.split(maxsplit=1)[0])

    def _lines(self) -> Iterator[str]:
        for chunk in self.source.chunks():
            yield from filter(None, decode(chunk).split("\n"))

    def __iter__(self) -> Iterator[list[str]]:
        """Yield the rows after the header. Skips a header that a restarted writer repeated."""
        reader = csv.reader(self._lines(), delimiter=self.delimiter)
        is_first = not self.is_bare
        while True:
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error:
                self.unreadable_rows += 1
                continue
            if is_first or row == self.header:
                is_first = False
            elif any(row[len(self.header) :]):
                self.unreadable_rows += 1
            else:
                yield row


def _parse_row(line: bytes, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([decode(line)], delimiter=delimiter))
    except (csv.Error, StopIteration):
        return []


def _without_comments(sample: bytes) -> bytes:
    """Return the first bytes of a sample without lines of comments in front of the header."""
    return _COMMENTS.sub(b"", sample[:_HEAD_BYTES])


def _parse_header(sample: bytes, delimiter: str) -> list[str]:
    """Return the names in the first line that is not blank; empty if that line is no header."""
    first_line = next((line for line in sample.split(b"\n") if line.strip()), b"")
    row = _parse_row(first_line, delimiter)
    return [name.strip() for name in row] if 2 <= len(row) <= MAX_HEADER_COLUMNS else []


def _is_number(cell: bytes) -> bool:
    cell = cell.strip(b" \t,;")
    return b"," not in cell and to_float(decode(cell)) is not None


def _name_of_numbers(sample: bytes, stem: str) -> str:
    """Return the name of a column that stands alone: the line above it, or the name of the file; "" if it does not."""
    lines = [line for line in sample.split(b"\n", 50)[:50] if line.strip()]
    if len(lines) < _MIN_NUMBERS or not all(map(_is_number, lines[1:])):
        return ""
    name = stem if _is_number(lines[0]) else decode(lines[0]).strip(" \t,;\"'")
    return re.sub("(?i)losses", "loss", name) if re.match(r"\w[\w ./-]{0,80}$", name) else ""


def detect_header(sample: bytes, stem: str = "") -> list[str]:
    """Return the header if the sample is a table, else an empty list. A single column may take its name from the file.

    In a table at least half of the rows have as many cells as the header, and a third of the cells are numbers.
    """
    sample = _without_comments(sample)
    if name := _name_of_numbers(sample, stem):
        return [name]
    for delimiter in _DELIMITERS:
        names = _parse_header(sample, delimiter)
        if not names or any(len(name) > 300 or to_float(name) is not None for name in names):
            continue
        if len(set(names)) < len(names) / 2:
            continue
        lines = [line for line in sample.split(b"\n", 50)[:50] if line.strip()][1:]
        matching_rows = filled = numbers = 0
        for line in lines:
            row = _parse_row(line, delimiter)
            is_number = [to_float(cell) is not None for cell in row if cell]
            if len(row) == len(names) and any(is_number):
                matching_rows, filled, numbers = matching_rows + 1, filled + len(is_number), numbers + sum(is_number)
        if matching_rows and matching_rows >= 0.5 * len(lines) and numbers * 3 >= filled:
            return names
    return []


def read_csv_records(source: LogSource, format_name: str, mapping: Mapping[str, str] | None = None) -> MetricRecords:
    """Return every cell that holds a number. Raises LogRefused if the file has no header."""
    file = CsvFile(source)
    if not file.header:
        raise LogRefused(source.name, "no header line of comma-separated names")
    names = file.header
    records = MetricRecords(source.name, format_name)
    kept = _columns_to_keep(names, mapping)
    records.dropped_columns = {name[:200] for name in names} - {names[i][:200] for i in kept}
    key, value = _long_columns(names)
    for row in file:
        if key is not None and len(row) == len(names):  # one metric a row
            row[key], row[value], named = "", "", {row[key][:200]: row[value]}
            records.add({**{names[i]: row[i] for i in kept if row[i] and i != key}, **named})
            continue
        records.add({names[i]: row[i] for i in kept if i < len(row) and row[i]})
    records.unreadable_rows = file.unreadable_rows
    return records


def _long_columns(names: list[str]) -> tuple[int | None, int]:
    """Return the positions of a metric's name and of its value in a table with one metric and a step in each row."""
    lower = [name.lower() for name in names]
    key = next((lower.index(name) for name in ("metric", "key", "tag", "metric_name") if name in lower), None)
    return (key, lower.index("value")) if "value" in lower and any(map(is_step, names)) else (None, 0)


def _columns_to_keep(names: list[str], mapping: Mapping[str, str] | None) -> list[int]:
    """Return the positions of the columns to keep: all, or if there are too many, the known names first."""
    if len(names) <= MAX_COLUMNS:
        return list(range(len(names)))
    mapped = set((mapping or {}).values())
    known = [
        i
        for i, name in enumerate(names)
        if name in mapped or is_step(name) or loss_rank(name) is not None or canonical_column(name)[0] != name
    ]
    return sorted(list(dict.fromkeys([*known, *range(len(names))]))[:MAX_COLUMNS])


def fill_hidden_nan(records: MetricRecords, roles: ColumnRoles) -> dict[str, int]:
    """Fill in NaN that pandas wrote as an empty cell. Returns the number of cells for each filled column.

    A row hides NaN if it has a step and nothing else, or if it lacks the loss but has columns that are logged with the
    loss. A row with evaluations hides nothing.
    """
    if roles.step is None or roles.loss is None or not records.count(roles.loss):
        return {}

    def rows_with(name: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        rows = np.zeros(records.length, dtype=bool)
        rows[records.cells(name)[0]] = True
        return rows

    has_loss = rows_with(roles.loss)
    has_other, has_eval, has_companion = (np.zeros(records.length, dtype=bool) for _ in range(3))
    companions: list[str] = []
    for name in records.names:
        if name in (roles.step, roles.loss) or roles.train.get(name, ("", 0.0))[0] == "epoch":
            continue
        rows, _ = records.cells(name)
        has_other[rows] = True
        if has_loss[rows].sum() >= _LOGGED_WITH_LOSS * has_loss.sum():
            companions.append(name)
            has_companion[rows] = True
        else:
            has_eval[rows] = True
    is_record = has_loss | (rows_with(roles.step) & ~has_eval & (has_companion | ~has_other))
    filled = {}
    for name in [roles.loss, *[n for n in companions if roles.train.get(n, ("", 0.0))[0] == "grad_norm"]]:
        is_hidden = is_record & ~rows_with(name)
        is_hidden[records.text_rows.get(name, [])] = False  # `n/a` is not an empty cell
        hidden = np.flatnonzero(is_hidden)
        if len(hidden):
            filled[name] = len(hidden)
            records.fill(name, hidden, float("nan"))
    return filled


def read_csv_table(
    source: LogSource, format_name: str, mapping: Mapping[str, str] | None, *, blanks_may_be_nan: bool
) -> Table:
    """Read a file into a table. Raises LogRefused if it has no training column."""
    records = read_csv_records(source, format_name, mapping)
    roles = ColumnRoles(records.names, mapping)
    hidden = fill_hidden_nan(records, roles) if blanks_may_be_nan else {}
    if not records.names or set(records.names) <= {roles.step}:
        raise LogRefused(source.name, f"a table of {records.length} rows with no column of numbers except the step")
    table = records.to_table(roles)
    if hidden:
        counts = ", ".join(f"{count} of {roles.train[name][0]}" for name, count in hidden.items())
        table.add_limit("nan_hidden", f"empty cells ({counts}) are read as NaN: the writer left NaN blank")
    add_source_limits(table, source)
    if not table.columns and not table.evals:
        raise LogRefused(source.name, f"no training metric found. Columns: {', '.join(records.names[:8])}")
    return table
