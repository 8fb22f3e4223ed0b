"""A W&B run's history: JSON lines with `_step`, or the parquet file of an artifact or export."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.base.errors import LogRefused, MissingDependency
from holdfast.diagnosis.importers.formats import generic_jsonl
from holdfast.diagnosis.importers.reading.column_names import Columns
from holdfast.diagnosis.importers.reading.json_lines import looks_like as json_lines
from holdfast.diagnosis.importers.reading.normalize import finish, limit
from holdfast.diagnosis.importers.reading.records import Records
from holdfast.diagnosis.importers.reading.source import Source
from holdfast.diagnosis.model.table import Table

NAME = "wandb_history"
DESCRIPTION = "W&B history: wandb-history.jsonl or a parquet export"
_SYSTEM = ("_runtime", "_timestamp", "_wandb")


def looks_like(sample: bytes, magic: bytes) -> bool:
    if magic == b"PAR1":
        return True
    return b'"_step"' in sample[: 256 << 10] and any("_step" in row for row in json_lines(sample)[:20])


def read(source: Source, mapping: Mapping[str, str] | None = None) -> list[Table]:
    if source.magic == b"PAR1":
        return [finish(_parquet(source, mapping))]
    table = generic_jsonl.build(source, NAME, mapping)
    _drop_system(table)
    return [finish(table)]


def _drop_system(table: Table) -> None:
    for name in [name for name in table.columns if name.startswith("_")]:
        del table.columns[name], table.present[name]
    for name in [name for name in table.evals if name.startswith("_")]:
        del table.evals[name]


def _parquet(source: Source, mapping: Mapping[str, str] | None) -> Table:
    try:
        import pyarrow.parquet as parquet  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise MissingDependency(
            f"{source.name} is a parquet file; reading it needs pyarrow: pip install pyarrow. "
            "A CSV or JSON lines export needs nothing"
        ) from None
    records = Records(source.name, NAME)
    try:
        file = parquet.ParquetFile(str(source.path))
        for batch in file.iter_batches(batch_size=65536):
            for row in batch.to_pylist():
                records.add({name: value for name, value in row.items() if name not in _SYSTEM})
    except Exception as error:  # pyarrow raises its own family, OSError and ValueError for damaged files
        if not records.length:
            raise LogRefused(source.name, f"a parquet file that cannot be read: {str(error)[:200]}") from None
        table = records.table(mapping, columns=Columns(records.names, mapping))
        limit(table, "truncated", f"the file cannot be read to its end: {str(error)[:120]}")
        return table
    table = records.table(mapping)
    if not len(table) and not table.evals:
        raise LogRefused(
            source.name, f"a parquet file without a metric; its columns: {', '.join(records.names[:8]) or 'none'}"
        )
    return table
