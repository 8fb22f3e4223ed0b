"""TensorBoard: event files, and folders of them. All event files of one folder are one run."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis.importers.reading.column_blocks import Bools, Floats
from holdfast.diagnosis.importers.reading.column_names import ColumnRoles
from holdfast.diagnosis.importers.reading.log_source import LogSource
from holdfast.diagnosis.importers.reading.normalize import normalize
from holdfast.diagnosis.importers.reading.tfrecord import DamagedRecord, parse_scalars, read_records
from holdfast.diagnosis.model.table import Series, Table

NAME = "tensorboard"
DESCRIPTION = "TensorBoard event files, or a folder of them (each folder is one run)"
MAX_TAGS = 1024


def looks_like(head: bytes) -> bool:
    return len(head) >= 24 and head[4:8] == b"\0\0\0\0" and b"brain.Event" in head[:64]


class TagValues:
    """Collects the steps and values of every tag, in the order of the files."""

    def __init__(self) -> None:
        self.steps: dict[str, array[float]] = {}
        self.values: dict[str, array[float]] = {}
        self.read_error = ""
        self.dropped_values = 0
        self.unreadable_events = 0

    def read(self, source: LogSource) -> None:
        error_text = ""
        try:
            with source.open() as file:
                for record in read_records(file):
                    try:
                        for step, tag, value in parse_scalars(record):
                            self._add(step, tag, value)
                    except ValueError:
                        self.unreadable_events += 1
        except DamagedRecord as error:
            error_text = str(error)
        except (OSError, EOFError, zlib.error) as error:
            error_text = f"cannot be read to its end: {error}"
        if error_text and not self.read_error:
            self.read_error = f"{source.path.name}: {error_text}"

    def _add(self, step: int, tag: str, value: float) -> None:
        if tag not in self.steps:
            if len(self.steps) >= MAX_TAGS:
                self.dropped_values += 1
                return
            self.steps[tag], self.values[tag] = array("d"), array("d")
        self.steps[tag].append(step)
        self.values[tag].append(value)

    def series(self, tag: str) -> Series:
        return Series(np.frombuffer(self.steps[tag]), np.frombuffer(self.values[tag]))


def read(source: LogSource, mapping: Mapping[str, str] | None = None) -> list[Table]:
    return [_read_run(source.name, [source], mapping)]


def read_folder(folder: Path, files: Sequence[Path], mapping: Mapping[str, str] | None = None) -> list[Table]:
    """Return a table for each folder with event files. Raises LogRefused if none holds a scalar."""
    runs: dict[Path, list[Path]] = {}
    for file in sorted(files):
        runs.setdefault(file.parent, []).append(file)
    tables: list[Table] = []
    reason = ""
    for run, run_files in runs.items():
        try:
            tables.append(_read_run(str(run), [LogSource(file) for file in run_files], mapping))
        except LogRefused as error:
            reason = reason or error.reason
    if not tables:
        raise LogRefused(str(folder), f"{len(files)} event files without a scalar; {reason}")
    return tables


def _read_run(path: str, sources: Sequence[LogSource], mapping: Mapping[str, str] | None) -> Table:
    tags = TagValues()
    for source in sources:
        tags.read(source)
    if not tags.steps:
        raise LogRefused(path, "no scalars in the event file" + (f" ({tags.read_error})" if tags.read_error else ""))
    table = Table(path, NAME, np.empty(0))
    if tags.read_error:
        table.add_limit("truncated", tags.read_error)
    roles = ColumnRoles(list(tags.steps), {k: v for k, v in (mapping or {}).items() if k != "step"})
    if roles.step in tags.steps:
        roles.train[roles.step] = ("step_tag", 1.0)  # every event has its own step; a tag of that name is a metric
    main_tag = roles.loss
    if main_tag not in tags.steps:
        main_tag = max(roles.train, key=lambda tag: len(tags.steps[tag]), default=None)
    if main_tag is not None:
        _add_columns(table, tags, roles, main_tag)
    for tag in roles.evals:
        table.evals[tag] = tags.series(tag)
    if tags.dropped_values:
        table.add_limit("columns_lost", f"{tags.dropped_values} values of more tags are not read")
    if tags.unreadable_events:
        table.dropped = tags.unreadable_events
        table.add_limit("lines_lost", f"{tags.unreadable_events} events cannot be read")
    if len(sources) > 1:
        table.facts["event_files"] = len(sources)
    return normalize(table, unfold_epochs=False, drop_repeats=False)


def _add_columns(table: Table, tags: TagValues, roles: ColumnRoles, main_tag: str) -> None:
    """Use the steps of the main tag as the records. A tag with mostly other steps becomes a series."""
    table.step = tags.series(main_tag).step
    for tag, (column, factor) in roles.train.items():
        series = tags.series(tag)
        values, present = _align(table.step, series)
        if tag != main_tag and column in table.columns:
            column = tag
        if present.sum() * 2 >= len(series.value) or tag == main_tag:
            table.columns[column], table.present[column] = values * factor, present
        else:
            table.evals[tag] = series


def _align(steps: Floats, series: Series) -> tuple[Floats, Bools]:
    """Return the values of a tag at these steps. After a restart steps occur twice; runs are matched in order."""
    if len(series.step) == len(steps) and (series.step == steps).all():
        return series.value.copy(), np.ones(len(steps), dtype=bool)
    bounds = [0, *(np.flatnonzero(np.diff(steps) < 0) + 1), len(steps)]
    series_bounds = [0, *(np.flatnonzero(np.diff(series.step) < 0) + 1), len(series.step)]
    if len(bounds) != len(series_bounds):
        bounds, series_bounds = [0, len(steps)], [0, len(series.step)]
    values, present = np.full(len(steps), np.nan), np.zeros(len(steps), dtype=bool)
    for i in range(len(bounds) - 1):
        start, end = series_bounds[i], series_bounds[i + 1]
        index_of_step = {step: k for k, step in enumerate(series.step[start:end].tolist(), start)}
        for k in range(bounds[i], bounds[i + 1]):
            index = index_of_step.get(float(steps[k]))
            if index is not None:
                values[k], present[k] = series.value[index], True
    return values, present
