"""DeepSpeed's own lines, and those of its examples: `step=10, skipped=4, lr=[...]`, timers, wordings of overflow."""

from __future__ import annotations

import re

import numpy as np

from holdfast.diagnosis.importers.reading.line import EVAL, TRAIN, Field, Reading, pairs
from holdfast.diagnosis.importers.reading.normalize import limit
from holdfast.diagnosis.importers.reading.text_format import TextFormat
from holdfast.diagnosis.importers.reading.text_log import ROW
from holdfast.diagnosis.model.table import Series, Table

_NUMBER = rb"[-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf)"
_STEP = re.compile(rb"\bstep=(\d+), skipped=(\d+), lr=\[(" + _NUMBER + rb")")
_TIMER = re.compile(rb"global_step=(\d+), (?=RunningAvg)")
_TIMER_REST = re.compile(rb"\b(CurrSamplesPerSec|MemAllocated|MaxMemAllocated)=(" + _NUMBER + rb")")
_MICRO = re.compile(rb"\] \d+/\d+, (?:RunningAvg\w+=[\d.]+, )?CurrSamplesPerSec=(" + _NUMBER + rb")")
_PPO = re.compile(rb"\b[Ee]poch: (\d+)\s*\|\s*[Ss]tep: (\d+)\s*\|(?=.*loss)")
_PPO_REST = re.compile(rb"\|\s*(?:Actor |Critic |Unsupervised )?([A-Za-z_]+(?: Loss)?): (" + _NUMBER + rb")")
_PIPE = re.compile(rb"\bsteps: (\d+) loss: (" + _NUMBER + rb") iter time \(s\): (" + _NUMBER + rb")")
_PPL = re.compile(rb"'step':\s*(\d+), 'ppl': (" + _NUMBER + rb")")
_STEP_AT = re.compile(rb"^Step at (\d+) with Perplexity: (" + _NUMBER + rb")")
_EPOCH = re.compile(rb"^Epoch \d+/\d+ with loss:? (" + _NUMBER + rb")")
_SCALE = re.compile(
    rb"reducing to (" + _NUMBER + rb")|dynamic loss scale from [\d.]+ to (" + _NUMBER + rb")\.?$", re.IGNORECASE
)
_REWARD = re.compile(rb"^average reward score: (" + _NUMBER + rb")")
_NAMES = {
    b"CurrSamplesPerSec": ("tokens_per_second", 1.0), b"MemAllocated": ("memory_allocated", 1.0),
    b"MaxMemAllocated": ("memory_peak", 1.0), b"act_loss": ("loss", 1.0), b"Loss": ("loss", 1.0), b"loss": ("loss", 1.0),
    b"cri_loss": ("critic_loss", 1.0),
}  # fmt: skip
# patterns with one value: what each is called, and whether a step stands before it
_SINGLE = (
    (_PPL, "perplexity", True),
    (_STEP_AT, "perplexity", True),
    (_EPOCH, "train_epoch_loss", False),
    (_REWARD, "reward", False),
)


def parse(line: bytes) -> Reading | None:
    if (match := _STEP.search(line)) is not None:
        return Reading(
            TRAIN, (Field("step", *match.span(1)), Field("skipped", *match.span(2)), Field("lr", *match.span(3)))
        )
    if (match := _TIMER.search(line)) is not None:
        return Reading(TRAIN, (Field("step", *match.span(1)), *pairs(line, _TIMER_REST, _NAMES, match.end())))
    if (match := _PPO.search(line)) is not None:
        rest = [f for f in pairs(line, _PPO_REST, _NAMES, match.end() - 1) if f.name not in ("step", "epoch")]
        return Reading(TRAIN, (Field("epoch", *match.span(1)), Field("step", *match.span(2)), *rest))
    if (match := _PIPE.search(line)) is not None:
        names = ("step", "loss", "seconds")
        return Reading(TRAIN, tuple(Field(name, *match.span(i)) for i, name in enumerate(names, 1)))
    for pattern, name, stepped in _SINGLE:
        if (match := pattern.search(line)) is not None:
            step = [Field("step", *match.span(1))] if stepped else []
            return Reading(EVAL, (*step, Field(name, *match.span(2 if stepped else 1))))
    if (match := _MICRO.search(line)) is not None:
        return Reading(EVAL, (Field("samples_per_second", *match.span(1)),))
    return None


def overflow_scales(table: Table) -> None:
    """The loss scale as the overflow lines tell it."""
    steps, scales = [], []
    for event in table.events:
        match = _SCALE.search(event.text.encode()) if event.kind == "overflow" else None
        if match is not None and event.step is not None:
            steps.append(float(event.step))
            scales.append(float(match[1] or match[2]))
    if scales and "loss_scale" not in table.columns:
        table.evals["loss_scale"] = Series(np.array(steps), np.array(scales))


def polish(table: Table, sample: bytes) -> None:
    if table.has("loss"):
        _apart(table)
    else:
        _merge(table)
    if b"/micro_step=" in sample or _MICRO.search(sample) is not None:
        table.facts["counts"] = "optimizer steps in `step=`, micro steps in some evaluations"


def _apart(table: Table) -> None:
    """Lines without a loss count optimizer steps, those with it the loop's: the former become series of their own."""
    bare = ~table.present["loss"]
    if not bare.any():
        return
    for name in list(table.columns):
        values, there = table.columns[name], table.present[name]
        if (there & bare).any() and name != ROW:
            table.evals[name] = Series(table.step[there & bare], values[there & bare])
        if not (there & ~bare).any():
            del table.columns[name], table.present[name]
    limit(
        table,
        "two_counters",
        f"{int(bare.sum())} lines count optimizer steps and hold no loss; they are kept as series",
    )
    for name in table.columns:
        table.columns[name], table.present[name] = table.columns[name][~bare], table.present[name][~bare]
    table.step = table.step[~bare]


def _merge(table: Table) -> None:
    """A timer line that follows the line of its step belongs to it."""
    if len(table) < 2 or "lr" not in table.columns:
        return
    follows = np.zeros(len(table), dtype=bool)
    follows[1:] = (table.step[1:] == table.step[:-1]) & table.present["lr"][:-1] & ~table.present["lr"][1:]
    at = np.flatnonzero(follows)
    for name in table.columns:
        values, there = table.columns[name].copy(), table.present[name].copy()
        fill = at[there[at] & ~there[at - 1]]
        values[fill - 1], there[fill - 1] = values[fill], True
        table.columns[name], table.present[name] = values[~follows], there[~follows]
    table.step = table.step[~follows]


FORMAT = TextFormat(
    name="deepspeed",
    description="DeepSpeed: `step=N, skipped=K, lr=[...]`, its timers, and the loops of its examples",
    markers=(b"step=", b"|step: ", b"steps: ", b"Step at ", b"| Step: "),
    parse=parse,
    polish=polish,
    conclude=overflow_scales,
)
