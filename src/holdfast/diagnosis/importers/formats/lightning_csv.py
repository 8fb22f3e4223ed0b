"""Lightning's CSVLogger: metrics.csv with `step` and `epoch`, sparse rows, `_step` and `_epoch` columns apart.

A blank cell was not logged; NaN is written out. So blanks hide nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.diagnosis.importers.reading.csv_file import build
from holdfast.diagnosis.importers.reading.normalize import finish
from holdfast.diagnosis.importers.reading.source import Source
from holdfast.diagnosis.model.table import Table

NAME = "lightning_csv"
DESCRIPTION = "Lightning CSVLogger: metrics.csv with sparse `step` and `epoch` rows"


def looks_like(names: list[str]) -> bool:
    if "step" not in names or "epoch" not in names:
        return False
    return names == sorted(names) or any(name.endswith(("_step", "_epoch")) for name in names)


def read(source: Source, mapping: Mapping[str, str] | None = None) -> list[Table]:
    return [finish(build(source, NAME, mapping, nan=False), unfold=False, repeats=False)]
