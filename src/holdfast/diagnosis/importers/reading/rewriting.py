"""Rewrites text so that each record is one line of names and numbers.

Boxes, metrics on lines of their own below a heading, evaluations below their name, rows of a table below its header, rows of
numbers without a header, and the usual words of training logs in some languages.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from holdfast.diagnosis.importers.reading.column_names import (
    EVAL_WORDS,
    is_eval,
    is_part_of_loss,
    loss_rank,
    pick_customary_losses,
    pick_reward,
)
from holdfast.diagnosis.importers.reading.described_line import METRIC_WORDS, LogDescription
from holdfast.diagnosis.importers.reading.parsed_line import parse_number

Rewriter = Callable[[Iterable[bytes]], Iterator[bytes]]
_BOX_ROW = re.compile(
    rb"\n\|[ \t]{0,60}+([^|\s][^|\n]{0,80}?)[ \t]{0,60}+\|[ \t]{0,60}+"
    rb"([-+]?[\d.][^|\s]{0,30}|nan|inf|)[ \t]{0,60}+\|(?=\n|$)"
)
_INDENTED_PAIR = re.compile(
    rb"\n(?:\d+:|\[?\w*rank\d+\]?:)?"
    rb"(?=[ \t|>*]{1,40}['\"]?[A-Za-z][^\n:=|]{0,100}[:=][ \t]*(?:[-+]?(?:\d|nan|inf)[^\n]{0,40})?(?:\n|$))"
)
_CUT_RECORD = re.compile(rb"\biteration\s+\d+/\s*\d+ \|[^\n]*[^|\s][ \t]*\n")
_REST_OF_CUT = re.compile(rb"\n(?=[^\n|]{0,300}\|)(?![^\n]{0,300}(?:\biteration\s+\d+|(?:validation|test) loss))")
"""the rest of a record with bars that a terminal broke into lines of one width"""
_RUNNING_BAR = re.compile(
    rb"(?m)^ *(\d{1,9})/(?:(?!\1 )\d{1,9} (?:\[[=>.]|\xe2\x94\x81|\xe2\x95\xb8)|\d{1,9} \[[=>.]+\] - ETA:)[^\n]*$"
)
_FULL_BAR = re.compile(rb"(?m)^ *(\d{1,9})/\1 (?:\[=|\xe2\x94\x81)[^\n]*(?:loss|nan)")
"""bars of Keras: the last of an epoch has its means, those before have the means so far"""
_LINE_PREFIX = rb"(?:[^\n]{0,60}?(?:\b(?:INFO|DEBUG)\b|\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?)[^\w\n]*(?:root:)?)*+"
_EVALUATION = re.compile(
    rb"(?mi)^"
    + _LINE_PREFIX
    + rb"(?P<name>(?=[^\n]{0,60}?\b(?P<word>"
    + EVAL_WORDS.encode()
    + rb")\b)(?:[^\w\n]*+(?:"
    + EVAL_WORDS.encode()
    + rb"|sets?|data(?:set)?|results?|metrics?|performance|summary|report|stage|phase|start(?:ing|ed)?|begins?"
    rb"|running|run|on|the|of|for|at|in|after|epoch|step|iter(?:ation)?|mode|model|scores?|loop|loss(?:es)?|best|final|split|\d++)"
    rb"\b)++[^\w\n]*+)$"
)
"""a line that only says that an evaluation begins"""
_RULE_OR_METRIC = re.compile(
    _LINE_PREFIX
    + rb"[^\w\n]*(?P<metric>[A-Za-z](?:[\w /@.()-]{0,40}?)['\"]?[ \t]*[:=|\s][ \t]*[-+]?(?:\d|nan|inf|\.\d)[^\n]*)?$",
    re.I,
)
_OF_NEXT_RECORD = re.compile(rb"(?i)\b(?:epoch|step|iter|iteration|batch|train\w*)\b|\d/\d")
_HOLD_BYTES, _MAX_BLOCK_BYTES = 64 << 10, 4 << 10
_SAMPLE_BYTES = 1 << 20
_WORDS = {
    "\u635f\u5931": "loss", "\u6b65\u6570": "step", "\u6b65": "step", "\u5b66\u4e60\u7387": "lr", "\u8bad\u7ec3": "train ",
    "\u56de\u5408": "epoch", "\u8f6e\u6b21": "epoch", "\u8f6e": "epoch", "\u8fed\u4ee3\u6b21\u6570": "iteration",
    "\u8fed\u4ee3": "iteration", "\u51c6\u786e\u7387": "accuracy", "\u9a8c\u8bc1": "val ", "\u6d4b\u8bd5": "test ",
    "\u5e73\u5747": "mean ", "\u5956\u52b1": "reward", "\u56f0\u60d1\u5ea6": "perplexity", "\uff1a": ": ", "\uff0c": ", ",
    "\u640d\u5931": "loss", "\u30a8\u30dd\u30c3\u30af": "epoch", "\u30b9\u30c6\u30c3\u30d7": "step",
    "\u691c\u8a3c": "val ", "\u8a13\u7df4": "train ", "\uc190\uc2e4": "loss", "\uc5d0\ud3ec\ud06c": "epoch",
    "\uac80\uc99d": "val ", "\u043f\u043e\u0442\u0435\u0440\u0438": "loss", "\u044d\u043f\u043e\u0445\u0430": "epoch",
}  # fmt: skip
_TRANSLATED = {word.encode(): english.encode() for word, english in _WORDS.items()}
_FOREIGN = re.compile(b"(" + b"|".join(map(re.escape, _TRANSLATED)) + b")( ?)")
_DASHED = re.compile(rb"(\b[A-Za-z]\w*) - (?=-?\d+\.\d+(?:;|\n|$))")
"""`perceptual - 53.96; warp_loss - 0.48`"""
_RULE = re.compile(rb"^[\s|+:=-]*$")
_BAR = re.compile(rb":?\s{0,20}+\d{1,3}%\|.*")
_COLON = re.compile(rb"(?<=\d):(?=\s)")
_DIGIT = re.compile(rb"\d")
_GAP = re.compile(rb"\s{2,}|\t")
_CELL = re.compile(rb"\S+(?: \S+)*")
_VALUE = re.compile(rb"^[-+]?(?:\d[\d.,]*(?:[eE][-+]?\d+)?(?:/\d+)?[GMk%]?|nan|inf)$", re.IGNORECASE)
_COMMA = re.compile(rb"\s*(?:[;|]|,(?!\d{3}(?!\d)))\s*|\s+")
_SHORT_NAMES = {b"#": b"step", b"E": b"epoch"}
_MIN_ROWS, _MIN_ROWS_IN_TEXT, _MIN_BOX_ROWS, _LINES_BELOW_HEADER, _MAX_TRIES = 3, 8, 4, 5, 4
_DEEPXDE = re.compile(rb"# step, loss_train, loss_test")
"""each name stands for a column of every part of the loss"""
_MAX_ROW_BYTES = 1000
_NAMING_LINES = 2000


def find_rewriter(description: LogDescription, sample: bytes) -> Rewriter | None:
    """Return a function that puts each record on one line; None if the log needs none."""
    sample = sample[:_SAMPLE_BYTES]
    if description.record:
        return None
    if _EVALUATION.search(sample) is None or len(_BOX_ROW.findall(sample)) >= _MIN_BOX_ROWS:
        return _find_layout(sample)
    layout = _find_layout(_with_joined_evaluations(sample))
    return _join_evaluations if layout is None else lambda chunks: layout(_join_evaluations(chunks))


def _join_evaluations(chunks: Iterable[bytes]) -> Iterator[bytes]:
    held = b""
    for chunk in chunks:
        chunk = held + b"\n" + chunk if held else chunk
        at = max((match.start() for match in _EVALUATION.finditer(chunk, max(0, len(chunk) - _HOLD_BYTES))), default=0)
        held, chunk = (chunk[at:], chunk[: at - 1]) if at else (b"", chunk)
        yield _with_joined_evaluations(chunk)
    if held:
        yield _with_joined_evaluations(held)


def _with_joined_evaluations(chunk: bytes) -> bytes:
    """Return the text with the metrics below the name of an evaluation on one line with it."""
    parts, done = [], 0
    for match in _EVALUATION.finditer(chunk):
        metrics: dict[bytes, bytes] = {}
        end = match.end()
        for line in chunk[end + 1 : end + _MAX_BLOCK_BYTES].split(b"\n"):
            found = _RULE_OR_METRIC.match(line)
            text = found["metric"] if found is not None else None
            name = re.split(rb"[:=|\d]", text or b"")[0]
            if name in metrics and line[:1] in b" \t":  # one more row of a list below the metrics
                end += len(line) + 1
                continue
            if found is None or name in metrics or (text and _OF_NEXT_RECORD.search(text)) or (metrics and not text):
                break
            end += len(line) + 1
            metrics |= {name: text.rstrip(b", ")} if text else {}
        if metrics:
            # The epoch in the name is also that of the records before it.
            name = match["name"] + b"\n" + match["word"] if b"poch" in match["name"] else match["name"]
            parts += [chunk[done : match.start()], name.rstrip(b" \t.:=-*#>"), b" | ", b", ".join(metrics.values())]
            done = end
    return b"".join([*parts, chunk[done:]])


def _find_layout(sample: bytes) -> Rewriter | None:
    """Return what puts the training records on one line each."""
    if _CUT_RECORD.search(sample):
        return _joiner(_REST_OF_CUT, b"")
    if len(_FULL_BAR.findall(sample)) >= _MIN_ROWS:
        return lambda chunks: (_RUNNING_BAR.sub(b"", chunk) for chunk in chunks)
    if len(_BOX_ROW.findall(sample)) >= _MIN_BOX_ROWS:
        return _joiner(_BOX_ROW, _BoxRow())
    if _has_indented_records(sample):
        return _joiner(_INDENTED_PAIR, b" ")
    if not _DEEPXDE.match(sample) and (headers := _find_headers(sample)):
        return _by_line(headers)
    if len(_DASHED.findall(sample)) >= 2 * _MIN_ROWS:
        return lambda chunks: (_DASHED.sub(rb"\1: ", chunk) for chunk in chunks)
    if len(_FOREIGN.findall(sample)) >= 2:
        return lambda chunks: (
            _FOREIGN.sub(lambda match: _TRANSLATED[match[1]].rstrip() + (match[2] or b" "), chunk) for chunk in chunks
        )
    if names := _name_columns(sample):
        return _by_line({}, names)
    return None


class _BoxRow:
    """Writes a row of a box as `name: value,`, below `| eval/ |` as `eval/name: value,`."""

    section = b""

    def __call__(self, row: re.Match[bytes]) -> bytes:
        name, value = row.groups()
        if not value:
            self.section = name if name.endswith(b"/") and is_eval(name.decode("utf-8", "replace")) else b""
            return b""
        return b" " + self.section + name + b": " + value + b","


def _joiner(pattern: re.Pattern[bytes], replacement: bytes | Callable[[re.Match[bytes]], bytes]) -> Rewriter:
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
    """Return whether lines with a single metric hold the losses. The lines of a configuration do not repeat."""
    matches = list(_INDENTED_PAIR.finditer(sample))
    lines = [sample[m.end() : sample.find(b"\n", m.end()) % (len(sample) + 1)] for m in matches[:400]]
    names = Counter(re.split(b"[:=]", line)[0].strip() for line in lines if any(word in line for word in METRIC_WORDS))
    return len(lines) >= 4 and bool(names) and names.most_common(1)[0][1] >= 2


def _by_line(headers: dict[bytes, list[bytes]], names: Sequence[bytes] = ()) -> Rewriter:
    def rewrite(chunks: Iterable[bytes]) -> Iterator[bytes]:
        rows = _NamedRows(headers, names)
        for chunk in chunks:
            yield b"\n".join(map(rows.rewrite, chunk.split(b"\n")))

    return rewrite


class _NamedRows:
    """Writes the rows below a known header as `name: value, name: value`. Leaves other lines as they are."""

    def __init__(self, headers: dict[bytes, list[bytes]], names: Sequence[bytes]) -> None:
        self.headers, self.names = headers, names
        self.header = self.last_bar = b""

    def rewrite(self, line: bytes) -> bytes:
        if self.names and b"%|" in line:  # a bar is drawn again until it is full, and then once more
            row = line[: line.index(b"%|")]
            if not row.endswith(b"100") or row == self.last_bar:
                return b""
            self.last_bar = row
        if header := self.headers.get(_without_digits(line)):
            self.names, self.header = header, line
            return b""
        cells = _split_row(line, len(self.names)) if self.names and len(line) < _MAX_ROW_BYTES else []
        names = self.names
        if not cells or (len(cells) < len(names) and not _VALUE.match(cells[0])):
            return line
        if len(cells) < len(names):
            names = _align(self.header, line, self.names)
        return b", ".join(name + b": " + cell for name, cell in zip(names, cells, strict=False) if _VALUE.match(cell))


def _cells(line: bytes) -> list[bytes]:
    """Return the cells of a line: between bars, or between two blanks or more."""
    line = _BAR.sub(b"", line).strip()
    if line[:1] == b"|" == line[-1:] and len(line) > 1:
        return [cell.strip() for cell in line[1:-1].split(b"|")]
    return _GAP.split(line)


def _layouts(line: bytes) -> tuple[list[bytes], ...]:
    """Return the cells of a line as a table with bars or gaps has them, one with single blanks, and one with commas."""
    return _cells(line), line.split(), _COMMA.split(line.strip())


def _split_row(line: bytes, width: int) -> list[bytes]:
    """Return the cells of a row of a table with so many columns; none if the line is no row."""
    line = _COLON.sub(b"", _BAR.sub(b"", line))
    for cells in _layouts(line):
        numbers = sum(_VALUE.match(cell) is not None for cell in cells)
        if width - 3 <= len(cells) <= width and len(cells) > 1 and numbers >= max(2, 0.6 * len(cells)):
            return cells
    return []


def _without_digits(line: bytes) -> bytes:
    """Return the line with 0 for each digit: a time in front of a header differs."""
    return _DIGIT.sub(b"0", line.strip())


def _align(header: bytes, row: bytes, names: Sequence[bytes]) -> list[bytes]:
    """Return the name above each cell of a row with empty cells."""
    spans = [match.span() for match in _CELL.finditer(header)] if len(_cells(header)) == len(names) else []
    aligned = []
    for match in _CELL.finditer(row):
        overlaps = [min(match.end(), end) - max(match.start(), start) for start, end in spans]
        aligned.append(names[int(np.argmax(overlaps))] if overlaps else b"column")
    return aligned


def _find_headers(sample: bytes) -> dict[bytes, list[bytes]]:
    """Return the headers of tables in a text, each with the names of its columns. A header names a loss or a reward."""
    lines = [line for line in sample.split(b"\n") if _BAR.sub(b"", line).strip() and _RULE.match(line) is None]
    headers: dict[bytes, list[bytes]] = {}
    rows = 0
    tries: Counter[bytes] = Counter()
    for i, line in enumerate(lines):
        shape = _without_digits(line)
        if shape in headers:
            continue
        rows += bool(headers)
        tries[shape] += 1
        for cells in _layouts(line) if 12 < len(line) < 1000 and tries[shape] <= _MAX_TRIES else ():
            if len(cells) < 2 or any(_VALUE.match(cell) or len(cell) > 40 for cell in cells):
                continue
            names = [_SHORT_NAMES.get(cell, re.sub(rb"[^\w/.@-]+", b"_", cell)) or b"column" for cell in cells]
            below = (_split_row(after, len(cells)) for after in lines[i + 1 : i + _LINES_BELOW_HEADER])
            if _names_a_loss([name.decode("utf-8", "replace") for name in names]) and any(
                len(row) == len(cells) for row in below
            ):
                headers[shape] = names
                rows -= 1
                break
    return headers if rows >= _MIN_ROWS else {}


def _names_a_loss(names: list[str]) -> bool:
    known = any(loss_rank(name) is not None or is_part_of_loss(name) for name in names)
    return known or pick_reward(names) is not None or bool(pick_customary_losses(names))


def find_rows_in_text(sample: bytes) -> Rewriter | None:
    """Return a rewriter for a text without any other record, whose rows of numbers have steps and a column that falls."""
    names = _name_columns(sample[:_SAMPLE_BYTES], in_text=True)
    return _by_line({}, names) if names else None


def _name_columns(sample: bytes, *, in_text: bool = False) -> list[bytes]:
    """Return names for rows of nothing but numbers: the step, and the column that is the sum of those before it.

    Without such a sum the loss is the second of two columns, or else the first column that falls. Other lines may only
    be between the rows if `in_text`: then the second column must fall too.
    """
    lines = [
        _COMMA.split(_COLON.sub(b"", line).strip())
        for line in sample.split(b"\n", _NAMING_LINES)[:_NAMING_LINES]
        if line.strip() and len(line) < _MAX_ROW_BYTES
    ]
    lines = [cells for cells in lines if len(cells) > 1 and all(_VALUE.match(cell) for cell in cells)]
    width = Counter(map(len, lines)).most_common(1)[0][0] if lines else 0
    lines = [cells for cells in lines if len(cells) == width]
    least = _MIN_ROWS_IN_TEXT if in_text else max(2 * _MIN_ROWS, 0.8 * min(_NAMING_LINES, sample.count(b"\n") + 1))
    if width < 2 or len(lines) < least:
        return []
    if _DEEPXDE.match(sample):
        parts = range((width - 1) // 2)
        held_out = [b"val_loss_%d" % i if i in parts else b"metric_%d" % i for i in range(width - 1 - len(parts))]
        return [b"step", *(b"loss_%d" % i for i in parts), *held_out]
    values = np.array([[parse_number(cell.split(b"/")[0].rstrip(b"GMk")) or 0.0 for cell in row] for row in lines])
    with np.errstate(all="ignore"):
        sums = np.cumsum(values, axis=1)
    if (np.diff(values[:, 0]) <= 0).mean() > 0.1:
        is_sum = width > 2 and np.allclose(2.0 * values[:, 0], sums[:, -1], rtol=1e-3)
        return [b"loss", *(b"part_%d" % i for i in range(1, width))] if is_sum and not in_text else []
    is_fraction = (values != np.round(values)).any(axis=0)
    starts = [(end, first) for end in range(3, width) for first in range(1, end - 1)]
    close = [np.abs(sums[:, end - 1] - sums[:, first - 1] - values[:, end]) for end, first in starts]
    totals = [
        end for (end, _), gap in zip(starts, close, strict=True) if np.median(gap) < 1e-3 * np.median(values[:, end])
    ]
    tenth = max(1, len(values) // 10)
    falls = [
        i for i in range(1, width) if is_fraction[i] and values[-tenth:, i].mean() < 0.98 * values[:tenth, i].mean()
    ]
    loss = next(iter([*totals, *([1] if width == 2 and not in_text else []), *falls]), 0)
    names = [b"column_%d" % (i + 1) for i in range(width)]
    names[0] = b"epoch" if b"/" in lines[0][0] else b"step"
    names[loss or -1] = b"loss" if loss else names[-1]
    return names if loss else []
