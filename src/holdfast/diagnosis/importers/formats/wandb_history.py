"""A W&B run's history: JSON lines with `_step`, or the parquet file of an artifact or export."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.base.errors import LogRefused, MissingDependency
from holdfast.diagnosis.importers.reading.column_names import ColumnRoles, columns_and_hint
from holdfast.diagnosis.importers.reading.described_table import JSON_LINES, TableDescription
from holdfast.diagnosis.importers.reading.json_lines import sample_objects
from holdfast.diagnosis.importers.reading.log_source import LogSource
from holdfast.diagnosis.importers.reading.metric_records import MetricRecords
from holdfast.diagnosis.importers.reading.normalize import normalize
from holdfast.diagnosis.model.table import Table

NAME = "wandb_history"
DESCRIPTION = "W&B history: wandb-history.jsonl or a parquet export"
_SYSTEM_COLUMNS = ("_runtime", "_timestamp", "_wandb")
_JSON = TableDescription(NAME, DESCRIPTION, JSON_LINES, skip=_SYSTEM_COLUMNS)


def looks_like(sample: bytes) -> bool:
    return b'"_step"' in sample[: 256 << 10] and any("_step" in row for row in sample_objects(sample)[:20])


def read(source: LogSource, mapping: Mapping[str, str] | None = None) -> list[Table]:
    if is_parquet(source):
        return [normalize(_read_parquet(source, mapping))]
    return _JSON.read(source, mapping)


def is_parquet(source: LogSource) -> bool:
    return source.magic == b"PAR1"


def _read_parquet(source: LogSource, mapping: Mapping[str, str] | None) -> Table:
    try:
        import pyarrow.parquet as parquet  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise MissingDependency(
            f"{source.name}: reading parquet needs pyarrow. Run `pip install pyarrow`, or export CSV or JSON lines"
        ) from None
    records = MetricRecords(source.name, NAME)
    read_error = ""
    try:
        file = parquet.ParquetFile(str(source.path))
        for batch in file.iter_batches(batch_size=65536):
            for row in batch.to_pylist():
                records.add({name: value for name, value in row.items() if name not in _SYSTEM_COLUMNS})
    except Exception as error:  # pyarrow raises its own errors, OSError and ValueError for damaged files
        read_error = str(error)
        if not records.length:
            raise LogRefused(source.name, f"a parquet file that cannot be read: {read_error[:200]}") from None
    table = records.to_table(ColumnRoles(records.names, mapping))
    if read_error:
        table.add_limit("truncated", f"the file cannot be read to its end: {read_error[:120]}")
    elif not len(table) and not table.evals:
        raise LogRefused(source.name, f"a parquet file without a metric. {columns_and_hint(records.names)}")
    return table
