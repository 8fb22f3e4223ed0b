"""Any other text with `key: value`, `key=value` or `key value` and a loss, including progress bars."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from holdfast.diagnosis.importers.reading.column_names import canonical_column, is_eval, is_step, loss_rank
from holdfast.diagnosis.importers.reading.normalize import keep_rows
from holdfast.diagnosis.importers.reading.parsed_line import EVAL, TRAIN, Field, ParsedLine, parse_number
from holdfast.diagnosis.importers.reading.text_format import TextFormat
from holdfast.diagnosis.model.table import Table

_PAIR = re.compile(
    rb"(?<![\w./])\[?['\"]?([A-Za-z_][\w/.\-]*(?: [A-Za-z_][\w/.\-]*)??)['\"]?\]?\s*(?:[:=]\s*|\s)['\"\[(]{0,2}"
    rb"([-+]?(?:\d[\d.,]*(?:[eE][-+]?\d+)?|\.\d+|nan|NaN|inf|Infinity))"
    rb"(?=(?:ms|sec|s|%|GB|GiB|MB|it)?(?:[^\w.:]|\.?(?:\s|$)))"
)
_PROGRESS_BAR = re.compile(rb"(?<!\d)(\d{1,15})/(?:\d{1,15}|\?) \[")
_CODE = re.compile(
    rb"^\s*(?:def|class|if|elif|for|while|return|import|from|print|assert|with|raise|parser|self|#|File|@)\b"
    rb"|self\.|\{\w+[:}]|^\s*\w+ = |\)\.|==|^\s+\w+\("
)
_LOSS_WORDS = (b"loss", b"Loss", b"LOSS", b"nll", b"perplexity", b"ppl", b"cost", b"objective")
_EVAL_METRIC = re.compile(
    r"loss|acc|ppl|perpl|bleu|rouge|f1|auc|wer|err|score|reward|iou|mse|mae|nll|bpb", re.IGNORECASE
)
_MAX_LINE_BYTES = 6000


def _parse(line: bytes, mapped: Mapping[str, str]) -> ParsedLine | None:
    """Parse one line. `mapped` gives the user's signal for a column of the log."""
    train: dict[str, Field] = {}
    evals: dict[str, Field] = {}
    loss: tuple[int, Field] | None = None
    for match in _PAIR.finditer(line):
        name = match[1].decode("utf-8", "replace")
        end = match.end(2) - (line[match.end(2) - 1 : match.end(2)] == b",")
        if parse_number(line[match.start(2) : end]) is None:
            continue
        field = Field(name, match.start(2), end)
        if name in mapped:
            train[mapped[name]] = field._replace(name=mapped[name])
        elif is_step(name) and "step" not in train:
            train["step"] = field._replace(name="step")
        elif is_eval(name):
            if _EVAL_METRIC.search(name) is not None:
                evals.setdefault(name, field)
        elif (rank := loss_rank(name)) is not None and "loss" not in mapped.values():
            if loss is None or rank < loss[0]:
                loss = (rank, field._replace(name="loss"))
        else:
            column, factor = ("grad_norm", 1.0) if name == "norm" else canonical_column(name)
            train.setdefault(column, field._replace(name=column, factor=factor))
    if loss is not None:
        train["loss"] = loss[1]
    bar = _PROGRESS_BAR.search(line)
    if bar is not None and "step" not in train:
        train["step"] = Field("step", *bar.span(1))
    if "loss" in train:
        return ParsedLine(TRAIN, tuple(train.values()))
    if evals:
        return ParsedLine(EVAL, (*([train["step"]] if "step" in train else []), *evals.values()))
    return None


def before_normalize(table: Table, sample: bytes) -> None:
    """Keep the last record of each step. A progress bar draws a step several times; only the last has all new values."""
    if len(table) < 2 or table.has_limit("no_step") or _PROGRESS_BAR.search(sample) is None:
        return
    is_last = np.ones(len(table), dtype=bool)
    is_last[:-1] = table.step[1:] != table.step[:-1]
    if "epoch" in table.columns:
        is_last[:-1] |= table.columns["epoch"][1:] != table.columns["epoch"][:-1]
    if not is_last.all():
        text = f"a progress bar drew {int((~is_last).sum())} records again; the last of each step is kept"
        keep_rows(table, is_last)
        table.add_limit("duplicates_removed", text)


def text_format(mapping: Mapping[str, str] | None = None) -> TextFormat:
    """Return the format that reads with the user's names of columns."""
    mapped = {column: signal for signal, column in (mapping or {}).items()}
    loss = (mapping or {}).get("loss")
    words = (loss.encode(),) if loss else _LOSS_WORDS

    def parse(line: bytes) -> ParsedLine | None:
        if len(line) > _MAX_LINE_BYTES or not any(word in line for word in words):
            return None
        if not mapped and _CODE.search(line) is not None:
            return None
        return _parse(line, mapped)

    return TextFormat(
        name="generic_text",
        description="any text with `key: value`, `key=value` or `key value` and a loss in its lines",
        markers=words,
        parse=parse,
        before_normalize=before_normalize,
    )


FORMAT = text_format()
