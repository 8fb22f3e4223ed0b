"""Any table with a header and a column whose name, or the user's `mapping`, says that it is a step or a loss."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.diagnosis.importers.reading.csv_file import read_csv_table
from holdfast.diagnosis.importers.reading.log_source import LogSource
from holdfast.diagnosis.importers.reading.normalize import normalize
from holdfast.diagnosis.model.table import Table

NAME = "generic_csv"
DESCRIPTION = "any CSV, TSV or semicolon table with a header; --map names columns that are not recognized"


def read(source: LogSource, mapping: Mapping[str, str] | None = None) -> list[Table]:
    return [normalize(read_csv_table(source, NAME, mapping, blanks_may_be_nan=True))]
