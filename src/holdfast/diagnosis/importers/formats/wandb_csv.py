"""A chart exported from W&B as CSV: columns `run - metric`, `run - metric__MIN` and `run - metric__MAX` for each run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis.importers.reading.column_names import ColumnRoles
from holdfast.diagnosis.importers.reading.csv_file import CsvFile, read_csv_records
from holdfast.diagnosis.importers.reading.log_source import LogSource
from holdfast.diagnosis.importers.reading.metric_records import MetricRecords
from holdfast.diagnosis.importers.reading.normalize import normalize
from holdfast.diagnosis.model.table import Table

NAME = "wandb_csv"
DESCRIPTION = "a W&B chart exported as CSV: `run - metric`, `__MIN`, `__MAX`; gives a table for each run"
MIN_SAMPLED_POINTS = 495
"""W&B samples a chart to about 500 points."""
_RUN_LIST_COLUMNS = {"Name", "State", "Notes", "User", "Tags", "Created", "Runtime", "Sweep"}


def looks_like(names: list[str]) -> bool:
    return any(name.endswith(("__MIN", "__MAX")) and " - " in name for name in names) or _is_run_list(names)


def _is_run_list(names: list[str]) -> bool:
    return len(_RUN_LIST_COLUMNS & set(names)) >= 5


def read(source: LogSource, mapping: Mapping[str, str] | None = None) -> list[Table]:
    """Return a table for each run of the chart. Raises LogRefused for a list of runs and for a chart without values."""
    names = CsvFile(source).header
    if _is_run_list(names):
        rows = sum(1 for _ in CsvFile(source))
        reason = (
            f"a W&B table of runs ({rows} rows with last values), not a curve. Export a chart, or the run's history"
        )
        raise LogRefused(source.name, reason)
    records = read_csv_records(source, NAME)
    step = next((name for name in names if " - " not in name), None)
    runs: dict[str, dict[str, str]] = {}
    for name in names:
        run, mark, metric = name.rpartition(" - ")
        if mark and name in records.names:
            runs.setdefault(run, {})[metric] = name
    by_run = [_read_run(run, metrics, step, records, mapping) for run, metrics in runs.items()]
    tables = [table for table in by_run if table is not None]
    if not tables:
        raise LogRefused(source.name, "a W&B export without a value in the columns of its runs")
    return tables


def _read_run(
    run: str, metrics: dict[str, str], step: str | None, records: MetricRecords, mapping: Mapping[str, str] | None
) -> Table | None:
    """Return the table of one run; None if it has no value. `metrics` gives the column of the file for each metric."""
    plain = {metric: name for metric, name in metrics.items() if not metric.endswith(("__MIN", "__MAX"))}
    columns = {**plain, **({"step": step} if step is not None else {})}
    rows: dict[int, dict[str, float]] = {}
    for metric, name in columns.items():
        for row, value in zip(*[cells.tolist() for cells in records.cells(name)], strict=True):
            rows.setdefault(row, {})[metric] = value
    run_records = MetricRecords(records.path, NAME)
    for row in sorted(rows):
        if len(rows[row]) > (step is not None):
            run_records.add(rows[row])
    if not run_records.length:
        return None
    roles = ColumnRoles(run_records.names, mapping, strict=False)
    roles.step = "step" if step is not None else None
    table = run_records.to_table(roles)
    table.facts["run"] = run
    if step is not None and step != "Step":
        table.facts["step_is"] = step
    _add_sampling_limits(table, metrics, plain, records)
    return normalize(table, unfold_epochs=False, drop_repeats=False)


def _add_sampling_limits(table: Table, metrics: dict[str, str], plain: dict[str, str], records: MetricRecords) -> None:
    """Add limits for points that are means of several steps, and for charts that W&B sampled."""
    averaged = points = 0
    for metric in plain:
        if f"{metric}__MIN" in metrics and f"{metric}__MAX" in metrics:
            low_rows, low = records.cells(metrics[f"{metric}__MIN"])
            high_rows, high = records.cells(metrics[f"{metric}__MAX"])
            _, i, j = np.intersect1d(low_rows, high_rows, return_indices=True)
            averaged += int((low[i] != high[j]).sum())
            points += len(i)
    if averaged:
        text = f"{averaged} of {points} points are means of several steps (their __MIN and __MAX differ)"
        table.add_limit("averaged", text)
    interval = table.step_interval()
    if len(table) >= MIN_SAMPLED_POINTS and interval > 1:
        table.add_limit("downsampled", f"W&B sampled the chart: {len(table)} points, one every {interval:g} steps")
