"""Lightning's CSVLogger: metrics.csv with `step` and `epoch`, sparse rows, separate `_step` and `_epoch` columns.

The logger writes NaN as text, so a blank cell was not logged.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.diagnosis.importers.reading.csv_file import read_csv_table
from holdfast.diagnosis.importers.reading.log_source import LogSource
from holdfast.diagnosis.importers.reading.normalize import normalize
from holdfast.diagnosis.model.table import Table

NAME = "lightning_csv"
DESCRIPTION = "Lightning CSVLogger: metrics.csv with sparse `step` and `epoch` rows"


def looks_like(names: list[str]) -> bool:
    if "step" not in names or "epoch" not in names:
        return False
    return names == sorted(names) or any(name.endswith(("_step", "_epoch")) for name in names)


def read(source: LogSource, mapping: Mapping[str, str] | None = None) -> list[Table]:
    table = read_csv_table(source, NAME, mapping, blanks_may_be_nan=False)
    return [normalize(table, unfold_epochs=False, drop_repeats=False)]
