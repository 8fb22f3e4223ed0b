"""MLPerf: `:::MLL` lines, and the consoles of GNMT (`TRAIN [0][10/1938] ...`) and Mask R-CNN (`iter: 20  loss: ...`)."""

from __future__ import annotations

import re

from holdfast.diagnosis.importers.reading.parsed_line import EVAL, NUMBER, TRAIN, Field, ParsedLine, find_pairs
from holdfast.diagnosis.importers.reading.text_format import TextFormat
from holdfast.diagnosis.model.table import Table

_GNMT = re.compile(rb"\b(TRAIN|VALIDATION) \[(\d+)\]\[(\d+)/(\d+)\]\s")
_GNMT_METRIC = re.compile(rb"\b(Time|Data|Tok/s|Loss/tok|LR) (" + NUMBER + rb")")
_MASK_RCNN = re.compile(rb"\biter: (\d+)\s+(?=loss: )")
_MASK_RCNN_METRIC = re.compile(rb"\b(\w+|max mem): (" + NUMBER + rb")")
_EVAL = re.compile(
    rb":::MLL(?:OG)? .{0,400}?\beval_(?:accuracy|loss|error)\b.{0,400}?\"value\": (?:\{\"(\w+)\": )?(" + NUMBER + rb")"
)
_COLUMNS = {
    b"Time": ("seconds", 1.0), b"Data": ("data_seconds", 1.0), b"Tok/s": ("tokens_per_second", 1.0),
    b"Loss/tok": ("loss", 1.0), b"LR": ("lr", 1.0), b"loss": ("loss", 1.0), b"lr": ("lr", 1.0), b"time": ("seconds", 1.0),
    b"data": ("data_seconds", 1.0), b"max mem": ("memory_peak", 1 / 1024),
}  # fmt: skip
_FACT = re.compile(
    rb":::MLL(?:OG)? .{0,400}?\"?(submission_benchmark|global_batch_size|opt_base_learning_rate|opt_name|seed)\"?"
    rb".{0,400}?\"value\": \"?([^\",}]{1,60})"
)


def parse(line: bytes) -> ParsedLine | None:
    if (match := _GNMT.search(line)) is not None:
        fields = find_pairs(line, _GNMT_METRIC, _COLUMNS, match.end())
        if match[1] == b"TRAIN":
            head = (Field(name, *match.span(i)) for i, name in enumerate(("epoch", "step", "steps_of_epoch"), 2))
            return ParsedLine(TRAIN, (*head, *fields))
        evals = tuple(field._replace(name=f"validation_{field.name}") for field in fields)
        return ParsedLine(EVAL, evals) if evals else None
    if (match := _MASK_RCNN.search(line)) is not None:
        fields = find_pairs(line, _MASK_RCNN_METRIC, _COLUMNS, match.end())
        return ParsedLine(TRAIN, (Field("step", *match.span(1)), *fields))
    if (match := _EVAL.search(line)) is not None:
        name = "eval_accuracy" + (f"/{match[1].decode()}" if match[1] else "")
        return ParsedLine(EVAL, (Field(name, *match.span(2)),))
    return None


def before_normalize(table: Table, sample: bytes) -> None:
    if "steps_of_epoch" in table.columns:
        table.step = table.step + table.columns["epoch"] * table.columns.pop("steps_of_epoch")
        table.present.pop("steps_of_epoch")
        text = "the log counts steps within each epoch; here the steps of the epochs before are added"
        table.add_limit("steps_unfolded", text)
    elif len(table):
        table.add_limit("averaged", "losses are medians of the last 20 steps: a spike of one step is not visible")
    for match in _FACT.finditer(sample):
        table.facts.setdefault(match[1].decode(), match[2].decode("utf-8", "replace"))


FORMAT = TextFormat(
    name="mlperf",
    description="MLPerf logs (`:::MLL`) with the consoles of GNMT and Mask R-CNN",
    markers=(b":::MLL", b"TRAIN [", b"iter: "),
    parse=parse,
    before_normalize=before_normalize,
    unfold_epochs=False,
)
