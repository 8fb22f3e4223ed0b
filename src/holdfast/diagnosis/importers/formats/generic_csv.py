"""Any table with a header and a column that is a step or a loss by its name, or by the user's `mapping`."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.diagnosis.importers.reading.csv_file import build
from holdfast.diagnosis.importers.reading.normalize import finish
from holdfast.diagnosis.importers.reading.source import Source
from holdfast.diagnosis.model.table import Table

NAME = "generic_csv"
DESCRIPTION = "any CSV, TSV or semicolon table with a header; `mapping` names the columns where their names do not tell"


def read(source: Source, mapping: Mapping[str, str] | None = None) -> list[Table]:
    return [finish(build(source, NAME, mapping, nan=True))]
