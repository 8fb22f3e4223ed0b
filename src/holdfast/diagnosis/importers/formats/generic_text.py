"""Any other text with `key: value`, `key=value` or `key value` and a loss in it; progress bars included."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from holdfast.diagnosis.importers.reading import column_names as names
from holdfast.diagnosis.importers.reading.line import EVAL, TRAIN, Field, Parse, Reading, number
from holdfast.diagnosis.importers.reading.normalize import limit
from holdfast.diagnosis.importers.reading.text_format import TextFormat
from holdfast.diagnosis.model.table import Table

_NUMBER = rb"[-+]?(?:\d[\d.,]*(?:[eE][-+]?\d+)?|\.\d+|nan|NaN|inf|Infinity)"
_PAIR = re.compile(
    rb"(?<![\w./])\[?['\"]?([A-Za-z_][\w/.\-]*(?: [A-Za-z_][\w/.\-]*)??)['\"]?\]?\s*(?:[:=]\s*|\s)['\"\[(]{0,2}("
    + _NUMBER
    + rb")(?=(?:ms|sec|s|%|GB|GiB|MB|it)?(?:[^\w.:]|\.?(?:\s|$)))"
)
_BAR = re.compile(rb"(?<!\d)(\d{1,15})/(?:\d{1,15}|\?) \[")
_CODE = re.compile(
    rb"^\s*(?:def|class|if|elif|for|while|return|import|from|print|assert|with|raise|parser|self|#|File|@)\b"
    rb"|self\.|\{\w+[:}]|^\s*\w+ = |\)\.|==|^\s+\w+\("
)
_MARKERS = (b"loss", b"Loss", b"LOSS", b"nll", b"perplexity", b"ppl", b"cost", b"objective")
_METRIC = re.compile(r"loss|acc|ppl|perpl|bleu|rouge|f1|auc|wer|err|score|reward|iou|mse|mae|nll|bpb", re.IGNORECASE)
_LONGEST = 6000


def reader(mapping: Mapping[str, str] | None) -> Parse:
    """The parse of one line, with the user's own names for columns."""
    theirs = {name: ours for ours, name in (mapping or {}).items()}
    loss_named = (mapping or {}).get("loss")
    needle = loss_named.encode() if loss_named else b""

    def parse(line: bytes) -> Reading | None:
        if len(line) > _LONGEST or not (needle in line if needle else _may_hold(line)):
            return None
        if not theirs and _CODE.search(line) is not None:
            return None
        return _read(line, theirs)

    return parse


def _may_hold(line: bytes) -> bool:
    """Whether a word for a loss stands in the line. Written out: this is asked of every line of any text."""
    return (
        b"loss" in line
        or b"Loss" in line
        or b"LOSS" in line
        or b"nll" in line
        or b"perplexity" in line
        or b"ppl" in line
        or b"cost" in line
        or b"objective" in line
    )


def _read(line: bytes, theirs: Mapping[str, str]) -> Reading | None:
    train: dict[str, Field] = {}
    evals: dict[str, Field] = {}
    loss: tuple[int, Field] | None = None
    for match in _PAIR.finditer(line):
        name = match[1].decode("utf-8", "replace")
        end = match.end(2) - (line[match.end(2) - 1 : match.end(2)] == b",")
        if number(line[match.start(2) : end]) is None:
            continue
        found = Field(name, match.start(2), end)
        if name in theirs:
            train[theirs[name]] = found._replace(name=theirs[name])
        elif names.is_step(name) and "step" not in train:
            train["step"] = found._replace(name="step")
        elif names.is_eval(name):
            if _METRIC.search(name) is not None:
                evals.setdefault(name, found)
        elif (rank := names.loss_rank(name)) is not None and "loss" not in theirs.values():
            if loss is None or rank < loss[0]:
                loss = (rank, found._replace(name="loss"))
        else:
            ours, factor = ("grad_norm", 1.0) if name == "norm" else names.column(name)
            train.setdefault(ours, found._replace(name=ours, factor=factor))
    if loss is not None:
        train["loss"] = loss[1]
    bar = _BAR.search(line)
    if bar is not None and "step" not in train:
        train["step"] = Field("step", *bar.span(1))
    if "loss" in train:
        return Reading(TRAIN, tuple(train.values()))
    if evals:
        return Reading(EVAL, (*([train["step"]] if "step" in train else []), *evals.values()))
    return None


def polish(table: Table, sample: bytes) -> None:
    """A progress bar shows a step several times; the last time counts, for only then are all its values new."""
    if len(table) < 2 or table.has_limit("no_step") or _BAR.search(sample) is None:
        return
    last = np.ones(len(table), dtype=bool)
    last[:-1] = table.step[1:] != table.step[:-1]
    if "epoch" in table.columns:
        last[:-1] |= table.columns["epoch"][1:] != table.columns["epoch"][:-1]
    if last.all():
        return
    table.step = table.step[last]
    for name in table.columns:
        table.columns[name], table.present[name] = table.columns[name][last], table.present[name][last]
    limit(
        table,
        "duplicates_removed",
        f"a progress bar drew {int((~last).sum())} records again; the last of each step is kept",
    )


def form(mapping: Mapping[str, str] | None = None) -> TextFormat:
    wanted = (mapping or {}).get("loss")
    return TextFormat(
        name="generic_text",
        description="any text with `key: value`, `key=value` or `key value` and a loss in its lines",
        markers=(wanted.encode(),) if wanted else _MARKERS,
        parse=reader(mapping),
        polish=polish,
    )


FORMAT = form()
