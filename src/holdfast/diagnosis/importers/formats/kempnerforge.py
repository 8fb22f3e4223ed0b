"""KempnerForge: `[step 50] loss=2.3412 | lr=3.00e-04 | grad_norm=1.203 | tok/s=125,000 | mfu=52.3% | mem=71.2/80GB`."""

from __future__ import annotations

import re

from holdfast.diagnosis.importers.reading.column_names import canonical_column, is_eval
from holdfast.diagnosis.importers.reading.parsed_line import EVAL, TRAIN, Field, ParsedLine
from holdfast.diagnosis.importers.reading.text_format import TextFormat

_HEAD = re.compile(rb"\[step\s+(\d+)\] (?=[\w/]+=)")
_PAIR = re.compile(rb"(?:\] |\| )([\w/]+)=([-+]?(?:\d[\d.,]*(?:[eE][-+]?\d+)?|nan|inf))(k|M|B)?(?=[\s%s/|G]|ms|$)")
_UNITS = {None: 1.0, b"k": 1e3, b"M": 1e6, b"B": 1e9}
_COLUMNS = {"mem": "memory_peak", "tok/s": "tokens_per_second"}


def parse(line: bytes) -> ParsedLine | None:
    head = _HEAD.search(line)
    if head is None:
        return None
    train: dict[str, Field] = {}
    evals: dict[str, Field] = {}
    for match in _PAIR.finditer(line, head.end() - 2):
        name = match[1].decode()
        if is_eval(name):
            evals.setdefault(name, Field(name, *match.span(2), _UNITS[match[3]]))
        else:
            column, factor = (_COLUMNS[name], 1.0) if name in _COLUMNS else canonical_column(name)
            train.setdefault(column, Field(column, *match.span(2), factor * _UNITS[match[3]]))
    step = Field("step", *head.span(1))
    if train:
        return ParsedLine(TRAIN, (step, *train.values()))
    return ParsedLine(EVAL, (step, *evals.values())) if evals else None


FORMAT = TextFormat(
    name="kempnerforge",
    description="KempnerForge's console: `[step N] loss=... | lr=... | grad_norm=... | ...`",
    markers=(b"[step ",),
    parse=parse,
    unfold_epochs=False,
)
