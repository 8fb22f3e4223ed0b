"""Reads the lines of text logs: names and numbers, the step, the unit, and which lines are evaluations.

A LogDescription holds what is special about one format. Whatever it leaves out is decided as for a log of unknown origin:
a line with a loss is a record, a line that names held-out data before its first metric is an evaluation, and a line with
a step but no metric gives its step to the records after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from holdfast.diagnosis.importers.reading.column_names import (
    canonical_column,
    is_eval,
    is_part_of_loss,
    is_perplexity,
    is_step,
    loss_rank,
    pick_reward,
    snake_case,
)
from holdfast.diagnosis.importers.reading.parsed_line import EVAL, TRAIN, Field, ParsedLine, parse_number

HEADING = "_heading_"
"""prefix of the step or epoch on a line without a metric; it belongs to the records after the line"""
STEPS_OF_EPOCH = "_steps_of_epoch"
MAX_LINE_BYTES = 6000
_PAIR = re.compile(
    rb"(?<![\w./\-])\[?['\"]?([A-Za-z_][\w/.\-]*+(?: [A-Za-z_][\w/.\-]*+)??)(?: ?\((?:ms|s|train|val|test)\))?['\"]?\]?"
    rb"(?:\s*+[:=]\s*+|\s++)['\"\[(]{0,2}\s*+"
    rb"([-+]?(?:\d[\d.,]*(?:[eE][-+]?\d+)?|\.\d+|[nN][aA][nN]|[iI]nf|Infinity))(k|M|B)?(?:\s*+/\s*+(\d{1,15}))?"
    rb"(?=(?:ms|sec|s|%|GB|GiB|MB|G|it)?(?:[^\w.:]|[.:]?(?:\s|$)))"
)
_BRACKETS = re.compile(rb"\[\s*(\d{1,9})(?:/\d{1,9})?\s*\]\s*\[\s*(\d{1,15})\s*/\s*(\d{1,15})\s*\]")
_PROGRESS_BAR = re.compile(rb"(?<![\d/])(\d{1,15})/(\d{1,15}|\?) \[")
_EVAL_WORD = re.compile(
    rb"(?<![\w/.\-])(val|valid|validation|validate|validating|dev|test|testing|eval|evaluation|evaluating|evaluate|heldout)"
    rb"(?:\)|(?![\w/.\-=]))",
    re.IGNORECASE,
)
_NO_RECORD = re.compile(rb"(?<!\w)(?:best|lowest|improved|so far|final|early stopping|patience)(?!\w)", re.IGNORECASE)
_CODE = re.compile(
    rb"^\s*(?:def|class|if|elif|for|while|return|import|from|print|assert|with|raise|parser|self|#|File|@)\b"
    rb"|self\.|\{\w+[:}]|^\s*\w+ = |\)\.|(?<!=)==(?!=)|^\s+\w+\("
)
_METRIC_WORDS = (
    b"loss", b"Loss", b"LOSS", b"nll", b"erplexity", b"ppl", b"PPL", b"cost", b"objective", b"eward", b"rew", b"eturn",
    b"EpRet", b"xent", b"Entropy",
)  # fmt: skip
_HEADING_WORDS = (b"tep", b"STEP", b"poch", b"EPOCH", b"ter", b"pdate", b"atch")
_EVAL_METRIC = re.compile(
    r"loss|acc|ppl|perpl|bleu|rouge|f1|auc|wer|cer|err|score|reward|iou|map|mse|mae|nll|bpb|top|psnr|ssim|fid|ap", re.I
)
_TEXT_BEFORE_NAME = {
    "info", "debug", "warning", "the", "and", "with", "train", "training", "batch", "avg", "average", "mean", "total",
    "running", "current", "smoothed", "epoch", "step", "iter", "iteration", "main", "root", "at", "in", "on", "of",
    "for", "global",
}  # fmt: skip
_OTHER_COUNTS = {
    "total",
    "max",
    "num",
    "warmup",
    "warm",
    "per",
    "of",
    "every",
    "save",
    "log",
    "eval",
    "remaining",
    "last",
    "best",
}
_FACTORS = {None: 1.0, b"k": 1e3, b"M": 1e6, b"B": 1e9}


@dataclass(frozen=True)
class LogDescription:
    """Describes one format of text logs. All patterns are searched in a line; groups of `record` are columns."""

    name: str
    description: str
    markers: tuple[str, ...] = ()
    """texts of which every such log holds one"""
    record: str = ""
    """pattern of a training record; without it, any line with a loss"""
    evaluation: str = ""
    """pattern of an evaluation line; without it, a line that says so. The group `name` names the data"""
    ignore: str = ""
    """pattern of lines that are no records"""
    continues: str = ""
    """pattern of the start of a line that belongs to the record on the lines before it"""
    boxes: bool = False
    """a record is a box with a name and a value on each line"""
    columns: Mapping[str, str] = field(default_factory=dict)
    """name in the log -> Holdfast's column; an empty column is not read"""
    parts: tuple[str, ...] = ()
    """columns whose sum is the loss"""
    unit: str = "step"
    """what the group `step` counts"""
    counts_within_epoch: bool = True
    """the step may restart with every epoch"""
    averaged: str = ""
    """what a logged loss is a mean of"""
    decides: bool = False
    """a log with a few such records is of this format, whatever other lines it holds"""


GENERIC = LogDescription(
    name="generic_text",
    description="any text with `key: value`, `key=value` or `key value` and a loss in its lines",
)


class Pair(NamedTuple):
    """One name and number of a line. `total` is the span of M in `N/M`."""

    name: str
    start: int
    end: int
    factor: float
    total: tuple[int, int]
    key_start: int


def find_pairs_of_any_name(line: bytes) -> Iterator[Pair]:
    for match in _PAIR.finditer(line):
        end = match.end(2)
        while line[end - 1 : end] in (b",", b"."):
            end -= 1
        if parse_number(line[match.start(2) : end]) is not None:
            factor = _FACTORS[match[3]]
            yield Pair(_resolve(match[1]), match.start(2), end, factor, match.span(4), match.start(1))


@lru_cache(maxsize=8192)
def _resolve(key: bytes) -> str:
    """Return the name that a person takes from one or two words before a number: `INFO step` is `step`."""
    full = key.decode("utf-8", "replace")
    first, _, last = full.partition(" ")
    if not last or is_eval(full) or is_step(full) or loss_rank(full) is not None or canonical_column(full)[0] != full:
        return full
    if is_step(last):
        return full if first.lower() in _OTHER_COUNTS else last
    if first.lower() in _TEXT_BEFORE_NAME or first.isupper():
        return last
    return full


def line_parser(description: LogDescription, mapping: Mapping[str, str] | None) -> Callable[[bytes], ParsedLine | None]:
    """Return the parser of a format. `mapping` is the user's: signal -> name in the log."""
    mapped = {column: signal for signal, column in (mapping or {}).items()}
    columns = {**description.columns, **mapped}
    record, evaluation, ignore = (
        re.compile(pattern.encode()) if pattern else None
        for pattern in (description.record, description.evaluation, description.ignore)
    )
    is_generic = record is None
    words = tuple(name.encode() for name in mapped) or _METRIC_WORDS

    def parse(line: bytes) -> ParsedLine | None:
        if len(line) > MAX_LINE_BYTES or (ignore is not None and ignore.search(line)):
            return None
        head = record.search(line) if record is not None else None
        held_out = evaluation.search(line) if evaluation is not None else None
        if record is not None and head is None and held_out is None:
            return None
        if is_generic and held_out is None:
            has_metric = any(word in line for word in words)
            if not has_metric and not any(word in line for word in _HEADING_WORDS):
                return None
            if not mapped and _CODE.search(line) is not None:
                return None
        named = head.re.groupindex if head is not None and held_out is None else {}
        fixed = {name: Field(name, *head.span(name)) for name in named if head is not None and head[name] is not None}
        if "steps_of_epoch" in fixed:
            fixed[STEPS_OF_EPOCH] = fixed.pop("steps_of_epoch")._replace(name=STEPS_OF_EPOCH)
        line_record = _LineRecord(line, columns, fixed)
        if held_out is not None:
            name = held_out.groupdict().get("name") or b"eval"
            return line_record.as_evaluation(name.decode().lower(), every_metric=True)
        if head is not None:
            return line_record.as_record(only=True)
        return line_record.as_record(only=False)

    return parse


class _LineRecord:
    """Sorts the pairs of one line into step, epoch, loss and other columns."""

    def __init__(self, line: bytes, columns: Mapping[str, str], fixed: dict[str, Field]) -> None:
        self.line = line
        self.train: dict[str, Field] = dict(fixed)
        self.evals: dict[str, Field] = {}
        self.first_metric = len(line)
        self.has_loss = bool({"loss", "ppl"} & set(fixed))
        spans = {(field.start, field.end) for field in fixed.values()}
        best: int | None = -1 if "loss" in fixed or "loss" in columns.values() else None
        step_is_global = "step" in fixed
        for pair in find_pairs_of_any_name(line):
            name, found = pair.name, Field(pair.name, pair.start, pair.end, pair.factor)
            if (pair.start, pair.end) in spans:
                continue
            if name in columns:
                column = columns[name]
                if column and column not in fixed:
                    self.train[column] = found._replace(name=column)
                    self._see_metric(pair, column in ("loss", "ppl", "reward"), column)
            elif is_step(name):
                is_global = snake_case(name).startswith("global")
                if "step" not in self.train or (is_global and not step_is_global):
                    step_is_global = is_global
                    self.train["step"] = found._replace(name="step")
                    self.train.pop(STEPS_OF_EPOCH, None)
                    if pair.total[0] >= 0 and not is_global:
                        self.train[STEPS_OF_EPOCH] = Field(STEPS_OF_EPOCH, *pair.total)
            elif is_eval(name):
                self._see_metric(pair, False)
                self.evals.setdefault(name, found)
            elif (rank := loss_rank(name)) is not None:
                self._see_metric(pair, True)
                if best is None or rank < best:
                    best, self.train["loss"] = rank, found._replace(name="loss")
            else:
                self._add_other(pair, found)
        self._read_brackets()

    def _see_metric(self, pair: Pair, is_loss: bool, column: str = "") -> None:
        self.has_loss |= is_loss
        if column not in ("epoch", "step"):
            self.first_metric = min(self.first_metric, pair.key_start)

    def _add_other(self, pair: Pair, found: Field) -> None:
        column, factor = ("grad_norm", 1.0) if pair.name == "norm" else canonical_column(pair.name)
        if pick_reward([pair.name]) is not None:
            column = "reward"
        is_loss = is_part_of_loss(pair.name) or is_perplexity(pair.name) or column == "reward"
        if column != "epoch" and (is_loss or _EVAL_METRIC.search(pair.name)):
            self._see_metric(pair, is_loss)
        self.train.setdefault(column, found._replace(name=column, factor=factor * found.factor))

    def _read_brackets(self) -> None:
        """Read `[epoch][step/total]`, and the count of a progress bar."""
        if "step" not in self.train and (match := _BRACKETS.search(self.line)) is not None:
            names = ("epoch", "step", STEPS_OF_EPOCH)
            self.train |= {name: Field(name, *match.span(i)) for i, name in enumerate(names, 1)}
        if "step" not in self.train and (match := _PROGRESS_BAR.search(self.line)) is not None:
            self.train["step"] = Field("step", *match.span(1))
            if match[2] != b"?":
                self.train[STEPS_OF_EPOCH] = Field(STEPS_OF_EPOCH, *match.span(2))

    def as_record(self, *, only: bool) -> ParsedLine | None:
        """Return the training record, or the evaluation that the line says it is. `only`: the format knows its records."""
        if not only:
            if (word := _EVAL_WORD.search(self.line, 0, self.first_metric)) is not None and self.first_metric < len(
                self.line
            ):
                return self.as_evaluation(word[1].decode().lower(), every_metric=False)
            if _NO_RECORD.search(self.line, 0, self.first_metric) is not None:
                return None
            if not self.has_loss:
                return self._as_series()
        fields = (*self.train.values(), *(field for name, field in self.evals.items() if _EVAL_METRIC.search(name)))
        return ParsedLine(TRAIN, fields) if self.train.keys() - {"step", "epoch"} else None

    def as_evaluation(self, word: str, *, every_metric: bool) -> ParsedLine | None:
        skipped = {"step", "epoch", STEPS_OF_EPOCH, "lr", "seconds", "tokens_per_second"}
        fields = [
            field._replace(name=f"{word}_{name}")
            for name, field in self.train.items()
            if name not in skipped and (every_metric or name == "loss" or _EVAL_METRIC.search(name))
        ]
        fields += self.evals.values()
        step = self.train.get("step")
        # An evaluation that counts its own batches has no step of the training.
        if step is not None and STEPS_OF_EPOCH not in self.train:
            fields.insert(0, step)
        return ParsedLine(EVAL, tuple(fields)) if len(fields) > (fields[:1] == [step]) else None

    def _as_series(self) -> ParsedLine | None:
        evals = [field for name, field in self.evals.items() if _EVAL_METRIC.search(name)]
        if evals:
            return ParsedLine(EVAL, (*([self.train["step"]] if "step" in self.train else []), *evals))
        heading = [self.train[name]._replace(name=HEADING + name) for name in ("step", "epoch") if name in self.train]
        return ParsedLine(EVAL, tuple(heading)) if heading else None


_BOX_ROW = re.compile(
    rb"\n\|[ \t]{0,60}+([^|\s][^|\n]{0,80}?)[ \t]{0,60}+\|[ \t]{0,60}+"
    rb"([-+]?[\d.][^|\s]{0,30}|nan|inf|)[ \t]{0,60}+\|(?=\n|$)"
)
_INDENTED_PAIR = re.compile(
    rb"\n(?:\d+:|\[?\w*rank\d+\]?:)?"
    rb"(?=[ \t|>*]{1,40}[A-Za-z][^\n:=|]{0,100}[:=][ \t]*[-+]?(?:\d|nan|inf)[^\n]{0,40}(?:\n|$))"
)
_HOLD_BYTES = 64 << 10


def line_joiner(description: LogDescription, sample: bytes) -> Callable[[Iterable[bytes]], Iterator[bytes]] | None:
    """Return a function that puts records of several lines on one line; None if the log has none."""
    if description.continues:
        pattern, replacement = re.compile(rb"\n(?=" + description.continues.encode() + rb")"), b" "
    elif (description.boxes or not description.record) and len(_BOX_ROW.findall(sample[: 1 << 20])) >= 4:
        pattern, replacement = _BOX_ROW, rb" \1: \2,"
    elif not description.record and _has_indented_records(sample[: 1 << 20]):
        pattern, replacement = _INDENTED_PAIR, b" "
    else:
        return None

    def join(chunks: Iterable[bytes]) -> Iterator[bytes]:
        held = b""
        for chunk in chunks:
            chunk = held + b"\n" + chunk if held else chunk
            # The last record may continue in the next chunk: hold back the last lines.
            at = max(0, len(chunk) - _HOLD_BYTES)
            at = chunk.find(b"\n", at) if at else _last_start(chunk, pattern)
            while at > 0 and pattern.match(chunk, at) is not None:
                at = chunk.find(b"\n", at + 1)
            held, chunk = (chunk[at + 1 :], chunk[:at]) if at > 0 else (chunk, b"")
            if chunk:
                yield pattern.sub(replacement, chunk)
        if held:
            yield pattern.sub(replacement, held)

    return join


def _last_start(chunk: bytes, pattern: re.Pattern[bytes]) -> int:
    """Return the newline before the last line that continues no record; 0 if there is none."""
    at = chunk.rfind(b"\n")
    while at > 0 and pattern.match(chunk, at) is not None:
        at = chunk.rfind(b"\n", 0, at)
    return max(0, at)


def _has_indented_records(sample: bytes) -> bool:
    """Return whether lines with a single metric, below a line with their step, hold the losses."""
    matches = list(_INDENTED_PAIR.finditer(sample))
    lines = [sample[m.end() : sample.find(b"\n", m.end()) % (len(sample) + 1)] for m in matches[:400]]
    return len(lines) >= 4 and sum(any(word in line for word in _METRIC_WORDS) for line in lines) >= 2
