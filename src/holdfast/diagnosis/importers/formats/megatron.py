"""Megatron-LM and its relatives: `iteration 10/ 1000 | consumed samples: 40 | ... | lm loss: 1.2E+01 | ... |`.

A step whose loss is NaN, or that was skipped, is logged without `lm loss`; the counters say which of the two it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np

from holdfast.diagnosis.importers.reading.line import EVAL, TRAIN, Field, Reading, number, pairs
from holdfast.diagnosis.importers.reading.normalize import limit
from holdfast.diagnosis.importers.reading.text_format import TextFormat
from holdfast.diagnosis.model.table import Table

_HEAD = re.compile(rb"\biteration\s+(\d+)/\s*\d+ \|")
_REST = re.compile(rb"\|\s*([A-Za-z][^|:]*?):\s*([-+]?[\w.]+(?:[-+]\d+)?)\s*(?=\||$)")
_EVAL = re.compile(rb"\b(validation|test) loss at (?:iteration (\d+)|the end of training)[^|]*\|")
_OPEN = re.compile(rb"\biteration\s+\d+/\s*\d+ \|[^\n]*[^|\s][ \t]*\n")
_LOOK = 64 << 10
_NAMES = {
    b"lm loss": ("loss", 1.0), b"loss": ("loss", 1.0), b"lm-loss": ("loss", 1.0),
    b"elapsed time per iteration (ms)": ("seconds", 1e-3), b"elapsed time per iteration (s)": ("seconds", 1.0),
    b"learning rate": ("lr", 1.0), b"global batch size": ("batch_size", 1.0), b"loss scale": ("loss_scale", 1.0),
    b"grad norm": ("grad_norm", 1.0), b"params norm": ("weight_norm", 1.0), b"num zeros": ("num_zeros", 1.0),
    b"number of skipped iterations": ("skipped", 1.0), b"number of nan iterations": ("nan_iterations", 1.0),
    b"consumed samples": ("samples", 1.0), b"consumed tokens": ("tokens", 1.0),
    b"curriculum seqlen": ("sequence_length", 1.0),
    b"samples per second": ("tokens_per_second", 1.0), b"tokens per second": ("tokens_per_second", 1.0),
    b"TFLOPs": ("tflops", 1.0), b"throughput per GPU (TFLOP/s/GPU)": ("tflops", 1.0),
    b"lm loss value": ("loss", 1.0), b"lm loss PPL": ("ppl", 1.0),
}  # fmt: skip


def parse(line: bytes) -> Reading | None:
    head = _HEAD.search(line)
    if head is not None:
        fields = pairs(line, _REST, _NAMES, head.end() - 1)
        return Reading(TRAIN, (Field("step", *head.span(1)), *fields)) if fields else None
    head = _EVAL.search(line)
    if head is not None:
        kind = head[1].decode()
        fields = [field._replace(name=f"{kind}_{field.name}") for field in pairs(line, _REST, _NAMES, head.end() - 1)]
        step = [Field("step", *head.span(2))] if head[2] is not None else []
        return Reading(EVAL, (*step, *fields)) if fields else None
    return None


def unwrap(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """A terminal may have cut records into lines of one width: a record that does not end in `|` goes on in the next."""
    held: list[bytes] = []
    for chunk in chunks:
        if (
            not held
            and _OPEN.search(chunk, 0, _LOOK) is None
            and _OPEN.search(chunk, max(0, len(chunk) - _LOOK)) is None
        ):
            yield chunk
            continue
        out: list[bytes] = []
        for line in chunk.split(b"\n"):
            begins = _HEAD.search(line) is not None
            if held and not begins and len(held) < 12:
                held.append(line)
            elif begins and not line.rstrip().endswith(b"|"):
                out += _release(held)
                held = [line]
                continue
            else:
                out += _release(held)
                held = []
                out.append(line)
                continue
            if line.rstrip().endswith(b"|"):
                out += _release(held)
                held = []
        yield b"\n".join(out)
    if held:
        yield b"\n".join(_release(held))


def _release(held: list[bytes]) -> list[bytes]:
    """The lines as one record if they end like one; else as they were, the first of them a record cut short."""
    if len(held) > 1 and held[-1].rstrip().endswith(b"|"):
        return [b"".join(held)]
    return held


def polish(table: Table, sample: bytes) -> None:
    if "samples" in table.columns and "tokens" not in table.columns:
        table.columns["tokens"] = table.columns.pop("samples")
        table.present["tokens"] = table.present.pop("samples")
    if len(table):
        _hidden_nan(table)
    match = _HEAD.search(sample)
    total = number(sample[match.end(1) + 1 : match.end() - 1]) if match else None
    if total is not None:
        table.facts["planned_steps"] = int(total)
    for name, pattern in (
        ("world_size", rb"world_size \.+ (\d+)"),
        ("precision", rb"using torch\.(\w+) for parameters"),
    ):
        if (found := re.search(pattern, sample)) is not None:
            table.facts[name] = found[1].decode()
    usual = table.step_interval()
    if usual > 1:
        limit(
            table,
            "averaged",
            f"the loss is the mean over {usual:g} steps: a spike of one step shows {usual:g} times smaller",
        )


def _hidden_nan(table: Table) -> None:
    nothing = np.zeros(len(table))
    nans = (
        np.where(table.present["nan_iterations"], table.columns["nan_iterations"], 0)
        if table.has("nan_iterations")
        else nothing
    )
    skipped = np.where(table.present["skipped"], table.columns["skipped"], 0) if table.has("skipped") else nothing
    there = table.present.get("loss", np.zeros(len(table), dtype=bool))
    dead = (nans > 0) & ~there
    if dead.any():
        values = table.columns.setdefault("loss", np.full(len(table), np.nan))
        values[dead] = np.nan
        table.present["loss"] = there | dead
        limit(
            table,
            "nan_hidden",
            f"{int(dead.sum())} records leave the loss out because it was NaN; they count as NaN here",
        )
    left_out = int((~there & ~dead).sum())
    if left_out:
        limit(table, "skipped_hidden", f"{left_out} records hold no loss: every step in them was skipped")
    if "grad_norm" in table.columns and (table.present["grad_norm"] & (skipped > 0)).any():
        count = int((table.present["grad_norm"] & (skipped > 0)).sum())
        limit(
            table,
            "stale_grad_norm",
            f"{count} records with skipped steps show a gradient norm that may be an earlier step's",
        )


FORMAT = TextFormat(
    name="megatron",
    description="Megatron-LM, Megatron-DeepSpeed: `iteration N/ M | ... | lm loss: ... |`",
    markers=(b"iteration ",),
    parse=parse,
    prepare=unwrap,
    polish=polish,
    unfold=False,
)
