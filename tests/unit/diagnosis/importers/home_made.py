"""Reads the logs of home-made loops."""

from __future__ import annotations

from pathlib import Path

from holdfast.diagnosis.importers import read
from holdfast.diagnosis.model.table import Table


def read_text(tmp_path: Path, lines: list[str], name: str = "log.txt") -> list[Table]:
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n")
    return read(path)


def losses(table: Table) -> list[float]:
    return table.series("loss").value.tolist()
