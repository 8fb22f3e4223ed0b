"""Reads the lines of text logs: names and numbers, the step, the unit, and which lines are evaluations.

A LogDescription holds what is special about one format. Whatever it leaves out is decided as for a log of unknown origin:
a line with a loss is a record, a line that names held-out data before its first metric is an evaluation, and a line with
a step but no metric gives its step to the records after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from holdfast.diagnosis.importers.reading.column_names import (
    COARSE_STEPS,
    EVAL_WORDS,
    canonical_column,
    is_eval,
    is_part_of_loss,
    is_perplexity,
    is_step,
    lettered_names,
    loss_rank,
    pick_customary_losses,
    pick_reward,
    snake_case,
)
from holdfast.diagnosis.importers.reading.parsed_line import EVAL, TRAIN, Field, ParsedLine, parse_number

HEADING = "_heading_"
"""prefix of the step or epoch on a line without a metric; it belongs to the records after the line"""
STEPS_OF_EPOCH = "_steps_of_epoch"
MAX_LINE_BYTES = 32 << 10
"""the part of a line that is parsed"""
LEAD = "_lead"
"""a number without a name at the start of a record: its step, if it counts"""
_NUMBER = rb"[-+]?(?:\d[\d.,]*(?:[eE][-+]?\d+)?|\.\d+|[nN][aA][nN]|[iI]nf|Infinity)"
_WORD = rb"(?!of\b)[A-Za-z_][\w/.\-@]*+(?:'s)?"
_PAIR = re.compile(
    rb"(?:(?<![\w./\-])|(?<=---)|(?<=\d:\d\d))['\"]?("
    + _WORD
    + rb"(?: "
    + _WORD
    + rb")??(?: ?\((?:val\w{0,7}|dev|test|eval)\))?)(?: so far)?"
    rb"(?: ?\((?:ms|s|train\w{0,3}|batch|epoch|avg|mean)\))?['\"]?\]?"
    rb"(?:\s*+[:=|]\s*+|\s++(?:(?:is|was|at) )?|(?=[\[(]))[#'\"\[(]{0,2}\s*+(?:\d{1,15}-(?=\d+\]))?"
    rb"(?:(\d{1,15})\s++(?=[-+]?\d+\.\d))?"
    rb"(" + _NUMBER + rb")([kKMB])?(?:\s*+/\s*+(\d{1,15}))?"
    rb"(?=(?:ms|sec|s|%|GB|GiB|MB|G|it|th|st|nd|rd)?(?:[^\w.:]|[.:]?(?:[\s,;]|$)))"
)
_DURATION = re.compile(rb" ?(?:s|ms|secs?|seconds?|min|minutes|h|hours?)\b", re.I)
_NAME = re.compile(rb"[A-Za-z]\w{0,30}(?=['\"]?\s{0,3}[:=|\s]\s{0,3}[-+\d.])")
_NAMING_BYTES = 256 << 10
_NEXT_IN_LIST = re.compile(rb",\s*(" + _NUMBER.replace(rb".,", rb".") + rb")(?=[,\])])")
_LOSSES_BY_NAME = re.compile(rb"(?i)\bloss(?:es)?\b['\"]?\s{0,4}[:=]?\s{0,4}\{([^{}]*)\}")
"""`Losses {'ner': 12.3}`: each value is a loss"""
_BRACKETS = re.compile(
    rb"\[\s*(\d{1,9})(?:/\d{1,9})?\s*(?:\]\s*\[|,(?=\s*\d+\]:? (?:\w+ )?loss))\s*(\d{1,15})(?:\s*/\s*(\d{1,15}))?\s*\]"
)
"""`[1][100/500]`, and `[1, 100] loss: 2.5`"""
_COUNTER = re.compile(
    rb"(?<![\w./:\-])(\d{1,15})\s?/\s*(\d{1,15}|\?)"
    rb"(?= \[|[\]);]| \(| \||\s+(?:batches|steps|iterations|iters|updates)\b|, loss)"
)
_GLUED = re.compile(rb"(?<![A-Za-z])(epoch|step|iter)_?(\d{1,15})(?=[/:,\s\]]|$)", re.IGNORECASE)
_VALUE_AT = re.compile(
    rb"(?<![\w/.@\-])("
    + _WORD
    + rb") (?:at|in|after|of|for) (?:global )?(step|iteration|iter|batch|epoch|episode) (\d{1,15}) ?[:=,]? ?"
    rb"(?:is |was )?(?=(" + _NUMBER + rb"))"
)
_LEADING = re.compile(
    rb"^\s*(?:\[\s*(\d{1,12})\s*\]|(\d{1,12})\s*(?::(?=\s)|\||\t|\) |(?= \[[A-Za-z])|(?= \w+ [\d.]+$)))"
)
_EVAL_WORD = re.compile(
    rb"(?<![\w/.\-])(" + EVAL_WORDS.encode() + rb")(?:_(?:epoch|step|iter|loop|end))?(?:\)|(?![\w/.\-=]))",
    re.IGNORECASE,
)
_SECTION = re.compile(
    rb"(?<![\w/.@\-])(?:(train|training)|(" + EVAL_WORDS.encode() + rb"))\s?(?:[:|\])>\[(]| -)",
    re.IGNORECASE,
)
"""`train: loss 0.5 | valid: loss 0.6`: what follows is measured on that data"""
_NO_RECORD = re.compile(
    rb"(?<!\w)(?:train_runtime|best|lowest|improved|final(?!,)|early stopping|patience)(?!\w)", re.IGNORECASE
)
_CODE = re.compile(
    rb"^\s*(?:\++ )?(?:def|class|if|elif|for|while|return|import|from|print|assert|with|raise|parser|self|#|File|@)\b"
    rb"|self\.|\{\w+(?:\}|:[^\s\d])|^\s*\w+ = (?![-+]?[\d.]+(?:e[-+]?\d+)?,)|\)\.|[A-Za-z_)\]] ?==(?!=)\s?[\w'\"]|^\s+\w+\("
    rb"|Warning: |<tf\.\w| object at 0x|(?:(?<![\w'])[a-z']+,? ){7}"
)
"""lines of a program, and sentences"""
METRIC_WORDS = (
    b"loss", b"Loss", b"LOSS", b"nll", b"erplexity", b"ppl", b"PPL", b"cost", b"objective", b"eward", b"rew", b"eturn",
    b"EpRet", b"xent", b"Entropy",
)  # fmt: skip
_HEADING_WORDS = (
    b"tep", b"STEP", b"poch", b"EPOCH", b"ter", b"pdate", b"atch", b"/it", b"it/", b"ITER", b"alid", b"val", b"est", b"dev",
    b"Dev", b"DEV", b"TEST", b"VAL",
)  # fmt: skip
_EVAL_METRIC = re.compile(
    r"^(val|valid|validation|test|dev|eval|tel)$|"
    r"loss|cost|acc|ppl|perpl|bleu|rouge|f1|auc|wer|cer|err|score|reward|iou|map|mse|mae|nll|bpb|top|success|psnr|ssim|fid|ap",
    re.I,
)
_METRIC_BEFORE = re.compile(rb"\b(loss|accuracy|acc|error|f1|bleu|auc|perplexity|precision|recall)\b[^:=|,;.]*$", re.I)
_WORDS_BEFORE_BYTES = 60
_TEXT_BEFORE_NAME = {
    "info", "debug", "warning", "warn", "error", "notice", "trace", "log", "the", "and", "with", "train", "training",
    "batch", "avg", "average", "mean", "total", "running", "current", "smoothed", "epoch", "step", "iter", "iteration",
    "main", "root", "at", "in", "on", "of", "for", "global",
}  # fmt: skip
_LOGGERS = {"root", "INFO", "DEBUG", "__main__"}
_STATE_COLUMNS = {"lr", "grad_norm", "loss_scale", "skipped", "batch_size", "weight_norm"}
"""two of these make a record of a line without a loss: some logs leave NaN out, or print the loss on another line"""
_OTHER_COUNTS = {
    "total", "max", "num", "warmup", "warm", "per", "of", "every", "save", "log", "eval", "remaining", "last", "best",
}  # fmt: skip
_STOP_WORDS = {"value", "executed", "done", "completed", "no", "number"}
"""words after a counter: `Steps executed: 100`"""
_FACTORS = {None: 1.0, b"k": 1e3, b"K": 1e3, b"M": 1e6, b"B": 1e9}


@dataclass(frozen=True)
class LogDescription:
    """Describes one format of text logs. All patterns are searched in a line; groups of `record` are columns."""

    name: str
    description: str
    signature: str = ""
    """pattern that only logs of this format hold; then the generic reader reads them under this name"""
    record: str = ""
    """pattern of a training record; without it, any line with a loss"""
    evaluation: str = ""
    """pattern of an evaluation line; without it, a line that says so. The group `name` names the data"""
    columns: Mapping[str, str] = field(default_factory=dict)
    """name in the log -> Holdfast's column; an empty column is not read"""
    counts_within_epoch: bool = True
    """the step may restart with every epoch"""
    first_step: int = 0
    """number of the first record if the records have no step"""
    averaged: str = ""
    """what a logged loss is a mean of"""


NAMED, CUSTOMARY, ANY = "named", "customary", "any"
"""which lines of an unknown log are records: with a named loss, with a loss by custom, with any metric and a step"""
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
    start = 0
    losses = named.span(1) if b"{" in line and (named := _LOSSES_BY_NAME.search(line)) is not None else (0, 0)
    if (at := _VALUE_AT.search(line)) is not None:  # `Loss at step 100: 2.5` is read as `step 100 Loss: 2.5`
        start, end = at.end(), at.end() + len(at[4].rstrip(b".,"))
        yield Pair(at[2].decode(), *at.span(3), 1.0, (-1, -1), at.start(1))
        if parse_number(line[start:end]) is not None:
            yield Pair(_resolve(at[1]), start, end, 1.0, (-1, -1), at.start(1))
    for match in _PAIR.finditer(line, start):
        end = match.end(3)
        while line[end - 1 : end] in (b",", b"."):
            end -= 1
        if parse_number(line[match.start(3) : end]) is None:
            continue
        name, factor = _resolve(match[1]), _FACTORS[match[4]]
        if _DURATION.match(line, end) and snake_case(name).endswith("cost"):
            name = "time"
        if losses[0] <= match.start() < losses[1] and not is_part_of_loss(name):
            name += "_loss"
        if match[2] is not None:
            yield Pair(LEAD, *match.span(2), 1.0, (-1, -1), match.start(1))
        if name.lower().endswith("losses") and (following := _NEXT_IN_LIST.match(line, end)) is not None:
            yield Pair("loss_0", match.start(3), end, factor, (-1, -1), match.start(1))
            number = 1
            while following is not None:
                yield Pair(f"loss_{number}", *following.span(1), factor, (-1, -1), match.start(1))
                number, following = number + 1, _NEXT_IN_LIST.match(line, following.end())
        else:
            yield Pair(name, match.start(3), end, factor, match.span(5), match.start(1))


@lru_cache(maxsize=8192)
def _resolve(key: bytes) -> str:
    """Return the name that a person takes from one or two words before a number: `INFO step` is `step`."""
    full = key.decode("utf-8", "replace").replace("'s", "")
    first, _, last = full.partition(" ")
    if last.lower() in _STOP_WORDS:
        return first
    if last and _GLUED.fullmatch(first.encode()) is not None:
        return last
    if is_eval(first) and (is_step(last) or snake_case(last) in COARSE_STEPS):
        return last  # `test epoch: 3, loss: 0.5`: the line is an evaluation, the number is not
    if (
        not last
        or is_eval(full)
        or is_step(full)
        or loss_rank(full) is not None
        or pick_reward([full])
        or canonical_column(full)[0] != full
    ):
        return full
    if is_step(last):
        return full if first.lower() in _OTHER_COUNTS else last
    if first.lower() in _TEXT_BEFORE_NAME:
        return last
    return full


def _name_in_section(section: bytes, name: str) -> str:
    """Return the name of a metric on held-out data: `loss` below `valid:` is `valid_loss`."""
    word = section.decode().lower()
    return name if is_eval(name) else f"{word}_{re.sub('(?i)^' + word + '[ :]*', '', name)}".rstrip("_")


def line_parser(
    description: LogDescription,
    mapping: Mapping[str, str] | None,
    accept: str = NAMED,
    met: set[str] | None = None,
    sample: bytes = b"",
) -> Callable[[bytes], ParsedLine | None]:
    """Return the parser of a format. `mapping` is the user's: signal -> name in the log. `met` gets the names it finds."""
    full_names = lettered_names(name.decode() for name in set(_NAME.findall(sample[:_NAMING_BYTES])))
    mapped = {column: signal for signal, column in (mapping or {}).items()}
    columns = {**description.columns, **mapped}
    record, evaluation = (
        re.compile(pattern.encode()) if pattern else None for pattern in (description.record, description.evaluation)
    )
    is_generic = record is None
    words = (*(name.encode() for name in mapped), *METRIC_WORDS)

    def parse(line: bytes) -> ParsedLine | None:
        line = line[:MAX_LINE_BYTES]
        head = record.search(line) if record is not None else None
        held_out = evaluation.search(line) if evaluation is not None else None
        if record is not None and head is None and held_out is None:
            return None
        if is_generic and held_out is None:
            if accept == NAMED and not any(word in line for word in (*words, *_HEADING_WORDS)):
                return None
            if not mapped and _CODE.search(line) is not None:
                return None
        named = head.re.groupindex if head is not None and held_out is None else {}
        fixed = {name: Field(name, *head.span(name)) for name in named if head is not None and head[name] is not None}
        line_record = _LineRecord(line, columns, fixed, accept, full_names)
        if met is not None:
            met.update(line_record.met)
        if held_out is not None:
            name = held_out.groupdict().get("name") or b"eval"
            return line_record.as_evaluation(name.decode().lower(), every_metric=True)
        return line_record.as_record(only=head is not None)

    return parse


class _LineRecord:
    """Sorts the pairs of one line into step, epoch, loss and other columns."""

    def __init__(
        self,
        line: bytes,
        columns: Mapping[str, str],
        fixed: dict[str, Field],
        accept: str,
        full_names: Mapping[str, str],
    ) -> None:
        self.line = line
        self.train: dict[str, Field] = dict(fixed)
        self.evals: dict[str, Field] = {}
        self.met: set[str] = set()
        """the names of columns on this line"""
        self.first_metric = len(line)
        self.has_loss = bool({"loss", "ppl"} & set(fixed))
        spans = {(field.start, field.end) for field in fixed.values()}
        is_given = any(column == "loss" and name.encode() in line for name, column in columns.items())
        best: int | None = -1 if "loss" in fixed or is_given else None
        step_is_global = "step" in fixed
        self.taken = list(spans)
        self.step_is_size = False  # `batch 16` may be the size of a batch: any counter outranks it
        sections = list(_SECTION.finditer(line))
        for pair in find_pairs_of_any_name(line):
            self.taken.append((pair.start, max(pair.end, pair.total[1])))
            if pair.name in _LOGGERS:  # `INFO:root:[100/2000]`
                self.taken.pop()
                continue
            section = next((s for s in reversed(sections) if s.start() <= pair.key_start), None)
            if section is not None and section[2] and section.start() > self.first_metric and pair.name not in columns:
                pair = pair._replace(name=_name_in_section(section[2], pair.name))
            if pair.name not in columns:
                pair = pair._replace(name=full_names.get(pair.name, pair.name))
            name, found = pair.name, Field(pair.name, pair.start, pair.end, pair.factor)
            if (pair.start, pair.end) in spans:
                continue
            if name in columns:
                self.met.add(name)
                column = columns[name]
                if column and column not in fixed:
                    self.train[column] = found._replace(name=column, factor=self._factor(pair, column, 1.0))
                    self._see_metric(pair, column in ("loss", "ppl", "reward"), column)
            elif is_step(name) and line[pair.end : pair.end + 1] == b"%":  # `Steps: 3%|` in front of a bar
                self.taken.pop()
            elif is_step(name) or name == "total_timesteps":
                is_global = snake_case(name).startswith(("global", "total"))
                if "step" not in self.train or (is_global and not step_is_global) or self._is_fraction("step", pair):
                    step_is_global = is_global
                    self.step_is_size = snake_case(name) == "batch" and pair.total[0] < 0
                    self.train["step"] = found._replace(name="step")
                    self.train.pop(STEPS_OF_EPOCH, None)
                    if pair.total[0] >= 0 and not is_global:
                        self.train[STEPS_OF_EPOCH] = Field(STEPS_OF_EPOCH, *pair.total)
            elif is_eval(name):
                self._see_metric(pair, False)
                before = line[max(0, pair.key_start - _WORDS_BEFORE_BYTES) : pair.key_start]
                if not _EVAL_METRIC.search(name) and (metric := _METRIC_BEFORE.search(before)):
                    name = f"{metric[1].decode()} {name}"  # `Accuracy of the network on the 10000 test images: 55 %`
                self.evals.setdefault(name, found._replace(name=name))
            elif (rank := loss_rank(name)) is not None:
                self._see_metric(pair, True)
                if best is None or rank < best:
                    best, self.train["loss"] = rank, found._replace(name="loss")
            else:
                self._add_other(pair, found)
        self._read_counters()
        counters = {name for name in self.train if name in ("step", LEAD) or snake_case(name) in COARSE_STEPS}
        if not self.has_loss and accept != NAMED and counters:
            others = self.train.keys() - counters - {STEPS_OF_EPOCH}
            self.has_loss = bool(pick_customary_losses(others) if accept == CUSTOMARY else others)

    def _is_fraction(self, name: str, other: Pair) -> bool:
        """Return whether a number has a point and another, which would do instead, has none."""
        field = self.train[name]
        return b"." in self.line[field.start : field.end] and b"." not in self.line[other.start : other.end]

    def _see_metric(self, pair: Pair, is_loss: bool, column: str = "") -> None:
        self.has_loss |= is_loss
        if column not in ("epoch", "step"):
            self.first_metric = min(self.first_metric, pair.key_start)

    def _add_other(self, pair: Pair, found: Field) -> None:
        column, factor = ("grad_norm", 1.0) if pair.name == "norm" else canonical_column(pair.name)
        if pick_reward([pair.name, *self.train]) == pair.name:
            column = "reward"
        is_loss = is_part_of_loss(pair.name) or is_perplexity(pair.name) or column == "reward"
        if column != "epoch" and (is_loss or _EVAL_METRIC.search(pair.name)):
            self._see_metric(pair, is_loss)
        if pair.name == "time" and self._is_in_milliseconds(pair):
            column = "seconds"
        factor = self._factor(pair, column, factor)
        self.train.setdefault(column, found._replace(name=column, factor=factor))

    def _factor(self, pair: Pair, column: str, factor: float) -> float:
        return 1e-3 if column == "seconds" and self._is_in_milliseconds(pair) else factor * pair.factor

    def _is_in_milliseconds(self, pair: Pair) -> bool:
        return self.line[pair.end : pair.end + 2] == b"ms" or b"(ms)" in self.line[pair.key_start : pair.start]

    def _read_counters(self) -> None:
        """Read counters without a name: `[epoch][step/total]`, `step/total batches`, a progress bar, `[step]` in front."""
        if "step" not in self.train and (match := _BRACKETS.search(self.line)) is not None:
            names = ("epoch", "step", STEPS_OF_EPOCH)
            self.train |= {name: Field(name, *match.span(i)) for i, name in enumerate(names, 1) if match[i]}
        if "step" not in self.train or self.step_is_size:
            for match in _COUNTER.finditer(self.line):
                if any(start <= match.start() < end for start, end in self.taken):
                    continue
                self.train["step"] = Field("step", *match.span(1))
                self.step_is_size = False
                if match[2] != b"?":
                    self.train[STEPS_OF_EPOCH] = Field(STEPS_OF_EPOCH, *match.span(2))
                break
        if not {"step", "epoch"} & self.train.keys() and (match := _GLUED.search(self.line)) is not None:
            name = "epoch" if match[1].lower() == b"epoch" else "step"
            self.train[name] = Field(name, *match.span(2))
        if "step" not in self.train and (match := _LEADING.match(self.line)) is not None:
            self.train.setdefault(LEAD, Field(LEAD, *match.span(1 if match[1] else 2)))

    def as_record(self, *, only: bool) -> ParsedLine | None:
        """Return the training record, or the evaluation that the line says it is. `only`: the format knows its records."""
        if not only:
            if (word := _EVAL_WORD.search(self.line, 0, self.first_metric)) is not None and self.first_metric < len(
                self.line
            ):
                return self.as_evaluation(word[1].decode().lower(), every_metric=False)
            if _NO_RECORD.search(self.line, 0, self.first_metric) is not None:
                return None
            if not self.has_loss and not self._shows_state():
                return self._as_series()
        fields = (*self.train.values(), *(field for name, field in self.evals.items() if _EVAL_METRIC.search(name)))
        return ParsedLine(TRAIN, fields) if self.train.keys() - {"step", "epoch", LEAD} else None

    def _shows_state(self) -> bool:
        return "step" in self.train and len(_STATE_COLUMNS & self.train.keys()) > 1

    def as_evaluation(self, word: str, *, every_metric: bool) -> ParsedLine | None:
        skipped = {"step", "epoch", STEPS_OF_EPOCH, LEAD, "lr", "seconds", "tokens_per_second"}
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
        names = ("step", "epoch", STEPS_OF_EPOCH)
        heading = [self.train[name]._replace(name=HEADING + name) for name in names if name in self.train]
        return ParsedLine(EVAL, tuple(heading)) if heading else None
