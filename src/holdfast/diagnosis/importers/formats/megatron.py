"""Megatron-LM and related tools: `iteration 10/ 1000 | consumed samples: 40 | ... | lm loss: 1.2E+01 | ... |`.

A record has no `lm loss` if the loss was NaN or every step was skipped; the counters in the record tell which.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np

from holdfast.diagnosis.importers.reading.column_blocks import Floats
from holdfast.diagnosis.importers.reading.normalize import add_averaged_limit, rename_column
from holdfast.diagnosis.importers.reading.parsed_line import EVAL, TRAIN, Field, ParsedLine, find_pairs, parse_number
from holdfast.diagnosis.importers.reading.text_format import TextFormat
from holdfast.diagnosis.model.table import Table

_HEAD = re.compile(rb"\biteration\s+(\d+)/\s*\d+ \|")
_PAIR = re.compile(rb"\|\s*([A-Za-z][^|:]*?):\s*([-+]?[\w.]+(?:[-+]\d+)?)\s*(?=\||$)")
_EVAL = re.compile(rb"\b(validation|test) loss at (?:iteration (\d+)|the end of training)[^|]*\|")
_CUT_RECORD = re.compile(rb"\biteration\s+\d+/\s*\d+ \|[^\n]*[^|\s][ \t]*\n")
_SEARCH_BYTES = 64 << 10
_MAX_LINES_PER_RECORD = 12
_COLUMNS = {
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


def parse(line: bytes) -> ParsedLine | None:
    head = _HEAD.search(line)
    if head is not None:
        fields = find_pairs(line, _PAIR, _COLUMNS, head.end() - 1)
        return ParsedLine(TRAIN, (Field("step", *head.span(1)), *fields)) if fields else None
    head = _EVAL.search(line)
    if head is not None:
        dataset = head[1].decode()
        fields = find_pairs(line, _PAIR, _COLUMNS, head.end() - 1)
        step = [Field("step", *head.span(2))] if head[2] is not None else []
        evals = [field._replace(name=f"{dataset}_{field.name}") for field in fields]
        return ParsedLine(EVAL, (*step, *evals)) if fields else None
    return None


def merge_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Put records on one line that a terminal broke into lines of one width. A whole record ends with `|`."""
    held: list[bytes] = []
    for chunk in chunks:
        tail = max(0, len(chunk) - _SEARCH_BYTES)
        if not held and not _CUT_RECORD.search(chunk, 0, _SEARCH_BYTES) and not _CUT_RECORD.search(chunk, tail):
            yield chunk
            continue
        merged: list[bytes] = []
        for line in chunk.split(b"\n"):
            is_start, is_end = _HEAD.search(line) is not None, line.rstrip().endswith(b"|")
            if is_start or not held or len(held) >= _MAX_LINES_PER_RECORD:
                merged += _join_record(held)
                held = []
            held.append(line)
            if is_end or (len(held) == 1 and not is_start):
                merged += _join_record(held)
                held = []
        yield b"\n".join(merged)
    if held:
        yield b"\n".join(_join_record(held))


def _join_record(lines: list[bytes]) -> list[bytes]:
    """Return the lines as one record if they end like one, else unchanged."""
    return [b"".join(lines)] if len(lines) > 1 and lines[-1].rstrip().endswith(b"|") else lines


def before_normalize(table: Table, sample: bytes) -> None:
    if "samples" in table.columns and "tokens" not in table.columns:
        rename_column(table, "samples", "tokens")
    if len(table):
        _restore_hidden_nan(table)
    match = _HEAD.search(sample)
    total = parse_number(sample[match.end(1) + 1 : match.end() - 1]) if match else None
    if total is not None:
        table.facts["planned_steps"] = int(total)
    patterns = {"world_size": rb"world_size \.+ (\d+)", "precision": rb"using torch\.(\w+) for parameters"}
    for name, pattern in patterns.items():
        if (match := re.search(pattern, sample)) is not None:
            table.facts[name] = match[1].decode()
    add_averaged_limit(table)


def _restore_hidden_nan(table: Table) -> None:
    """Set the loss to NaN in records that leave it out because it was NaN."""
    has_loss = table.present.get("loss", np.zeros(len(table), dtype=bool))
    was_nan = (_counter(table, "nan_iterations") > 0) & ~has_loss
    if was_nan.any():
        table.columns.setdefault("loss", np.full(len(table), np.nan))[was_nan] = np.nan
        table.present["loss"] = has_loss | was_nan
        table.add_limit("nan_hidden", f"{int(was_nan.sum())} records leave the loss out because it was NaN")
    without_loss = int((~has_loss & ~was_nan).sum())
    if without_loss:
        table.add_limit("skipped_hidden", f"{without_loss} records have no loss: every step in them was skipped")
    if "grad_norm" in table.columns:
        count = int((table.present["grad_norm"] & (_counter(table, "skipped") > 0)).sum())
        if count:
            text = f"{count} records with skipped steps have a gradient norm that may belong to an earlier step"
            table.add_limit("stale_grad_norm", text)


def _counter(table: Table, name: str) -> Floats:
    return np.where(table.present[name], table.columns[name], 0) if table.has(name) else np.zeros(len(table))


FORMAT = TextFormat(
    name="megatron",
    description="Megatron-LM, Megatron-DeepSpeed: `iteration N/ M | ... | lm loss: ... |`",
    markers=(b"iteration ",),
    parse=parse,
    merge_lines=merge_lines,
    before_normalize=before_normalize,
    unfold_epochs=False,
)
