"""MosaicML Composer's console: `[batch=1/100]:` and below it one metric a line, `Train loss/train/total: 10.9736`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from holdfast.diagnosis.importers.reading import column_names as names
from holdfast.diagnosis.importers.reading.line import EVAL, TRAIN, Field, Reading, number
from holdfast.diagnosis.importers.reading.text_format import TextFormat

_HEAD = re.compile(rb"\[(?:epoch=(\d+)(?:/\d+)?\]\[)?batch=(\d+)(?:/\d+)?\]:")
_JOINT = re.compile(rb"\n{1,3}(?:\d+:|\[?\w*rank\d+\]?:)?[ \t]{1,40}(?=(?:Train|Eval) )")
_METRIC = re.compile(rb"\b(Train|Eval) ([^\s:][^:]{0,200}): ([-+]?(?:\d[\d.]*(?:[eE][-+]\d+)?|nan|inf))(?=\s|$)")


def gather(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Each record on one line. A record that a chunk cuts in two waits for the next chunk."""
    held = b""
    for chunk in chunks:
        chunk = held + b"\n" + chunk if held else chunk
        heads = [match.start() for match in _HEAD.finditer(chunk, max(0, len(chunk) - (64 << 10)))]
        at = chunk.rfind(b"\n", 0, heads[-1]) + 1 if heads else len(chunk)
        held, chunk = chunk[at:], chunk[:at]
        yield _JOINT.sub(b" ", chunk.removesuffix(b"\n"))
    if held:
        yield _JOINT.sub(b" ", held)


def parse(line: bytes) -> Reading | None:
    head = _HEAD.search(line)
    if head is None:
        return None
    train = {"step": Field("step", *head.span(2))}
    evals = dict(train)
    if head[1] is not None:
        train["epoch"] = Field("epoch", *head.span(1))
    for match in _METRIC.finditer(line, head.end()):
        name = match[2].decode("utf-8", "replace")
        if number(match[3]) is None:
            continue
        if match[1] == b"Eval" or names.is_eval(name):
            evals.setdefault(name, Field(name, *match.span(3)))
        else:
            ours, factor = names.column(name)
            if ours == "loss" and name != "loss/train/total":
                ours, factor = name, 1.0
            if name in ("time/batch", "time/epoch"):
                continue
            train.setdefault(ours, Field(ours, *match.span(3), factor))
    if len(train) > 1 + (head[1] is not None):
        return Reading(TRAIN, tuple(train.values()))
    return Reading(EVAL, tuple(evals.values())) if len(evals) > 1 else None


FORMAT = TextFormat(
    name="composer",
    description="MosaicML Composer and LLM Foundry: `[batch=N/M]:` and one metric a line below it",
    markers=(b"batch=",),
    parse=parse,
    prepare=gather,
)
