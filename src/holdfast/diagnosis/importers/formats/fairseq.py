"""fairseq: `epoch 001: 1000 / 1139 loss=7.416, ..., num_updates=996`, tables with `|`, and JSON with numbers as strings."""

from __future__ import annotations

import re

import numpy as np

from holdfast.diagnosis.importers.reading.line import EVAL, TRAIN, Field, Reading
from holdfast.diagnosis.importers.reading.normalize import limit
from holdfast.diagnosis.importers.reading.text_format import TextFormat
from holdfast.diagnosis.model.table import Table

_NUMBER = rb"[-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf)"
_INNER = re.compile(rb"\bepoch (\d+):\s+\d+ / \d+ (?=\w)")
_MEANS = re.compile(rb"(?:^\| |\| (?:INFO \| )?(train|valid|test)\w* \| )epoch (\d+) \| ")
_JSON = re.compile(rb"\| INFO \| (train_inner|train|valid|test)\w* \| \{")
_PAIR = re.compile(rb"(?:^|[\s,{|])\"?([a-z]\w*)\"?(?:=|: | )\"?(" + _NUMBER + rb")\"?%?(?=[,\s|}]|$)")
_SUBSET = re.compile(rb"valid on '(\w+)' subset")
_NAMES = {
    "loss": "loss", "gnorm": "grad_norm", "lr": "lr", "loss_scale": "loss_scale", "wps": "tokens_per_second",
    "epoch": "epoch", "num_updates": "step",
}  # fmt: skip
MEAN = "epoch_mean/"


def parse(line: bytes) -> Reading | None:
    kind, at = _which(line)
    if not kind:
        return None
    fields: dict[str, Field] = {}
    for match in _PAIR.finditer(line, at):
        name = match[1].decode()
        for prefix in ("train_", "valid_", "test_"):
            name = name.removeprefix(prefix)
        name = _NAMES.get(name, name)
        fields.setdefault(name, Field(name, *match.span(2)))
    if "step" not in fields or "loss" not in fields:
        return None
    step = fields.pop("step")
    if kind == "inner":
        return Reading(TRAIN, (step, *fields.values()))
    fields.pop("epoch", None)
    prefix = MEAN if kind == "mean" else kind + "_"
    return Reading(EVAL, (step, *[field._replace(name=prefix + field.name) for field in fields.values()]))


def _which(line: bytes) -> tuple[str, int]:
    """What a line is (inner, mean of an epoch, validation), and where its numbers begin."""
    if (match := _JSON.search(line)) is not None:
        word = match[1].decode()
        return {"train_inner": "inner", "train": "mean"}.get(word, word), match.end() - 1
    if (match := _INNER.search(line)) is not None:
        return "inner", match.end() - 1
    if (match := _MEANS.search(line)) is not None:
        subset = _SUBSET.search(line, match.end())
        if subset is not None or match[1] in (b"valid", b"test"):
            return (subset[1] if subset else match[1]).decode(), match.end() - 1
        return "mean", match.end() - 1
    return "", 0


def polish(table: Table, sample: bytes) -> None:
    """Epoch means become records where nothing finer is logged, or where the inner records are such means themselves."""
    means = table.evals.get(MEAN + "loss")
    running = b"train_inner" not in sample
    if means is not None and (running or not len(table)):
        _promote(table, means.step)
    if len(table):
        what = "since the epoch began" if running else "since the record before"
        limit(table, "averaged", f"values are means {what}: a spike of one step is diluted")


def _promote(table: Table, steps: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    fresh = ~np.isin(steps, table.step)
    count, extra = len(table), int(fresh.sum())
    order = np.argsort(np.concatenate([table.step, steps[fresh]]), kind="stable")
    table.step = np.concatenate([table.step, steps[fresh]])[order]
    means = {name: table.evals.pop(name) for name in list(table.evals) if name.startswith(MEAN)}
    for name in set(table.columns) | {name.removeprefix(MEAN) for name in means}:
        values, there = np.full(count + extra, np.nan), np.zeros(count + extra, dtype=bool)
        if name in table.columns:
            values[:count], there[:count] = table.columns[name], table.present[name]
        if MEAN + name in means and len(means[MEAN + name].value) == len(fresh):
            values[count:], there[count:] = means[MEAN + name].value[fresh], True
        table.columns[name], table.present[name] = values[order], there[order]


FORMAT = TextFormat(
    name="fairseq",
    description="fairseq's console: `epoch 001: ... loss=..., num_updates=...`, `| epoch 001 | loss ... |`, JSON",
    markers=(b"num_updates",),
    parse=parse,
    polish=polish,
    means=MEAN + "loss",
    unfold=False,
)
