"""MLPerf: `:::MLL` lines, and the consoles of GNMT (`TRAIN [0][10/1938] ...`) and Mask R-CNN (`iter: 20  loss: ...`)."""

from __future__ import annotations

import re

from holdfast.diagnosis.importers.reading.line import EVAL, TRAIN, Field, Reading, pairs
from holdfast.diagnosis.importers.reading.normalize import limit
from holdfast.diagnosis.importers.reading.text_format import TextFormat
from holdfast.diagnosis.model.table import Table

_NUMBER = rb"[-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf)"
_GNMT = re.compile(rb"\b(TRAIN|VALIDATION) \[(\d+)\]\[(\d+)/(\d+)\]\s")
_GNMT_REST = re.compile(rb"\b(Time|Data|Tok/s|Loss/tok|LR) (" + _NUMBER + rb")")
_RCNN = re.compile(rb"\biter: (\d+)\s+(?=loss: )")
_RCNN_REST = re.compile(rb"\b(\w+|max mem): (" + _NUMBER + rb")")
_EVAL = re.compile(
    rb":::MLL(?:OG)? .{0,400}?\beval_(?:accuracy|loss|error)\b.{0,400}?\"value\": (?:\{\"(\w+)\": )?(" + _NUMBER + rb")"
)
_NAMES = {
    b"Time": ("seconds", 1.0), b"Data": ("data_seconds", 1.0), b"Tok/s": ("tokens_per_second", 1.0),
    b"Loss/tok": ("loss", 1.0), b"LR": ("lr", 1.0), b"loss": ("loss", 1.0), b"lr": ("lr", 1.0), b"time": ("seconds", 1.0),
    b"data": ("data_seconds", 1.0), b"max mem": ("memory_peak", 1 / 1024),
}  # fmt: skip
_FACT = re.compile(
    rb":::MLL(?:OG)? .{0,400}?\"?(submission_benchmark|global_batch_size|opt_base_learning_rate|opt_name|seed)\"?"
    rb".{0,400}?\"value\": \"?([^\",}]{1,60})"
)


def parse(line: bytes) -> Reading | None:
    if (match := _GNMT.search(line)) is not None:
        fields = pairs(line, _GNMT_REST, _NAMES, match.end())
        where = (Field("epoch", *match.span(2)), Field("step", *match.span(3)), Field("steps_of_epoch", *match.span(4)))
        if match[1] == b"TRAIN":
            return Reading(TRAIN, (*where, *fields))
        return Reading(EVAL, tuple(f._replace(name=f"validation_{f.name}") for f in fields)) if fields else None
    if (match := _RCNN.search(line)) is not None:
        return Reading(TRAIN, (Field("step", *match.span(1)), *pairs(line, _RCNN_REST, _NAMES, match.end())))
    if (match := _EVAL.search(line)) is not None:
        name = "eval_accuracy" + (f"/{match[1].decode()}" if match[1] else "")
        return Reading(EVAL, (Field(name, *match.span(2)),))
    return None


def polish(table: Table, sample: bytes) -> None:
    if "steps_of_epoch" in table.columns:
        table.step = table.step + table.columns["epoch"] * table.columns.pop("steps_of_epoch")
        table.present.pop("steps_of_epoch")
        limit(
            table,
            "steps_unfolded",
            "the log counts steps within each epoch; the steps of the epochs before are added here",
        )
    elif len(table):
        limit(table, "averaged", "losses are medians of the last 20 steps: a spike of one step does not show")
    for match in _FACT.finditer(sample):
        table.facts.setdefault(match[1].decode(), match[2].decode("utf-8", "replace"))


FORMAT = TextFormat(
    name="mlperf",
    description="MLPerf logs (`:::MLL`) with the consoles of GNMT and Mask R-CNN",
    markers=(b":::MLL", b"TRAIN [", b"iter: "),
    parse=parse,
    polish=polish,
    unfold=False,
)
