"""nanoGPT and its family: build-nanogpt, llm.c, modded-nanogpt, parameter-golf.

Their logs often begin with the whole source of the script; only lines that begin like a record are records.
"""

from __future__ import annotations

import re

import numpy as np

from holdfast.diagnosis.importers.reading.line import EVAL, TRAIN, Field, Reading, number, pairs
from holdfast.diagnosis.importers.reading.normalize import limit
from holdfast.diagnosis.importers.reading.text_format import TextFormat
from holdfast.diagnosis.model.table import Table

_NUMBER = rb"[-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf)"
_PREFIX = rb"(?:\[?\w*rank\d+\]?:\s*|\d+: )?"
_ITER = re.compile(_PREFIX + rb"iter (\d+): loss (" + _NUMBER + rb")")
_ITER_REST = re.compile(rb", ([a-z_ ]+?):? (" + _NUMBER + rb")")
_ESTIMATE = re.compile(_PREFIX + rb"step (\d+): train loss (" + _NUMBER + rb"), val loss (" + _NUMBER + rb")")
_COLON = re.compile(_PREFIX + rb"step:(\d+)(?:/\d+)? (?=\w+:)")
_COLON_REST = re.compile(rb"(?<=\s)(\w+):(" + _NUMBER + rb")(?=[a-z%\s/(]|$)")
_BAR = re.compile(_PREFIX + rb"step\s+(\d+)(?:/\d+)? \|")
_BAR_REST = re.compile(rb"\|\s*\(?((?:train |val )?[a-z/_]+):? (" + _NUMBER + rb")")
_BAR_BARE = re.compile(rb"\|\s*\(?(" + _NUMBER + rb") (ms|tok/s)\b")
_WORD = re.compile(rb"(\d+) (train|val|hella) (" + _NUMBER + rb")$")
_SHORT = re.compile(rb"s:(\d+) (?=(?:trl|tel|eval):)")
_ALONE = re.compile(_PREFIX + rb"(validation loss|val loss|HellaSwag accuracy):?\s+(?:\d+/\d+=)?(" + _NUMBER + rb")$")
_FINAL = re.compile(rb"(final_\w+) .*?\bval_loss:(" + _NUMBER + rb")")

_NAMES = {
    b"loss": ("loss", 1.0), b"train_loss": ("loss", 1.0), b"train loss": ("loss", 1.0), b"trl": ("loss", 1.0),
    b"norm": ("grad_norm", 1.0), b"grad_norm": ("grad_norm", 1.0), b"gnorm": ("grad_norm", 1.0),
    b"lr": ("lr", 1.0), b"dt": ("seconds", 1e-3), b"time": ("seconds", 1e-3), b"ms": ("seconds", 1e-3),
    b"tok/sec": ("tokens_per_second", 1.0), b"tok/s": ("tokens_per_second", 1.0), b"tps": ("tokens_per_second", 1.0),
    b"train_time": ("train_time", 1e-3), b"step_avg": ("step_average", 1e-3),
    b"val_loss": ("val_loss", 1.0), b"val loss": ("val_loss", 1.0), b"validation loss": ("val_loss", 1.0),
    b"tel": ("val_loss", 1.0), b"val": ("val_loss", 1.0), b"eval": ("hellaswag", 1.0), b"hella": ("hellaswag", 1.0),
    b"HellaSwag accuracy": ("hellaswag", 1.0), b"train": ("loss", 1.0),
}  # fmt: skip
_EVALS = {"val_loss", "val_bpb", "hellaswag"}


def parse(line: bytes) -> Reading | None:
    if (match := _ITER.match(line)) is not None:
        rest = pairs(line, _ITER_REST, _NAMES, match.end())
        return Reading(TRAIN, (Field("step", *match.span(1)), Field("loss", *match.span(2)), *rest))
    for head, rest_of in ((_COLON, _COLON_REST), (_BAR, _BAR_REST), (_SHORT, _COLON_REST)):
        if (match := head.match(line)) is not None:
            return _record(line, match, rest_of)
    if (match := _WORD.match(line)) is not None:
        return _one(match.span(1), match[2], match.span(3))
    if (match := _ESTIMATE.match(line)) is not None:
        fields = (
            Field("step", *match.span(1)),
            Field("train_estimate", *match.span(2)),
            Field("val_loss", *match.span(3)),
        )
        return Reading(EVAL, fields)
    if (match := _ALONE.match(line)) is not None:
        return Reading(EVAL, (Field(_NAMES[match[1]][0], *match.span(2)),))
    if (match := _FINAL.match(line)) is not None:
        return Reading(EVAL, (Field(match[1].decode() + "/val_loss", *match.span(2)),))
    return None


def _record(line: bytes, head: re.Match[bytes], rest_of: re.Pattern[bytes]) -> Reading | None:
    fields = pairs(line, rest_of, _NAMES, max(head.start(1), head.end() - 1))
    if head.re is _BAR:
        known = {field.name for field in fields}
        for match in _BAR_BARE.finditer(line):
            name, factor = _NAMES[match[2]]
            if name not in known:
                fields.append(Field(name, *match.span(1), factor))
    step = Field("step", *head.span(1))
    train = [field for field in fields if field.name not in _EVALS]
    if len(train) < len(fields) and not any(field.name == "loss" for field in train):
        return Reading(EVAL, (step, *[field for field in fields if field.name in _EVALS]))
    return Reading(TRAIN, (step, *train)) if train else None


def _one(step: tuple[int, int], word: bytes, value: tuple[int, int]) -> Reading:
    name, _ = _NAMES[word]
    return Reading(TRAIN if name == "loss" else EVAL, (Field("step", *step), Field(name, *value)))


def polish(table: Table, sample: bytes) -> None:
    """`train_time` counts from the start: its growth over a step is the step's time."""
    if "train_time" in table.columns and "seconds" not in table.columns and len(table) > 1:
        time, there = table.columns["train_time"], table.present["train_time"]
        steps = np.diff(table.step)
        apart = np.diff(time)
        ok = there[1:] & there[:-1] & (steps > 0) & (apart >= 0)
        seconds = np.full(len(table), np.nan)
        seconds[1:][ok] = apart[ok] / steps[ok]
        table.columns["seconds"], table.present["seconds"] = seconds, np.isfinite(seconds)
    if not table.has("loss") and "val_loss" in table.evals:
        count = len(table.evals["val_loss"].value)
        limit(table, "no_loss", f"only the validation loss is logged, {count} times; the training loss is not")
    match = re.search(rb"step:\d+/(\d+)|step\s+\d+/(\d+) \|", sample)
    total = number(match[1] or match[2]) if match else None
    if total is not None:
        table.facts["planned_steps"] = int(total)


FORMAT = TextFormat(
    name="nanogpt",
    description="nanoGPT, build-nanogpt, llm.c, modded-nanogpt, parameter-golf",
    markers=(b"iter ", b"step:", b"step ", b"s:0 ", b" trl:", b" train "),
    parse=parse,
    polish=polish,
)
