"""A path into a Side: a run directory read directly, anything else through the importers."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np

from holdfast.core.base.errors import LogRefused, RunDirError
from holdfast.core.record.rundir import RunDir
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.rundiff import rundir
from holdfast.diagnosis.rundiff.side import Side, flatten, number

# What other tools call the facts that have a meaning; looked for at the end of a setting's name.
_ALIASES = {
    "vocab_size": r"(^|[._])(padded_)?vocab(ulary)?_size$",
    "sequence_length": r"(^|[._])(sequence_length|seq_len(gth)?|max_seq_len(gth)?|block_size|context(_length)?)$",
    "precision": r"(^|[._])(mixed_)?precision$",
    "seed": r"(^|[._])seed$",
    "tokenizer": r"(^|[._])tokenizer(_name|_path|_name_or_path|_model)?$",
    "tokens_per_step": r"(^|[._])(tokens_per_step|total_batch_size_tokens|tokens_per_iter)$",
}
_FLAGS = {"precision": {"bf16": "bf16", "fp16": "fp16"}}


def load(path: str | os.PathLike[str]) -> Side:
    """The run at `path`. HoldfastError, in words, where there is none that could be read."""
    place = Path(path)
    if not place.exists():
        raise RunDirError(
            f"{path}: no such file or folder; name a run directory, or a log that `holdfast diagnose` reads"
        )
    if place.is_dir() and rundir.is_run(place):
        side = rundir.load(place)
    else:
        side = from_table(_imported(place))
    complete(side)
    return side


def _imported(place: Path) -> Table:
    journal = RunDir(place).journal.name
    try:
        # Late: the importers bring in every format there is.
        from holdfast.diagnosis.importers import read

        tables = [table for table in read(place) if len(table)]
    except LogRefused as error:
        inside = sorted(child.parent.name for child in place.glob(f"*/{journal}")) if place.is_dir() else []
        if inside:
            raise RunDirError(
                f"{place} is not a run directory: it has no {journal}; did you mean {place / inside[0]}?"
            ) from None
        raise error from None
    if not tables:
        raise LogRefused(str(place), "it holds no training record; name a run directory or a log with losses")
    longest = max(tables, key=len)
    if len(tables) > 1:
        longest.path = f"{place} ({longest.path}, the longest of {len(tables)} runs in it)"
    return longest


def from_table(table: Table) -> Side:
    """Another tool's log: its curves, and what it says of the run as a whole."""
    order = np.argsort(table.step, kind="stable")
    order = order[np.append(np.diff(table.step[order]) > 0, True)] if len(order) else order  # a step twice: the later
    columns = {name: np.where(table.present[name][order], table.columns[name][order], np.nan) for name in table.columns}
    side = Side(table.path, table.format, table.step[order].astype(np.float64), columns)
    there = np.isfinite(columns.get("tokens", np.empty(0)))
    if (
        there.sum() > 1 and columns["tokens"][there][-1] > columns["tokens"][there][0]
    ):  # some tools log a column of zeros
        side.tokens = np.interp(side.step, side.step[there], columns["tokens"][there])
    side.evals = {
        name: [(int(step), float(value)) for step, value in zip(series.step, series.value, strict=True)]
        for name, series in table.evals.items()
    }
    side.settings = flatten(table.facts) if table.facts else {}
    side.limits = [limit.text for limit in table.limits]
    return side


def complete(side: Side) -> None:
    """Facts that stand among the settings under another tool's name, and tokens where they can be worked out."""
    for name, pattern in _ALIASES.items():
        found = [key for key in side.settings if re.search(pattern, key.lower())]
        if name not in side.known and found:
            side.known[name] = side.settings[min(found, key=len)]
        for key in found:
            del side.settings[key]
    if "precision" not in side.known:
        for flag, precision in _FLAGS["precision"].items():
            if any(key.lower().split(".")[-1] == flag and value is True for key, value in side.settings.items()):
                side.known["precision"] = precision
    if side.tokens is None:
        per_step, length = number(side.known.get("tokens_per_step")), number(side.known.get("sequence_length"))
        if per_step:
            side.tokens = side.step * per_step
        elif side.samples is not None and length:
            side.tokens = side.samples * length
