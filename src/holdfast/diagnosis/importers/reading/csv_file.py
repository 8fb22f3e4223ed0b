"""Comma-separated files: the header, the rows, and the cells that are empty because they held NaN."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis.importers.reading.blocks import MOST_COLUMNS as MOST_KEPT
from holdfast.diagnosis.importers.reading.column_names import Columns, column, is_step, loss_rank
from holdfast.diagnosis.importers.reading.normalize import limit
from holdfast.diagnosis.importers.reading.records import Records, as_number
from holdfast.diagnosis.importers.reading.source import Source, decode
from holdfast.diagnosis.model.table import Table

MOST_COLUMNS = 65536
_TOGETHER = 0.8
"""two columns belong to one record if the second is there in this part of the rows that have the first"""


class CsvFile:
    """A file read row by row; rows that do not fit the header are counted."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.broken = 0
        first = source.sample[: 1 << 20].lstrip(b"\n").split(b"\n", 1)[0]
        self.delimiter = max((",", "\t", ";"), key=lambda mark: first.count(mark.encode()))
        self.header = header(source.sample, self.delimiter)

    def _lines(self) -> Iterator[str]:
        for chunk in self.source.chunks():
            for line in decode(chunk).split("\n"):
                if line:
                    yield line

    def __iter__(self) -> Iterator[list[str]]:
        """Rows after the header. A header repeated by a restarted writer is passed over."""
        reader = csv.reader(self._lines(), delimiter=self.delimiter)
        first = True
        while True:
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error:
                self.broken += 1
                continue
            if first or row == self.header:
                first = False
                continue
            if len(row) > len(self.header):
                self.broken += 1
                continue
            yield row


def header(sample: bytes, delimiter: str = ",") -> list[str]:
    """The names in the first line that is not blank; none if it is not the header of a table."""
    for line in sample[: 1 << 20].split(b"\n"):
        if line.strip():
            try:
                row = next(csv.reader([decode(line)], delimiter=delimiter))
            except (csv.Error, StopIteration):
                return []
            return [name.strip() for name in row] if 2 <= len(row) <= MOST_COLUMNS else []
    return []


def looks_like(sample: bytes) -> list[str]:
    """The header, if the sample is a table: a line of names, and rows of as many cells below it, a third of them numbers."""
    for mark in (",", "\t", ";"):
        names = header(sample, mark)
        if not names or any(len(name) > 300 or as_number(name) is not None for name in names):
            continue
        if len(set(names)) < len(names) / 2:
            continue
        lines = [line for line in sample[: 1 << 20].split(b"\n")[:50] if line.strip()][1:]
        fits = filled = numbers = 0
        for line in lines:
            try:
                row = next(csv.reader([decode(line)], delimiter=mark))
            except (csv.Error, StopIteration):
                continue
            found = [as_number(cell) is not None for cell in row if cell]
            if len(row) == len(names) and any(found):
                fits, filled, numbers = fits + 1, filled + len(found), numbers + sum(found)
        if fits and fits >= 0.5 * len(lines) and numbers * 3 >= filled:
            return names
    return []


def collect(source: Source, form: str, mapping: Mapping[str, str] | None = None) -> Records:
    """Every cell that is a number. A blank cell is no value; whether it hides one is for `hidden_nan` to say."""
    file = CsvFile(source)
    if not file.header:
        raise LogRefused(source.name, "no header line of comma-separated names")
    names = file.header
    records = Records(source.name, form)
    kept = _kept(names, mapping)
    records.columns_lost = {name[:200] for name in names} - {names[i][:200] for i in kept}
    for row in file:
        cells: dict[str, Any] = {}
        for i in kept:
            if i >= len(row):
                break
            if row[i]:
                cells[names[i]] = row[i]
        records.add(cells)
    records.broken = file.broken
    return records


def _kept(names: list[str], mapping: Mapping[str, str] | None) -> list[int]:
    """The places of the columns to keep: all, or of too many those whose names say something, and the first."""
    if len(names) <= MOST_KEPT:
        return list(range(len(names)))
    asked = set((mapping or {}).values())
    known = [
        i
        for i, name in enumerate(names)
        if name in asked or is_step(name) or loss_rank(name) is not None or column(name)[0] != name
    ]
    return sorted(list(dict.fromkeys([*known, *range(len(names))]))[:MOST_KEPT])


def hidden_nan(records: Records, columns: Columns) -> dict[str, int]:
    """Put NaN where pandas wrote it as an empty cell; gives how many for each column.

    A row hides NaN if it has a step and nothing else at all, or if columns that come with the loss are there and the loss
    is not. A row of evaluations is neither.
    """
    if columns.step is None or columns.loss is None or not records.count(columns.loss):
        return {}
    length = records.length
    has_step, has_loss, anything, evals = (np.zeros(length, dtype=bool) for _ in range(4))
    has_step[records.raw(columns.step)[0]] = True
    has_loss[records.raw(columns.loss)[0]] = True
    beside = np.zeros(length, dtype=bool)
    with_loss: list[str] = []
    for name in records.names:
        rows, _ = records.raw(name)
        ours = columns.train.get(name, ("", 0.0))[0]
        if name in (columns.step, columns.loss) or ours == "epoch":
            continue
        anything[rows] = True
        if has_loss[rows].sum() >= _TOGETHER * has_loss.sum():
            with_loss.append(name)
            beside[rows] = True
        else:
            evals[rows] = True
    record = has_loss | (has_step & ~evals & (beside | ~anything))
    found = {}
    for name in [columns.loss, *[n for n in with_loss if columns.train.get(n, ("", 0.0))[0] == "grad_norm"]]:
        there = np.zeros(length, dtype=bool)
        there[records.raw(name)[0]] = True
        gone = np.flatnonzero(record & ~there)
        if len(gone):
            found[name] = len(gone)
            records.fill(name, gone, float("nan"))
    return found


def build(source: Source, form: str, mapping: Mapping[str, str] | None, *, nan: bool) -> Table:
    """The table of a file; `nan`: whether blank cells may hide NaN."""
    records = collect(source, form, mapping)
    columns = Columns(records.names, mapping)
    hidden = hidden_nan(records, columns) if nan else {}
    if not records.names or set(records.names) <= {columns.step}:
        raise LogRefused(source.name, f"a table of {records.length} rows without a column of numbers beside the step")
    table = records.table(columns=columns)
    if hidden:
        told = ", ".join(f"{count} of {columns.train[name][0]}" for name, count in hidden.items())
        limit(
            table, "nan_hidden", f"NaN was written as an empty cell ({told}): these rows count as NaN, not as missing"
        )
    if source.lines_cut:
        limit(table, "lines_cut", f"{source.lines_cut} lines are longer than 1 MB and were read up to there")
    if source.broken:
        limit(table, "truncated", source.broken)
    if not table.columns and not table.evals:
        raise LogRefused(source.name, f"a table without a training column; its columns: {', '.join(records.names[:8])}")
    return table
