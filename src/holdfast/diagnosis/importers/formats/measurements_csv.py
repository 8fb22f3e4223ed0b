"""AlgoPerf's measurements.csv: training rows and evaluation rows in one table, with NaN as empty cells."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.diagnosis.importers.reading.csv_file import read_csv_table
from holdfast.diagnosis.importers.reading.log_source import LogSource
from holdfast.diagnosis.importers.reading.normalize import normalize
from holdfast.diagnosis.model.table import Table

NAME = "measurements_csv"
DESCRIPTION = "AlgoPerf measurements.csv: `global_step`, `loss`, `grad_norm`, and evaluations on separate rows"
_EVAL_COLUMNS = {"score", "total_duration", "accumulated_submission_time", "accumulated_eval_time", "preemption_count"}


def looks_like(names: list[str]) -> bool:
    return "global_step" in names and len(_EVAL_COLUMNS & set(names)) >= 2


def read(source: LogSource, mapping: Mapping[str, str] | None = None) -> list[Table]:
    table = read_csv_table(source, NAME, mapping, blanks_may_be_nan=True)
    return [normalize(table, unfold_epochs=False, drop_repeats=False)]
