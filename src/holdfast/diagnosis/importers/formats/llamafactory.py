"""LLaMA-Factory's trainer_log.jsonl: one object a line, the step in `current_steps`."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis.importers.reading.json_lines import JsonLines
from holdfast.diagnosis.importers.reading.json_lines import looks_like as json_lines
from holdfast.diagnosis.importers.reading.normalize import finish, limit
from holdfast.diagnosis.importers.reading.records import Records
from holdfast.diagnosis.importers.reading.source import Source
from holdfast.diagnosis.model.table import Table

NAME = "llamafactory"
DESCRIPTION = "LLaMA-Factory: trainer_log.jsonl with `current_steps`"
_NOT_METRICS = ("total_steps", "percentage", "elapsed_time", "remaining_time")


def looks_like(sample: bytes) -> bool:
    if b'"current_steps"' not in sample[: 64 << 10]:
        return False
    return any("current_steps" in row for row in json_lines(sample)[:20])


def read(source: Source, mapping: Mapping[str, str] | None = None) -> list[Table]:
    records = Records(source.name, NAME)
    lines = JsonLines(source)
    total = None
    for row in lines:
        total = row.get("total_steps", total)
        records.add({name: value for name, value in row.items() if name not in _NOT_METRICS})
    records.broken = lines.broken
    if not any(name not in ("current_steps", "epoch", "total_tokens", "throughput") for name in records.names):
        raise LogRefused(
            source.name,
            f"{records.length} records of progress (current_steps, percentage, times) and no loss or other metric",
        )
    table = records.table(mapping)
    if isinstance(total, int):
        table.facts["planned_steps"] = total
    if lines.torn:
        limit(table, "truncated", "the last line stops in the middle")
    usual = table.step_interval()
    if usual > 1 and table.has("loss"):
        limit(
            table,
            "averaged",
            f"each loss is the mean over {usual:g} steps: a spike of one step shows {usual:g} times smaller",
        )
    return [finish(table, unfold=False)]
