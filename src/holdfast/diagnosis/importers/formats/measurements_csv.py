"""AlgoPerf's measurements.csv: training rows and evaluation rows in one table, NaN as empty cells."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.diagnosis.importers.reading.csv_file import build
from holdfast.diagnosis.importers.reading.normalize import finish
from holdfast.diagnosis.importers.reading.source import Source
from holdfast.diagnosis.model.table import Table

NAME = "measurements_csv"
DESCRIPTION = "AlgoPerf measurements.csv: `global_step`, `loss`, `grad_norm`, and evaluations on rows of their own"
_OF_EVALS = {"score", "total_duration", "accumulated_submission_time", "accumulated_eval_time", "preemption_count"}


def looks_like(names: list[str]) -> bool:
    return "global_step" in names and len(_OF_EVALS & set(names)) >= 2


def read(source: Source, mapping: Mapping[str, str] | None = None) -> list[Table]:
    return [finish(build(source, NAME, mapping, nan=True), unfold=False, repeats=False)]
