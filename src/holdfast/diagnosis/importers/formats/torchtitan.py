"""torchtitan: `step: 10  loss: 10.7069  grad_norm: 4.5  memory: 30.99GiB(32.62%)  tps: 7,034  mfu: 41.19%`."""

from __future__ import annotations

import re

from holdfast.diagnosis.importers.reading.parsed_line import EVAL, TRAIN, Field, ParsedLine, find_pairs
from holdfast.diagnosis.importers.reading.text_format import TextFormat
from holdfast.diagnosis.model.table import Table

_HEAD = re.compile(rb"\b(validate )?step:\s*(\d+)\s+(?=(?:\w+ )?loss:)")
_METRIC = re.compile(rb"\b([a-z_]+):\s*([-+]?(?:\d[\d.,]*(?:[eE][-+]\d+)?|nan|inf))")
_COLUMNS = {
    b"gnorm": ("grad_norm", 1.0), b"memory": ("memory_reserved", 1.0), b"tps": ("tokens_per_second", 1.0),
    b"wps": ("tokens_per_second", 1.0),
}  # fmt: skip
_CONFIG = re.compile(
    rb"global batch size (\d+)(?:, gradient accumulation steps \d+)?, sequence length (\d+), total steps (\d+)"
)


def parse(line: bytes) -> ParsedLine | None:
    head = _HEAD.search(line)
    if head is None:
        return None
    fields = find_pairs(line, _METRIC, _COLUMNS, head.end())
    step = Field("step", *head.span(2))
    if head[1]:
        return ParsedLine(EVAL, (step, *[field._replace(name=f"validation_{field.name}") for field in fields]))
    return ParsedLine(TRAIN, (step, *fields)) if fields else None


def before_normalize(table: Table, sample: bytes) -> None:
    if (match := _CONFIG.search(sample)) is not None:
        names = ("global_batch_size", "sequence_length", "planned_steps")
        table.facts.update({name: int(match[i][:18]) for i, name in enumerate(names, 1)})
    interval = table.step_interval()
    if interval > 1:
        table.add_limit("downsampled", f"one record every {interval:g} steps, with the values of that step only")


FORMAT = TextFormat(
    name="torchtitan",
    description="torchtitan's console: `step: N  loss: ...  grad_norm: ...  memory: ...  tps: ...`",
    markers=(b"step:",),
    parse=parse,
    before_normalize=before_normalize,
    unfold_epochs=False,
)
