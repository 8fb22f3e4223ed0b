"""Runs the detectors over a log: the findings of `observe` row by row, in a fraction of the time.

A detector that can take a block of values at once does so in `absorb_normal`, with the limits that `observe` uses. Only
the remaining rows go through `observe`. The findings are the same, one by one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from operator import gt
from typing import Any, Protocol

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Signal
from holdfast.core.detectors import build
from holdfast.core.detectors.base import BlockDetector, Detector
from holdfast.core.detectors.expected_shifts import LR_JUMP, ExpectedShifts
from holdfast.core.detectors.nonfinite import NonFinite

_FIELDS = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "loss_scale": "loss_scale",
    "update_rms": "update_rms",
    "weight_norm": "weight_norm",
    "seconds": "seconds",
    "batch_size": "samples",
    "sequence_length": "length",
}
"""column of a log -> field of a signal"""
_INTEGER_FIELDS = {"samples", "length"}


class LogColumns(Protocol):
    """A log in columns: a step for each row, and values that count only if `present` is true."""

    @property
    def step(self) -> Any: ...
    @property
    def columns(self) -> Mapping[str, Any]: ...
    @property
    def present(self) -> Mapping[str, Any]: ...


class LogRows:
    """Holds the rows of a log that have a loss, as lists."""

    def __init__(self, log: LogColumns) -> None:
        has_loss = log.present["loss"].tolist() if "loss" in log.columns else []
        self.rows = [i for i, has in enumerate(has_loss) if has]
        """the position of each row in the log"""
        every_row = len(self.rows) == len(has_loss)

        def pick(column: Any) -> list[Any]:
            values: list[Any] = column.tolist()
            return values if every_row else [values[i] for i in self.rows]

        self.step = pick(log.step)
        self.fields: dict[str, list[Any]] = {}
        self.finite: set[str] = set()
        """the fields that are present and finite in every row"""
        for column, field in _FIELDS.items():
            if column not in log.columns:
                continue
            values = pick(log.columns[column])
            if not log.present[column].all():
                values = [v if has else None for v, has in zip(values, pick(log.present[column]), strict=True)]
            if field in _INTEGER_FIELDS:
                values = [int(v) if v is not None and math.isfinite(v) else None for v in values]
            self.fields[field] = values
            if None not in values and all(map(math.isfinite, values)):
                self.finite.add(field)

    def __len__(self) -> int:
        return len(self.step)

    def signal(self, i: int) -> Signal:
        return Signal(step=int(self.step[i]), **{name: values[i] for name, values in self.fields.items()})


def scan(
    log: LogColumns,
    config: DetectSection | None = None,
    *,
    shifts: Iterable[int] = (),
    detectors: Sequence[Detector] | None = None,
) -> list[tuple[int, Finding]]:
    """Return every finding over a log, in order, each with its position among the rows that have a loss.

    Shifts are recognised as in a run, and by the learning rate too; `shifts` are more of them, as rows of the log.
    """
    rows = LogRows(log)
    if "loss" not in rows.fields:
        return []
    chosen = build(config or DetectSection()) if detectors is None else detectors
    # A shift declared at a row without a loss counts from the next row that has one.
    borders = sorted({*find_shifts(rows), *(bisect_left(rows.rows, row) for row in shifts)})
    findings = [
        (i, n, finding) for n, detector in enumerate(chosen) for i, finding in _scan_one(detector, rows, borders)
    ]
    findings.sort(key=lambda entry: entry[:2])
    return [(i, finding) for i, _, finding in findings]


def find_shifts(rows: LogRows) -> list[int]:
    """Return the positions at which the detectors learn a new level, because the step itself changed."""
    shifts = ExpectedShifts(by_lr=True)
    observers = {"samples": shifts.batch, "length": shifts.length, "lr": shifts.lr}
    return [
        i
        for name, observe in observers.items()
        if name in rows.fields and not (name in rows.finite and _cannot_shift(rows.fields[name]))
        for i, value in enumerate(rows.fields[name])
        if observe(value) is not None
    ]


def _cannot_shift(values: list[float]) -> bool:
    """Return whether a size never changes, or a learning rate never jumps."""
    if isinstance(values[0], int):
        return values.count(values[0]) == len(values)
    return not any(map(gt, values[1:], [LR_JUMP * v for v in values]))


def _scan_one(detector: Detector, rows: LogRows, borders: list[int]) -> Iterable[tuple[int, Finding]]:
    """Yield the findings of one detector, each with its position."""
    if getattr(detector, "field", "loss") not in rows.fields:
        return
    positions, values = _positions(detector, rows)
    steps = rows.step if isinstance(positions, range) else [rows.step[i] for i in positions]
    by_block = detector if isinstance(detector, BlockDetector) else None
    at, ends = 0, [*(bisect_left(positions, border) for border in borders), len(positions)]
    for n, end in enumerate(ends):
        if n:
            detector.rebaseline()
        while at < end:
            if by_block is not None and values is not None:
                until = min(end, at + by_block.max_block)
                if count := by_block.absorb_normal(values[at:until], steps[at:until]):
                    at += count
                    continue
            finding = detector.observe(rows.signal(positions[at]))
            if finding is not None:
                yield positions[at], finding
            at += 1


def _positions(detector: Detector, rows: LogRows) -> tuple[Sequence[int], list[Any] | None]:
    """Return the rows that a detector must see, and their values if it takes blocks."""
    losses = rows.fields["loss"]
    if isinstance(detector, NonFinite):
        if {"loss", "grad_norm"} & set(rows.fields) <= rows.finite:
            return [], None
        norms = rows.fields.get("grad_norm") or [None] * len(rows)
        both = zip(losses, norms, strict=True)
        return [
            i
            for i, (loss, norm) in enumerate(both)
            if not math.isfinite(loss) or not (norm is None or math.isfinite(norm))
        ], None
    if not isinstance(detector, BlockDetector):
        return range(len(rows)), None
    values = rows.fields[detector.field]
    if {detector.field, *(["loss"] if detector.needs_loss else [])} <= rows.finite:
        return range(len(rows)), values
    if not detector.needs_loss:
        losses = [0.0] * len(values)
    both = zip(values, losses, strict=True)
    positions = [i for i, (v, loss) in enumerate(both) if v is not None and math.isfinite(v) and math.isfinite(loss)]
    return positions, [values[i] for i in positions]
