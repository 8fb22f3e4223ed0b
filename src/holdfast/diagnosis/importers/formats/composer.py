"""MosaicML Composer's console: `[batch=1/100]:`, then one metric on each line, `Train loss/train/total: 10.9736`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from holdfast.diagnosis.importers.reading.column_names import canonical_column, is_eval
from holdfast.diagnosis.importers.reading.parsed_line import EVAL, TRAIN, Field, ParsedLine, parse_number
from holdfast.diagnosis.importers.reading.text_format import TextFormat

_HEAD = re.compile(rb"\[(?:epoch=(\d+)(?:/\d+)?\]\[)?batch=(\d+)(?:/\d+)?\]:")
_LINE_BREAK = re.compile(rb"\n{1,3}(?:\d+:|\[?\w*rank\d+\]?:)?[ \t]{1,40}(?=(?:Train|Eval) )")
_METRIC = re.compile(rb"\b(Train|Eval) ([^\s:][^:]{0,200}): ([-+]?(?:\d[\d.]*(?:[eE][-+]\d+)?|nan|inf))(?=\s|$)")


def merge_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Put each record on one line. The last record of a chunk waits for the next chunk."""
    held = b""
    for chunk in chunks:
        chunk = held + b"\n" + chunk if held else chunk
        heads = [match.start() for match in _HEAD.finditer(chunk, max(0, len(chunk) - (64 << 10)))]
        at = chunk.rfind(b"\n", 0, heads[-1]) + 1 if heads else len(chunk)
        held, chunk = chunk[at:], chunk[:at]
        yield _LINE_BREAK.sub(b" ", chunk.removesuffix(b"\n"))
    if held:
        yield _LINE_BREAK.sub(b" ", held)


def parse(line: bytes) -> ParsedLine | None:
    head = _HEAD.search(line)
    if head is None:
        return None
    train = {"step": Field("step", *head.span(2))}
    evals = dict(train)
    if head[1] is not None:
        train["epoch"] = Field("epoch", *head.span(1))
    fields_of_head = len(train)
    for match in _METRIC.finditer(line, head.end()):
        name = match[2].decode("utf-8", "replace")
        if parse_number(match[3]) is None:
            continue
        if match[1] == b"Eval" or is_eval(name):
            evals.setdefault(name, Field(name, *match.span(3)))
        elif name not in ("time/batch", "time/epoch"):
            column, factor = canonical_column(name)
            if column == "loss" and name != "loss/train/total":
                column, factor = name, 1.0
            train.setdefault(column, Field(column, *match.span(3), factor))
    if len(train) > fields_of_head:
        return ParsedLine(TRAIN, tuple(train.values()))
    return ParsedLine(EVAL, tuple(evals.values())) if len(evals) > 1 else None


FORMAT = TextFormat(
    name="composer",
    description="MosaicML Composer and LLM Foundry: `[batch=N/M]:`, then one metric on each line",
    markers=(b"batch=",),
    parse=parse,
    merge_lines=merge_lines,
)
