"""Any file with one JSON object a line and numbers in the objects."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis.importers.reading.json_lines import JsonLines
from holdfast.diagnosis.importers.reading.json_lines import looks_like as json_lines
from holdfast.diagnosis.importers.reading.normalize import finish, limit
from holdfast.diagnosis.importers.reading.records import Records
from holdfast.diagnosis.importers.reading.source import Source
from holdfast.diagnosis.model.table import Table

NAME = "generic_jsonl"
DESCRIPTION = "any JSON lines with numbers; `mapping` names the columns where their names do not tell"


def looks_like(sample: bytes) -> bool:
    return bool(json_lines(sample))


def collect(source: Source, form: str) -> tuple[Records, JsonLines]:
    records = Records(source.name, form)
    lines = JsonLines(source)
    for row in lines:
        records.add(row)
    records.broken = lines.broken
    return records, lines


def build(source: Source, form: str, mapping: Mapping[str, str] | None) -> Table:
    records, lines = collect(source, form)
    table = records.table(mapping)
    if not table.has("loss") and not table.evals and not (len(table) and table.columns):
        names = ", ".join(records.names[:8]) or "none"
        raise LogRefused(
            source.name, f"JSON lines without a loss or another metric; the columns with numbers are: {names}"
        )
    if lines.torn:
        limit(table, "truncated", "the last line stops in the middle")
    if source.lines_cut:
        limit(table, "lines_cut", f"{source.lines_cut} lines are longer than 1 MB and were read up to there")
    if source.broken:
        limit(table, "truncated", source.broken)
    return table


def read(source: Source, mapping: Mapping[str, str] | None = None) -> list[Table]:
    return [finish(build(source, NAME, mapping))]
