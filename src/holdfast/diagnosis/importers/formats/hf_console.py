"""The Hugging Face Trainer's console, and W&B's capture of it: `{'loss': 0.41, 'grad_norm': 0.07, ..., 'epoch': 0.04}`.

The records carry no step. A progress bar beside them may; where it does, it shows how much of the log is missing.
"""

from __future__ import annotations

import re

import numpy as np

from holdfast.diagnosis.importers.reading import column_names as names
from holdfast.diagnosis.importers.reading.line import EVAL, TRAIN, Field, Reading, number
from holdfast.diagnosis.importers.reading.normalize import limit
from holdfast.diagnosis.importers.reading.text_format import TextFormat
from holdfast.diagnosis.importers.reading.text_log import ROW
from holdfast.diagnosis.model.table import Table

_DICT = re.compile(rb"\{'[\w/ .-]+': [^{}]*\}")
_ITEM = re.compile(rb"'([\w/ .-]+)': '?([-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf))'?(?=[,}])")
_BAR = re.compile(rb"\|\s*(\d+)/(\d+) \[")
_PROGRESS, _TOTAL = "progress", "progress_total"


def parse(line: bytes) -> Reading | None:
    found = _DICT.search(line)
    if found is None:
        bar = _BAR.search(line)
        return Reading(EVAL, (Field(_PROGRESS, *bar.span(1)), Field(_TOTAL, *bar.span(2)))) if bar is not None else None
    if b"loss'" not in found[0]:
        return None
    train: dict[str, Field] = {}
    evals: dict[str, Field] = {}
    for match in _ITEM.finditer(line, *found.span()):
        name = match[1].decode()
        if number(match[2]) is None:
            continue
        if names.is_eval(name):
            evals.setdefault(name, Field(name, *match.span(2)))
        else:
            ours, factor = names.column(name)
            train.setdefault(ours, Field(ours, *match.span(2), factor))
    if "'train_runtime'" in found[0].decode("utf-8", "replace"):
        return Reading(EVAL, tuple(f._replace(name=f"summary/{name}") for name, f in train.items()))
    if evals:
        return Reading(EVAL, tuple(evals.values()))
    return Reading(TRAIN, tuple(train.values())) if "loss" in train else None


def polish(table: Table, sample: bytes) -> None:
    for name in [name for name in table.evals if name.startswith("summary/")]:
        table.facts[name.removeprefix("summary/") + "_at_end"] = float(table.evals.pop(name).value[-1])
    bar, total = table.evals.pop(_PROGRESS, None), table.evals.pop(_TOTAL, None)
    if bar is None or total is None or not len(table):
        return
    planned = float(np.median(total.value))
    train = total.value == planned
    table.facts["planned_steps"] = int(planned)
    if not train.any():
        return
    at = np.searchsorted(bar.step[train], table.columns[ROW], side="right") - 1
    progress = np.where(at >= 0, bar.value[train][np.maximum(at, 0)], np.nan)
    table.columns["progress"], table.present["progress"] = progress, np.isfinite(progress)
    seen = progress[np.isfinite(progress)]
    gaps = np.diff(seen)
    gaps = gaps[gaps > 0]
    reached = float(np.max(bar.value[train]))
    usual = float(np.median(gaps)) if len(gaps) else 1.0
    odd = float((np.abs(gaps - usual) > 1).mean()) if len(gaps) else 0.0
    if reached > 1.5 * len(table) and odd > 0.1:
        limit(
            table,
            "lines_lost",
            f"the progress bar reached {reached:g} of {planned:g} steps, and {len(table)} records are here, unevenly: "
            "most lines were lost, and the number of a record is not its step",
        )
    elif reached > 1.5 * len(table):
        limit(
            table,
            "averaged",
            f"{len(table)} records for {reached:g} steps: each is the mean of about {reached / len(table):.0f}",
        )


FORMAT = TextFormat(
    name="hf_console",
    description="Hugging Face Trainer console, or W&B's output.log of it: {'loss': ..., 'epoch': ...}",
    markers=(b"'loss':", b"loss':"),
    parse=parse,
    polish=polish,
    first_number=1,
)
