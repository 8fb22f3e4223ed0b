"""A chart exported from W&B as CSV: a column for each run, `run - metric`, with `__MIN` and `__MAX` beside it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis.importers.reading.column_names import Columns
from holdfast.diagnosis.importers.reading.csv_file import CsvFile, collect
from holdfast.diagnosis.importers.reading.normalize import finish, limit
from holdfast.diagnosis.importers.reading.records import Records
from holdfast.diagnosis.importers.reading.source import Source
from holdfast.diagnosis.model.table import Table

NAME = "wandb_csv"
DESCRIPTION = "a W&B chart exported as CSV: `run - metric`, `__MIN`, `__MAX`; a table for each run"
_OF_RUNS = {"Name", "State", "Notes", "User", "Tags", "Created", "Runtime", "Sweep"}


def looks_like(names: list[str]) -> bool:
    return any(name.endswith(("__MIN", "__MAX")) and " - " in name for name in names) or is_run_table(names)


def is_run_table(names: list[str]) -> bool:
    return len(_OF_RUNS & set(names)) >= 5


def read(source: Source, mapping: Mapping[str, str] | None = None) -> list[Table]:
    names = CsvFile(source).header
    if is_run_table(names):
        rows = sum(1 for _ in CsvFile(source))
        raise LogRefused(
            source.name,
            f"a W&B table of runs ({rows} rows, one a run, with their last values), not a curve; export the chart "
            "of a metric over the step, or the run's history",
        )
    records = collect(source, NAME)
    step = next((name for name in names if " - " not in name), None)
    runs: dict[str, dict[str, str]] = {}
    for name in names:
        run, mark, metric = name.rpartition(" - ")
        if mark and name in records.names:
            runs.setdefault(run, {})[metric] = name
    tables = []
    for run, metrics in runs.items():
        table = _run(source.name, run, metrics, step, records, mapping)
        if table is not None:
            tables.append(table)
    if not tables:
        raise LogRefused(source.name, "a W&B export with no value in the column of any run")
    return tables


def _run(
    path: str, run: str, metrics: dict[str, str], step: str | None, records: Records, mapping: Mapping[str, str] | None
) -> Table | None:
    mine = Records(path, NAME)
    plain = {metric: name for metric, name in metrics.items() if not metric.endswith(("__MIN", "__MAX"))}
    wanted = {**plain, **({"step": step} if step is not None else {})}
    rows: dict[int, dict[str, float]] = {}
    for metric, name in wanted.items():
        at, values = records.raw(name)
        for row, value in zip(at.tolist(), values.tolist(), strict=True):
            rows.setdefault(row, {})[metric] = value
    for row in sorted(rows):
        if len(rows[row]) > (1 if step is not None else 0):
            mine.add(rows[row])
    if not mine.length:
        return None
    columns = Columns(mine.names, mapping, strict=False)
    columns.step = "step" if step is not None else None
    table = mine.table(columns=columns)
    table.facts["run"] = run
    if step is not None and step != "Step":
        table.facts["step_is"] = step
    _spread(table, metrics, plain, records)
    return finish(table, unfold=False, repeats=False)


def _spread(table: Table, metrics: dict[str, str], plain: dict[str, str], records: Records) -> None:
    """Where the lowest and highest value of a point differ, it stands for several steps."""
    apart = points = 0
    for metric in plain:
        if f"{metric}__MIN" in metrics and f"{metric}__MAX" in metrics:
            (at, low), (also, high) = records.raw(metrics[f"{metric}__MIN"]), records.raw(metrics[f"{metric}__MAX"])
            _, i, j = np.intersect1d(at, also, return_indices=True)
            apart += int((low[i] != high[j]).sum())
            points += len(i)
    if apart:
        limit(table, "averaged", f"{apart} of {points} points stand for several steps (their __MIN and __MAX differ)")
    if len(table) >= 495 and table.step_interval() > 1:
        limit(
            table, "downsampled", f"W&B charts are sampled: {len(table)} points, {table.step_interval():g} steps apart"
        )
