"""TensorBoard: event files, and folders of them; each folder is a run, however many files it took."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis.importers.reading.column_names import Columns
from holdfast.diagnosis.importers.reading.normalize import finish, limit
from holdfast.diagnosis.importers.reading.source import Source
from holdfast.diagnosis.importers.reading.tfrecord import Damaged, records, scalars
from holdfast.diagnosis.model.table import Limit, Series, Table

NAME = "tensorboard"
DESCRIPTION = "TensorBoard event files, or a folder of them (a run a folder)"
MOST_TAGS = 1024
Floats = NDArray[np.float64]


def looks_like(head: bytes) -> bool:
    return len(head) >= 24 and head[4:8] == b"\0\0\0\0" and b"brain.Event" in head[:64]


class Tags:
    """Every tag's steps and values, in the order they were written."""

    def __init__(self) -> None:
        self.steps: dict[str, array[float]] = {}
        self.values: dict[str, array[float]] = {}
        self.limits: list[Limit] = []
        self.tags_lost = 0
        self.unreadable = 0

    def read(self, source: Source) -> None:
        try:
            with source.open() as file:
                for record in records(file):
                    try:
                        for step, tag, value in scalars(record):
                            self._put(step, tag, value)
                    except ValueError:
                        self.unreadable += 1
        except Damaged as error:
            self.limits.append(Limit("truncated", f"{source.path.name}: {error}"))
        except (OSError, EOFError, zlib.error) as error:
            self.limits.append(Limit("truncated", f"{source.path.name}: cannot be read to its end: {error}"))

    def _put(self, step: int, tag: str, value: float) -> None:
        if tag not in self.steps:
            if len(self.steps) >= MOST_TAGS:
                self.tags_lost += 1
                return
            self.steps[tag], self.values[tag] = array("d"), array("d")
        self.steps[tag].append(step)
        self.values[tag].append(value)

    def series(self, tag: str) -> Series:
        return Series(np.frombuffer(self.steps[tag]), np.frombuffer(self.values[tag]))


def read(source: Source, mapping: Mapping[str, str] | None = None) -> list[Table]:
    return [_run(source.name, [source], mapping)]


def read_folder(folder: Path, files: Sequence[Path], mapping: Mapping[str, str] | None = None) -> list[Table]:
    """A table for each folder with event files in it."""
    runs: dict[Path, list[Path]] = {}
    for file in sorted(files):
        runs.setdefault(file.parent, []).append(file)
    tables, refused = [], []
    for place, parts in runs.items():
        try:
            tables.append(_run(str(place), [Source(part) for part in parts], mapping))
        except LogRefused as error:
            refused.append(error)
    if not tables:
        raise LogRefused(
            str(folder), f"{len(files)} event files without a scalar; {refused[0].reason if refused else ''}"
        )
    return tables


def _run(path: str, sources: Sequence[Source], mapping: Mapping[str, str] | None) -> Table:
    tags = Tags()
    for source in sources:
        tags.read(source)
    table = Table(path, NAME, np.empty(0))
    for found in tags.limits:
        limit(table, *found)
    if not tags.steps:
        why = f" ({table.limits[0].text})" if table.limits else ""
        raise LogRefused(path, f"an event file with no scalars in it{why}")
    columns = Columns(list(tags.steps), {k: v for k, v in (mapping or {}).items() if k != "step"})
    columns.train.update({columns.step: ("step_tag", 1.0)} if columns.step in tags.steps else {})
    basis = columns.loss if columns.loss in tags.steps else _longest(tags, columns)
    if basis is not None:
        _fill(table, tags, columns, basis)
    for tag in columns.evals:
        table.evals[tag] = tags.series(tag)
    if tags.tags_lost:
        limit(table, "columns_lost", f"{tags.tags_lost} values of further tags are not kept")
    if tags.unreadable:
        table.dropped = tags.unreadable
        limit(table, "lines_lost", f"{tags.unreadable} events cannot be read")
    if len(sources) > 1:
        table.facts["event_files"] = len(sources)
    return finish(table, unfold=False, repeats=False)


def _longest(tags: Tags, columns: Columns) -> str | None:
    return max(columns.train, key=lambda tag: len(tags.steps[tag]), default=None)


def _fill(table: Table, tags: Tags, columns: Columns, basis: str) -> None:
    main = tags.series(basis)
    table.step = main.step
    for tag, (ours, factor) in columns.train.items():
        series = tags.series(tag)
        values, there = _align(main.step, series)
        if tag != basis and ours in table.columns:
            ours = tag
        if there.sum() * 2 >= len(series.value) or tag == basis:
            table.columns[ours], table.present[ours] = values * factor, there
        else:
            table.evals[tag] = series


def _align(steps: Floats, series: Series) -> tuple[Floats, NDArray[np.bool_]]:
    """A tag's values at the steps of another. After a restart steps come twice: stretches are matched in order."""
    if len(series.step) == len(steps) and (series.step == steps).all():
        return series.value.copy(), np.ones(len(steps), dtype=bool)
    mine = [0, *(np.flatnonzero(np.diff(steps) < 0) + 1), len(steps)]
    theirs = [0, *(np.flatnonzero(np.diff(series.step) < 0) + 1), len(series.step)]
    if len(mine) != len(theirs):
        mine, theirs = [0, len(steps)], [0, len(series.step)]
    values, there = np.full(len(steps), np.nan), np.zeros(len(steps), dtype=bool)
    for i in range(len(mine) - 1):
        at = {step: k for k, step in enumerate(series.step[theirs[i] : theirs[i + 1]].tolist(), theirs[i])}
        for k in range(mine[i], mine[i + 1]):
            found = at.get(float(steps[k]))
            if found is not None:
                values[k], there[k] = series.value[found], True
    return values, there
