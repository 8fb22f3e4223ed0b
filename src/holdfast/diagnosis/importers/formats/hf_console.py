"""The Hugging Face Trainer's console, and W&B's capture of it: `{'loss': 0.41, 'grad_norm': 0.07, ..., 'epoch': 0.04}`.

The records have no step. A progress bar may show it, and with it how much of the log is missing.
"""

from __future__ import annotations

import re

import numpy as np

from holdfast.diagnosis.importers.reading.column_names import canonical_column, is_eval
from holdfast.diagnosis.importers.reading.parsed_line import EVAL, TRAIN, Field, ParsedLine, parse_number
from holdfast.diagnosis.importers.reading.text_format import TextFormat
from holdfast.diagnosis.importers.reading.text_reader import RECORD_INDEX
from holdfast.diagnosis.model.table import Table

_DICT = re.compile(rb"\{'[\w/ .-]+': [^{}]*\}")
_ITEM = re.compile(rb"'([\w/ .-]+)': '?([-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf))'?(?=[,}])")
_PROGRESS_BAR = re.compile(rb"\|\s*(\d+)/(\d+) \[")
_PROGRESS, _TOTAL, _SUMMARY = "progress", "progress_total", "summary/"


def parse(line: bytes) -> ParsedLine | None:
    record = _DICT.search(line)
    if record is None:
        bar = _PROGRESS_BAR.search(line)
        if bar is None:
            return None
        return ParsedLine(EVAL, (Field(_PROGRESS, *bar.span(1)), Field(_TOTAL, *bar.span(2))))
    if b"loss'" not in record[0]:
        return None
    train: dict[str, Field] = {}
    evals: dict[str, Field] = {}
    for match in _ITEM.finditer(line, *record.span()):
        name = match[1].decode()
        if parse_number(match[2]) is None:
            continue
        if is_eval(name):
            evals.setdefault(name, Field(name, *match.span(2)))
        else:
            column, factor = canonical_column(name)
            train.setdefault(column, Field(column, *match.span(2), factor))
    if b"'train_runtime'" in record[0]:
        return ParsedLine(EVAL, tuple(field._replace(name=_SUMMARY + name) for name, field in train.items()))
    if evals:
        return ParsedLine(EVAL, tuple(evals.values()))
    return ParsedLine(TRAIN, tuple(train.values())) if "loss" in train else None


def before_normalize(table: Table, sample: bytes) -> None:
    """Move the summary to the facts, and compare the number of records with the progress bar."""
    for name in [name for name in table.evals if name.startswith(_SUMMARY)]:
        table.facts[name.removeprefix(_SUMMARY) + "_at_end"] = float(table.evals.pop(name).value[-1])
    bar, total = table.evals.pop(_PROGRESS, None), table.evals.pop(_TOTAL, None)
    if bar is None or total is None or not len(table):
        return
    planned = float(np.median(total.value))
    table.facts["planned_steps"] = int(planned)
    is_training = total.value == planned  # evaluation has a progress bar with another total
    if not is_training.any():
        return
    at = np.searchsorted(bar.step[is_training], table.columns[RECORD_INDEX], side="right") - 1
    progress = np.where(at >= 0, bar.value[is_training][np.maximum(at, 0)], np.nan)
    table.columns["progress"], table.present["progress"] = progress, np.isfinite(progress)
    gaps = np.diff(progress[np.isfinite(progress)])
    gaps = gaps[gaps > 0]
    uneven = float((np.abs(gaps - np.median(gaps)) > 1).mean()) if len(gaps) else 0.0
    reached = float(np.max(bar.value[is_training]))
    if reached > 1.5 * len(table) and uneven > 0.1:
        text = f"most lines are missing: the progress bar reached {reached:g} of {planned:g} steps, with {len(table)} "
        table.add_limit("lines_lost", text + "records at uneven distances; the number of a record is not its step")
    elif reached > 1.5 * len(table):
        text = f"{len(table)} records for {reached:g} steps: each is the mean of about {reached / len(table):.0f}"
        table.add_limit("averaged", text)


FORMAT = TextFormat(
    name="hf_console",
    description="Hugging Face Trainer console, or W&B's output.log of it: {'loss': ..., 'epoch': ...}",
    markers=(b"'loss':", b"loss':"),
    parse=parse,
    before_normalize=before_normalize,
    first_step=1,
)
