"""Any file with one JSON object on each line and numbers in the objects."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis.importers.reading.column_names import ColumnRoles, columns_and_hint
from holdfast.diagnosis.importers.reading.json_lines import JsonLines
from holdfast.diagnosis.importers.reading.log_source import LogSource
from holdfast.diagnosis.importers.reading.metric_records import MetricRecords
from holdfast.diagnosis.importers.reading.normalize import add_source_limits, normalize
from holdfast.diagnosis.model.table import Table

NAME = "generic_jsonl"
DESCRIPTION = "any JSON lines with numbers; --map names columns that are not recognized"


def read_jsonl_table(source: LogSource, format_name: str, mapping: Mapping[str, str] | None) -> Table:
    """Read a file into a table that is not yet normalized. Raises LogRefused if it holds no metric."""
    records = MetricRecords(source.name, format_name)
    lines = JsonLines(source)
    for row in lines:
        records.add(row)
    records.unreadable_rows = lines.unreadable_lines
    table = records.to_table(ColumnRoles(records.names, mapping))
    if not table.has("loss") and not table.evals and not (len(table) and table.columns):
        raise LogRefused(source.name, f"JSON lines without a metric. {columns_and_hint(records.names)}")
    if lines.last_line_is_cut:
        table.add_limit("truncated", "the last line is incomplete")
    add_source_limits(table, source)
    return table


def read(source: LogSource, mapping: Mapping[str, str] | None = None) -> list[Table]:
    return [normalize(read_jsonl_table(source, NAME, mapping))]
