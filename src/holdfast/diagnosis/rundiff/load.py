"""Loads a run for a comparison: a run directory directly, any other log through the importers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from holdfast.core.base.errors import LogRefused, RunDirError
from holdfast.core.record.rundir import RunDir, suggest_run
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.rundiff import rundir
from holdfast.diagnosis.rundiff.compared_run import ComparedRun, as_finite, find_nonfinite_end, flatten

# Names that other tools use for the known facts, matched at the end of the name of a setting.
_ALIASES = {
    "vocab_size": r"(^|[._])(padded_)?vocab(ulary)?_size$",
    "sequence_length": r"(^|[._])(sequence_length|seq_len(gth)?|max_seq_len(gth)?|block_size|context(_length)?)$",
    "precision": r"(^|[._])(mixed_)?precision$",
    "seed": r"(^|[._])seed$",
    "tokenizer": r"(^|[._])tokenizer(_name|_path|_name_or_path|_model)?$",
    "tokens_per_step": r"(^|[._])(tokens_per_step|total_batch_size_tokens|tokens_per_iter)$",
}


def load(path: str | os.PathLike[str], mapping: Mapping[str, str] | None = None) -> ComparedRun:
    """Load the run at `path`. `mapping` is signal -> column of its log. Raise a HoldfastError if it cannot be read."""
    place = Path(path)
    if not place.exists():
        raise RunDirError(
            f"{path}: no such file or folder; name a run directory, or a log that `holdfast diagnose` reads"
        )
    if place.is_dir() and rundir.is_run(place):
        for signal, column in (mapping or {}).items():
            raise LogRefused(str(path), f"--map {signal}={column}: a run directory has no columns to map; leave it out")
        run = rundir.load(place)
    else:
        run = from_table(_import(place, mapping))
    complete(run)
    return run


def _import(place: Path, mapping: Mapping[str, str] | None) -> Table:
    not_a_run = f"{place} is not a run directory: it has no {RunDir(place).journal.name}; "
    suggestion = suggest_run(place, "")
    try:
        # A late import: it loads the importer of every format.
        from holdfast.diagnosis.importers import read
        from holdfast.diagnosis.importers.formats.rundir import NAME as IMPORTED_RUN

        tables = [table for table in read(place, mapping=mapping or None) if len(table)]
    except LogRefused as error:
        is_mapping = error.reason.startswith("--map")
        if suggestion and not is_mapping:
            raise RunDirError(not_a_run + suggestion) from None
        cure = "" if is_mapping or "run directory" in error.reason else "; name a run directory or another log"
        raise LogRefused(error.path, error.reason + cure) from None
    is_other = [table.format == IMPORTED_RUN and Path(table.path) != place for table in tables]
    if suggestion and (any(is_other) or not tables):
        raise RunDirError(not_a_run + suggestion)
    if not tables:
        raise LogRefused(str(place), "it has no training records; name a run directory or a log with losses")
    longest = max(tables, key=len)
    if len(tables) > 1:
        longest.path = f"{place} ({longest.path}, the longest of its {len(tables)} runs)"
    return longest


def from_table(table: Table) -> ComparedRun:
    """Convert the log of another tool: its curves and its facts."""
    order = np.argsort(table.step, kind="stable")
    if len(order):  # of records with the same step, keep the last
        order = order[np.append(np.diff(table.step[order]) > 0, True)]
    columns = {name: np.where(table.present[name][order], table.columns[name][order], np.nan) for name in table.columns}
    run = ComparedRun(table.path, table.format, table.step[order].astype(np.float64), columns)
    run.nonfinite_since = find_nonfinite_end(table.series("loss"))
    tokens = columns.get("tokens", np.empty(0))
    finite = np.isfinite(tokens)
    if finite.sum() > 1 and tokens[finite][-1] > tokens[finite][0]:  # some tools log a column of zeros
        run.tokens = np.interp(run.step, run.step[finite], tokens[finite])
    run.evals = {
        name: [(int(step), float(value)) for step, value in zip(series.step, series.value, strict=True)]
        for name, series in table.evals.items()
    }
    run.settings = flatten(table.facts) if table.facts else {}
    run.limits = [limit.text for limit in table.limits]
    return run


def complete(run: ComparedRun) -> None:
    """Move settings with another tool's name to the known facts, and derive tokens if possible."""
    for name, pattern in _ALIASES.items():
        keys = [key for key in run.settings if re.search(pattern, key.lower())]
        if name not in run.known and keys:
            run.known[name] = run.settings[min(keys, key=len)]
        for key in keys:
            del run.settings[key]
    for flag in ("fp16", "bf16"):
        if any(key.lower().split(".")[-1] == flag and value is True for key, value in run.settings.items()):
            run.known.setdefault("precision", flag)
    if run.tokens is None:
        per_step, length = as_finite(run.known.get("tokens_per_step")), as_finite(run.known.get("sequence_length"))
        if per_step:
            run.tokens = run.step * per_step
        elif run.samples is not None and length:
            run.tokens = run.samples * length
