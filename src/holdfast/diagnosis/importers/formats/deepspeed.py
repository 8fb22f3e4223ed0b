"""DeepSpeed's own lines and those of its examples: `step=10, skipped=4, lr=[...]`, timers, overflow messages."""

from __future__ import annotations

import re

import numpy as np

from holdfast.diagnosis.importers.reading.normalize import keep_rows
from holdfast.diagnosis.importers.reading.parsed_line import EVAL, NUMBER, TRAIN, Field, ParsedLine, find_pairs
from holdfast.diagnosis.importers.reading.text_format import TextFormat
from holdfast.diagnosis.importers.reading.text_reader import RECORD_INDEX
from holdfast.diagnosis.model.table import Series, Table

_STEP = re.compile(rb"\bstep=(\d+), skipped=(\d+), lr=\[(" + NUMBER + rb")")
_TIMER = re.compile(rb"global_step=(\d+), (?=RunningAvg)")
_TIMER_METRIC = re.compile(rb"\b(CurrSamplesPerSec|MemAllocated|MaxMemAllocated)=(" + NUMBER + rb")")
_MICRO_STEP = re.compile(rb"\] \d+/\d+, (?:RunningAvg\w+=[\d.]+, )?CurrSamplesPerSec=(" + NUMBER + rb")")
_PPO = re.compile(rb"\b[Ee]poch: (\d+)\s*\|\s*[Ss]tep: (\d+)\s*\|(?=.*loss)")
_PPO_METRIC = re.compile(rb"\|\s*(?:Actor |Critic |Unsupervised )?([A-Za-z_]+(?: Loss)?): (" + NUMBER + rb")")
_PIPELINE = re.compile(rb"\bsteps: (\d+) loss: (" + NUMBER + rb") iter time \(s\): (" + NUMBER + rb")")
_SCALE = re.compile(
    rb"reducing to (" + NUMBER + rb")|dynamic loss scale from [\d.]+ to (" + NUMBER + rb")\.?$", re.IGNORECASE
)
_COLUMNS = {
    b"CurrSamplesPerSec": ("tokens_per_second", 1.0), b"MemAllocated": ("memory_allocated", 1.0),
    b"MaxMemAllocated": ("memory_peak", 1.0), b"act_loss": ("loss", 1.0), b"Loss": ("loss", 1.0), b"loss": ("loss", 1.0),
    b"cri_loss": ("critic_loss", 1.0),
}  # fmt: skip
# Patterns, and the columns that their groups are.
_PATTERNS = (
    (TRAIN, _PIPELINE, ("step", "loss", "seconds")),
    (TRAIN, re.compile(rb"'step':\s*(\d+), 'ppl': (" + NUMBER + rb")"), ("step", "perplexity")),
    (TRAIN, re.compile(rb"^Step at (\d+) with Perplexity: (" + NUMBER + rb")"), ("step", "perplexity")),
    (EVAL, re.compile(rb"^Epoch \d+/\d+ with loss:? (" + NUMBER + rb")"), ("train_epoch_loss",)),
    (EVAL, re.compile(rb"^average reward score: (" + NUMBER + rb")"), ("reward",)),
    (EVAL, _MICRO_STEP, ("samples_per_second",)),
)


def parse(line: bytes) -> ParsedLine | None:
    if (match := _STEP.search(line)) is not None:
        return _parsed(TRAIN, match, ("step", "skipped", "lr"))
    if (match := _TIMER.search(line)) is not None:
        metrics = find_pairs(line, _TIMER_METRIC, _COLUMNS, match.end())
        return ParsedLine(TRAIN, (Field("step", *match.span(1)), *metrics))
    if (match := _PPO.search(line)) is not None:
        metrics = find_pairs(line, _PPO_METRIC, _COLUMNS, match.end() - 1)
        metrics = [field for field in metrics if field.name not in ("step", "epoch")]
        return ParsedLine(TRAIN, (Field("epoch", *match.span(1)), Field("step", *match.span(2)), *metrics))
    for kind, pattern, names in _PATTERNS:
        if (match := pattern.search(line)) is not None:
            return _parsed(kind, match, names)
    return None


def _parsed(kind: str, match: re.Match[bytes], names: tuple[str, ...]) -> ParsedLine:
    return ParsedLine(kind, tuple(Field(name, *match.span(i)) for i, name in enumerate(names, 1)))


def add_loss_scale(table: Table) -> None:
    """Read the loss scale from the overflow messages."""
    steps, scales = [], []
    for event in table.events:
        match = _SCALE.search(event.text.encode()) if event.kind == "overflow" else None
        if match is not None and event.step is not None:
            steps.append(float(event.step))
            scales.append(float(match[1] or match[2]))
    if scales and "loss_scale" not in table.columns:
        table.evals["loss_scale"] = Series(np.array(steps), np.array(scales))


def before_normalize(table: Table, sample: bytes) -> None:
    if table.has("loss"):
        _separate_optimizer_steps(table)
    else:
        _merge_timer_records(table)
    if b"/micro_step=" in sample or _MICRO_STEP.search(sample) is not None:
        table.facts["counts"] = "optimizer steps in `step=`, micro steps in some evaluations"


def _separate_optimizer_steps(table: Table) -> None:
    """Move records without a loss to series: they count optimizer steps, and the records with a loss count loop steps."""
    without_loss = ~table.present["loss"]
    if not without_loss.any():
        return
    for name in list(table.columns):
        values, present = table.columns[name], table.present[name]
        moved = present & without_loss
        if moved.any() and name != RECORD_INDEX:
            table.evals[name] = Series(table.step[moved], values[moved])
        if not (present & ~without_loss).any():
            del table.columns[name], table.present[name]
    text = f"{int(without_loss.sum())} lines count optimizer steps and hold no loss; they are kept as series"
    table.add_limit("two_counters", text)
    keep_rows(table, ~without_loss)


def _merge_timer_records(table: Table) -> None:
    """Merge a timer line into the record of the same step before it."""
    if len(table) < 2 or "lr" not in table.columns:
        return
    is_timer = np.zeros(len(table), dtype=bool)
    is_timer[1:] = (table.step[1:] == table.step[:-1]) & table.present["lr"][:-1] & ~table.present["lr"][1:]
    at = np.flatnonzero(is_timer)
    for name in table.columns:
        values, present = table.columns[name].copy(), table.present[name].copy()
        moved = at[present[at] & ~present[at - 1]]
        values[moved - 1], present[moved - 1] = values[moved], True
        table.columns[name], table.present[name] = values, present
    keep_rows(table, ~is_timer)


FORMAT = TextFormat(
    name="deepspeed",
    description="DeepSpeed: `step=N, skipped=K, lr=[...]`, its timers, and the training loops of its examples",
    markers=(b"step=", b"|step: ", b"steps: ", b"Step at ", b"| Step: "),
    parse=parse,
    before_normalize=before_normalize,
    after_normalize=add_loss_scale,
)
