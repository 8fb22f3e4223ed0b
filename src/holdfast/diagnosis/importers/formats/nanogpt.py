"""nanoGPT and related projects: build-nanogpt, llm.c, modded-nanogpt, parameter-golf.

Their logs often begin with the source code of the script, so a record must match from the start of its line.
"""

from __future__ import annotations

import re

import numpy as np

from holdfast.diagnosis.importers.reading.parsed_line import (
    EVAL,
    NUMBER,
    TRAIN,
    Field,
    ParsedLine,
    find_pairs,
    parse_number,
)
from holdfast.diagnosis.importers.reading.text_format import TextFormat
from holdfast.diagnosis.model.table import Table

_PREFIX = rb"(?:\[?\w*rank\d+\]?:\s*|\d+: )?"
_ITER = re.compile(_PREFIX + rb"iter (\d+): loss (" + NUMBER + rb")")
_ITER_METRIC = re.compile(rb", ([a-z_ ]+?):? (" + NUMBER + rb")")
_ESTIMATE = re.compile(_PREFIX + rb"step (\d+): train loss (" + NUMBER + rb"), val loss (" + NUMBER + rb")")
_COLON = re.compile(_PREFIX + rb"step:(\d+)(?:/\d+)? (?=\w+:)")
_COLON_METRIC = re.compile(rb"(?<=\s)(\w+):(" + NUMBER + rb")(?=[a-z%\s/(]|$)")
_BAR = re.compile(_PREFIX + rb"step\s+(\d+)(?:/\d+)? \|")
_BAR_METRIC = re.compile(rb"\|\s*\(?((?:train |val )?[a-z/_]+):? (" + NUMBER + rb")")
_BAR_UNIT = re.compile(rb"\|\s*\(?(" + NUMBER + rb") (ms|tok/s)\b")
_STEP_WORD = re.compile(rb"(\d+) (train|val|hella) (" + NUMBER + rb")$")
_LLMC = re.compile(rb"s:(\d+) (?=(?:trl|tel|eval):)")
_EVAL_ONLY = re.compile(
    _PREFIX + rb"(validation loss|val loss|HellaSwag accuracy):?\s+(?:\d+/\d+=)?(" + NUMBER + rb")$"
)
_FINAL = re.compile(rb"(final_\w+) .*?\bval_loss:(" + NUMBER + rb")")

_COLUMNS = {
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


def parse(line: bytes) -> ParsedLine | None:
    if (match := _ITER.match(line)) is not None:
        metrics = find_pairs(line, _ITER_METRIC, _COLUMNS, match.end())
        return ParsedLine(TRAIN, (Field("step", *match.span(1)), Field("loss", *match.span(2)), *metrics))
    for head, metric in ((_COLON, _COLON_METRIC), (_BAR, _BAR_METRIC), (_LLMC, _COLON_METRIC)):
        if (match := head.match(line)) is not None:
            return _parse_record(line, match, metric)
    if (match := _STEP_WORD.match(line)) is not None:
        name, _ = _COLUMNS[match[2]]
        fields = (Field("step", *match.span(1)), Field(name, *match.span(3)))
        return ParsedLine(TRAIN if name == "loss" else EVAL, fields)
    if (match := _ESTIMATE.match(line)) is not None:
        names = ("step", "train_estimate", "val_loss")
        return ParsedLine(EVAL, tuple(Field(name, *match.span(i)) for i, name in enumerate(names, 1)))
    if (match := _EVAL_ONLY.match(line)) is not None:
        return ParsedLine(EVAL, (Field(_COLUMNS[match[1]][0], *match.span(2)),))
    if (match := _FINAL.match(line)) is not None:
        return ParsedLine(EVAL, (Field(match[1].decode() + "/val_loss", *match.span(2)),))
    return None


def _parse_record(line: bytes, head: re.Match[bytes], metric: re.Pattern[bytes]) -> ParsedLine | None:
    fields = find_pairs(line, metric, _COLUMNS, max(head.start(1), head.end() - 1))
    if head.re is _BAR:
        known = {field.name for field in fields}
        for match in _BAR_UNIT.finditer(line):
            name, factor = _COLUMNS[match[2]]
            if name not in known:
                fields.append(Field(name, *match.span(1), factor))
    step = Field("step", *head.span(1))
    train = [field for field in fields if field.name not in _EVALS]
    if len(train) < len(fields) and not any(field.name == "loss" for field in train):
        return ParsedLine(EVAL, (step, *[field for field in fields if field.name in _EVALS]))
    return ParsedLine(TRAIN, (step, *train)) if train else None


def before_normalize(table: Table, sample: bytes) -> None:
    """Derive the seconds of a step from `train_time`, which counts from the start of the run."""
    if "train_time" in table.columns and "seconds" not in table.columns and len(table) > 1:
        present = table.present["train_time"]
        steps, elapsed = np.diff(table.step), np.diff(table.columns["train_time"])
        is_valid = present[1:] & present[:-1] & (steps > 0) & (elapsed >= 0)
        seconds = np.full(len(table), np.nan)
        seconds[1:][is_valid] = elapsed[is_valid] / steps[is_valid]
        table.columns["seconds"], table.present["seconds"] = seconds, np.isfinite(seconds)
    if not table.has("loss") and "val_loss" in table.evals:
        count = len(table.evals["val_loss"].value)
        text = f"no training loss found, only {count} validation losses. Try --map loss=val_loss"
        table.add_limit("no_loss", text)
    match = re.search(rb"step:\d+/(\d+)|step\s+\d+/(\d+) \|", sample)
    total = parse_number(match[1] or match[2]) if match else None
    if total is not None:
        table.facts["planned_steps"] = int(total)


FORMAT = TextFormat(
    name="nanogpt",
    description="nanoGPT, build-nanogpt, llm.c, modded-nanogpt, parameter-golf",
    markers=(b"iter ", b"step:", b"step ", b"s:0 ", b" trl:", b" train "),
    parse=parse,
    before_normalize=before_normalize,
)
