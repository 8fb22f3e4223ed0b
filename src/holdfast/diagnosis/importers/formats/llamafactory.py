"""LLaMA-Factory's trainer_log.jsonl: one object on each line, with the step in `current_steps`."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis.importers.reading.column_names import ColumnRoles
from holdfast.diagnosis.importers.reading.json_lines import JsonLines, sample_objects
from holdfast.diagnosis.importers.reading.log_source import LogSource
from holdfast.diagnosis.importers.reading.metric_records import MetricRecords
from holdfast.diagnosis.importers.reading.normalize import add_averaged_limit, normalize
from holdfast.diagnosis.model.table import Table

NAME = "llamafactory"
DESCRIPTION = "LLaMA-Factory: trainer_log.jsonl with `current_steps`"
_NOT_METRICS = ("total_steps", "percentage", "elapsed_time", "remaining_time")


def looks_like(sample: bytes) -> bool:
    if b'"current_steps"' not in sample[: 64 << 10]:
        return False
    return any("current_steps" in row for row in sample_objects(sample)[:20])


def read(source: LogSource, mapping: Mapping[str, str] | None = None) -> list[Table]:
    records = MetricRecords(source.name, NAME)
    lines = JsonLines(source)
    total = None
    for row in lines:
        total = row.get("total_steps", total)
        records.add({name: value for name, value in row.items() if name not in _NOT_METRICS})
    records.unreadable_rows = lines.unreadable_lines
    if not set(records.names) - {"current_steps", "epoch", "total_tokens", "throughput"}:
        reason = f"{records.length} records of progress (current_steps, percentage, times) and no loss or other metric"
        raise LogRefused(source.name, reason)
    table = records.to_table(ColumnRoles(records.names, mapping))
    if isinstance(total, int):
        table.facts["planned_steps"] = total
    if lines.last_line_is_cut:
        table.add_limit("truncated", "the last line is incomplete")
    if table.has("loss"):
        add_averaged_limit(table)
    return [normalize(table, unfold_epochs=False)]
