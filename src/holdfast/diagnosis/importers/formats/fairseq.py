"""fairseq: `epoch 001: 1000 / 1139 loss=7.416, ..., num_updates=996`, tables with `|`, and JSON with numbers as strings."""

from __future__ import annotations

import re

import numpy as np

from holdfast.diagnosis.importers.reading.column_blocks import Floats
from holdfast.diagnosis.importers.reading.parsed_line import EVAL, NUMBER, TRAIN, Field, ParsedLine
from holdfast.diagnosis.importers.reading.text_format import TextFormat
from holdfast.diagnosis.model.table import Table

_INNER = re.compile(rb"\bepoch (\d+):\s+\d+ / \d+ (?=\w)")
_EPOCH_TABLE = re.compile(rb"(?:^\| |\| (?:INFO \| )?(train|valid|test)\w* \| )epoch (\d+) \| ")
_JSON = re.compile(rb"\| INFO \| (train_inner|train|valid|test)\w* \| \{")
_PAIR = re.compile(rb"(?:^|[\s,{|])\"?([a-z]\w*)\"?(?:=|: | )\"?(" + NUMBER + rb")\"?%?(?=[,\s|}]|$)")
_SUBSET = re.compile(rb"valid on '(\w+)' subset")
_COLUMNS = {"gnorm": "grad_norm", "wps": "tokens_per_second", "num_updates": "step"}
EPOCH_MEAN = "epoch_mean/"


def parse(line: bytes) -> ParsedLine | None:
    kind, start = _classify(line)
    if not kind:
        return None
    fields: dict[str, Field] = {}
    for match in _PAIR.finditer(line, start):
        name = match[1].decode()
        for prefix in ("train_", "valid_", "test_"):
            name = name.removeprefix(prefix)
        name = _COLUMNS.get(name, name)
        fields.setdefault(name, Field(name, *match.span(2)))
    if "step" not in fields or "loss" not in fields:
        return None
    step = fields.pop("step")
    if kind == "inner":
        return ParsedLine(TRAIN, (step, *fields.values()))
    fields.pop("epoch", None)
    prefix = EPOCH_MEAN if kind == "mean" else kind + "_"
    return ParsedLine(EVAL, (step, *[field._replace(name=prefix + field.name) for field in fields.values()]))


def _classify(line: bytes) -> tuple[str, int]:
    """Return the kind of a line (inner, mean, or the name of an evaluation) and where its numbers begin."""
    if (match := _JSON.search(line)) is not None:
        word = match[1].decode()
        return {"train_inner": "inner", "train": "mean"}.get(word, word), match.end() - 1
    if (match := _INNER.search(line)) is not None:
        return "inner", match.end() - 1
    if (match := _EPOCH_TABLE.search(line)) is not None:
        subset = _SUBSET.search(line, match.end())
        if subset is not None or match[1] in (b"valid", b"test"):
            return (subset[1] if subset else match[1]).decode(), match.end() - 1
        return "mean", match.end() - 1
    return "", 0


def before_normalize(table: Table, sample: bytes) -> None:
    """Turn epoch means into records if nothing finer is logged, or if the inner records are running means too."""
    means = table.evals.get(EPOCH_MEAN + "loss")
    is_running_mean = b"train_inner" not in sample
    if means is not None and (is_running_mean or not len(table)):
        _add_epoch_means(table, means.step)
    if len(table):
        since = "start of the epoch" if is_running_mean else "record before"
        table.add_limit("averaged", f"values are means since the {since}: a spike of one step is diluted")


def _add_epoch_means(table: Table, steps: Floats) -> None:
    is_new = ~np.isin(steps, table.step)
    old_length = len(table)
    all_steps = np.concatenate([table.step, steps[is_new]])
    order = np.argsort(all_steps, kind="stable")
    table.step = all_steps[order]
    means = {name: table.evals.pop(name) for name in list(table.evals) if name.startswith(EPOCH_MEAN)}
    for name in dict.fromkeys([*table.columns, *(name.removeprefix(EPOCH_MEAN) for name in means)]):
        values, present = np.full(len(order), np.nan), np.zeros(len(order), dtype=bool)
        if name in table.columns:
            values[:old_length], present[:old_length] = table.columns[name], table.present[name]
        if EPOCH_MEAN + name in means and len(means[EPOCH_MEAN + name].value) == len(is_new):
            values[old_length:], present[old_length:] = means[EPOCH_MEAN + name].value[is_new], True
        table.columns[name], table.present[name] = values[order], present[order]


FORMAT = TextFormat(
    name="fairseq",
    description="fairseq's console: `epoch 001: ... loss=..., num_updates=...`, `| epoch 001 | loss ... |`, JSON",
    markers=(b"num_updates",),
    parse=parse,
    before_normalize=before_normalize,
    mean_loss=EPOCH_MEAN + "loss",
    unfold_epochs=False,
)
