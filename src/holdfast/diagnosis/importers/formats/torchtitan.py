"""torchtitan: `step: 10  loss: 10.7069  grad_norm: 4.5  memory: 30.99GiB(32.62%)  tps: 7,034  mfu: 41.19%`."""

from __future__ import annotations

import re

from holdfast.diagnosis.importers.reading.line import EVAL, TRAIN, Field, Reading, pairs
from holdfast.diagnosis.importers.reading.normalize import limit
from holdfast.diagnosis.importers.reading.text_format import TextFormat
from holdfast.diagnosis.model.table import Table

_HEAD = re.compile(rb"\b(validate )?step:\s*(\d+)\s+(?=(?:\w+ )?loss:)")
_REST = re.compile(rb"\b([a-z_]+):\s*([-+]?(?:\d[\d.,]*(?:[eE][-+]\d+)?|nan|inf))")
_NAMES = {
    b"loss": ("loss", 1.0), b"grad_norm": ("grad_norm", 1.0), b"gnorm": ("grad_norm", 1.0), b"lr": ("lr", 1.0),
    b"memory": ("memory_reserved", 1.0), b"tps": ("tokens_per_second", 1.0), b"wps": ("tokens_per_second", 1.0),
}  # fmt: skip


def parse(line: bytes) -> Reading | None:
    head = _HEAD.search(line)
    if head is None:
        return None
    fields = pairs(line, _REST, _NAMES, head.end())
    step = Field("step", *head.span(2))
    if head[1]:
        return Reading(EVAL, (step, *[f._replace(name=f"validation_{f.name}") for f in fields]))
    return Reading(TRAIN, (step, *fields)) if fields else None


def polish(table: Table, sample: bytes) -> None:
    about = re.search(
        rb"global batch size (\d+)(?:, gradient accumulation steps \d+)?, sequence length (\d+), total steps (\d+)",
        sample,
    )
    if about is not None:
        table.facts.update(
            global_batch_size=int(about[1][:18]), sequence_length=int(about[2][:18]), planned_steps=int(about[3][:18])
        )
    usual = table.step_interval()
    if usual > 1:
        limit(table, "downsampled", f"one record every {usual:g} steps, with the values of that step alone")


FORMAT = TextFormat(
    name="torchtitan",
    description="torchtitan's console: `step: N  loss: ...  grad_norm: ...  memory: ...  tps: ...`",
    markers=(b"step:",),
    parse=parse,
    polish=polish,
    unfold=False,
)
