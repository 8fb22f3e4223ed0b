"""The same detectors over a log: what `observe` would say row by row, at a fraction of the time.

A detector that can vouch for a stretch of values at once says so in `calm`, with the very limits `observe` uses, and takes
them in; only what is left is looked at row by row. The findings are the same, one by one.
"""

from __future__ import annotations

import math
import os
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from operator import gt
from typing import Any, Literal, Protocol, overload

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Signal
from holdfast.core.detectors import build
from holdfast.core.detectors.base import Detector, Reader
from holdfast.core.detectors.expected_shifts import LR_JUMP, Shifts
from holdfast.core.detectors.loss_spike import LossSpike
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
"""columns of a log, and the field of a signal each is"""
_WHOLE = {"samples", "length"}
_LONG = 300_000
Entry = tuple[int, int, Finding]
"""a finding with its place and the place of its detector"""


class Columns(Protocol):
    """A log in columns: a step for each row, and values that count where `present` says so."""

    @property
    def step(self) -> Any: ...
    @property
    def columns(self) -> Mapping[str, Any]: ...
    @property
    def present(self) -> Mapping[str, Any]: ...


class Rows:
    """The rows of a log that have a loss, as lists."""

    def __init__(self, log: Columns) -> None:
        there = log.present["loss"].tolist() if "loss" in log.columns else []
        self.rows = [i for i, has in enumerate(there) if has]
        """where each of them is in the log"""
        whole = len(self.rows) == len(there)
        self.step = _pick(log.step.tolist(), self.rows, whole)
        self.fields: dict[str, list[Any]] = {}
        self.whole: set[str] = set()
        """the fields that are there in every row, and finite"""
        for column, field in _FIELDS.items():
            if column not in log.columns:
                continue
            values = _pick(log.columns[column].tolist(), self.rows, whole)
            if not log.present[column].all():
                has = _pick(log.present[column].tolist(), self.rows, whole)
                values = [v if h else None for v, h in zip(values, has, strict=True)]
            if field in _WHOLE:
                values = [int(v) if v is not None and math.isfinite(v) else None for v in values]
            self.fields[field] = values
            if None not in values and all(map(math.isfinite, values)):
                self.whole.add(field)

    def __len__(self) -> int:
        return len(self.step)

    def signal(self, i: int) -> Signal:
        return Signal(step=int(self.step[i]), **{name: values[i] for name, values in self.fields.items()})


def _pick(values: list[Any], rows: list[int], whole: bool) -> list[Any]:
    return values if whole else [values[i] for i in rows]


@overload
def scan(
    log: Columns,
    config: DetectSection | None = None,
    *,
    shifts: Iterable[int] = (),
    detectors: Sequence[Detector] | None = None,
) -> list[Finding]: ...
@overload
def scan(
    log: Columns,
    config: DetectSection | None = None,
    *,
    shifts: Iterable[int] = (),
    detectors: Sequence[Detector] | None = None,
    places: Literal[True],
) -> list[tuple[int, Finding]]: ...
def scan(
    log: Columns,
    config: DetectSection | None = None,
    *,
    shifts: Iterable[int] = (),
    detectors: Sequence[Detector] | None = None,
    places: bool = False,
) -> list[Finding] | list[tuple[int, Finding]]:
    """Every finding over a log, in the order of its rows; with `places`, each with its place among those with a loss.

    Shifts are recognised as online, and by the learning rate too; `shifts` are rows of the log, declared besides.
    """
    rows = Rows(log)
    if "loss" not in rows.fields:
        return []
    chosen = build(config or DetectSection()) if detectors is None else list(detectors)
    # A shift declared where no loss was logged counts from the next row that has one.
    borders = {*recognised(rows), *(bisect_left(rows.rows, row) for row in shifts)}
    found = _found(list(enumerate(chosen)), rows, sorted(borders))
    found.sort(key=lambda entry: entry[:2])
    return [(place, finding) for place, _, finding in found] if places else [finding for _, _, finding in found]


def _found(chosen: list[tuple[int, Detector]], rows: Rows, borders: list[int]) -> list[Entry]:
    """What these detectors find; in a long log the slowest has a process of its own."""
    slowest = [pair for pair in chosen if isinstance(pair[1], LossSpike)]
    if len(rows) < _LONG or not slowest or len(chosen) == 1 or not _may_fork():
        return [(i, n, f) for n, d in chosen for i, f in _over(d, rows, borders)]
    with _apart(lambda: _found(slowest, rows, borders)) as answer:
        own = _found([pair for pair in chosen if pair not in slowest], rows, borders)
        return [*own, *answer()]


def _may_fork() -> bool:
    """Two cores, and nothing loaded that runs threads of its own."""
    return hasattr(os, "fork") and (os.cpu_count() or 1) > 1 and "torch" not in sys.modules


@contextmanager
def _apart(work: Callable[[], list[Entry]]) -> Iterator[Callable[[], list[Entry]]]:
    """Do some work in a process that sees what is here; done here instead where that one fails."""
    fork = get_context("fork")
    here, there = fork.Pipe(duplex=False)
    process = fork.Process(target=lambda: there.send(work()), daemon=True)
    process.start()
    there.close()

    def answer() -> list[Entry]:
        try:
            result: list[Entry] = here.recv()
            return result
        except EOFError:
            return work()

    try:
        yield answer
    finally:
        process.kill()
        process.join()
        here.close()


def recognised(rows: Rows) -> list[int]:
    """Where the step itself changed: the places, among the rows with a loss, at which the detectors start anew."""
    watch = Shifts(by_lr=True)
    by = {"samples": watch.batch, "length": watch.length, "lr": watch.lr}
    return [
        i
        for name, moved in by.items()
        if name in rows.fields and not (name in rows.whole and _smooth(rows.fields[name]))
        for i, v in enumerate(rows.fields[name])
        if moved(v) is not None
    ]


def _smooth(values: list[float]) -> bool:
    """Whether no value is much above the one before, and so none can be a shift of the learning rate or a new size."""
    if isinstance(values[0], int):
        return values.count(values[0]) == len(values)
    return not any(map(gt, values[1:], [LR_JUMP * v for v in values]))


def _over(detector: Detector, rows: Rows, borders: list[int]) -> Iterable[tuple[int, Finding]]:
    """The findings of one detector, with the place of each."""
    if getattr(detector, "field", "loss") not in rows.fields:
        return
    places, values = _places(detector, rows)
    steps = rows.step if isinstance(places, range) else [rows.step[i] for i in places]
    reader = detector if isinstance(detector, Reader) else None
    at, ends = 0, [*_ends(places, borders), len(places)]
    for n, end in enumerate(ends):
        if n:
            detector.rebaseline()
        while at < end:
            if reader is not None and values is not None:
                until = min(end, at + reader.stretch)
                if calm := reader.calm(values[at:until], steps[at:until]):
                    at += calm
                    continue
            finding = detector.observe(rows.signal(places[at]))
            if finding is not None:
                yield places[at], finding
            at += 1


def _ends(places: Sequence[int], borders: list[int]) -> list[int]:
    """How many of the places lie before each border."""
    ends, at = [], 0
    for border in borders:
        while at < len(places) and places[at] < border:
            at += 1
        ends.append(at)
    return ends


def _places(detector: Detector, rows: Rows) -> tuple[Sequence[int], list[Any] | None]:
    """The rows a detector has to see, and their values where it can vouch for several at once."""
    if isinstance(detector, NonFinite):
        if {"loss", "grad_norm"} & set(rows.fields) <= rows.whole:
            return [], None
        norms = rows.fields.get("grad_norm") or [None] * len(rows)
        both = zip(rows.fields["loss"], norms, strict=True)
        return [
            i for i, (a, b) in enumerate(both) if not math.isfinite(a) or (b is not None and not math.isfinite(b))
        ], None
    if not isinstance(detector, Reader):
        return range(len(rows)), None
    field, with_loss = detector.field, detector.with_loss
    values, losses = rows.fields[field], rows.fields["loss"]
    if {field, *(["loss"] if with_loss else [])} <= rows.whole:
        return range(len(rows)), values
    if not with_loss:
        losses = [0.0] * len(values)
    both = zip(values, losses, strict=True)
    places = [i for i, (v, x) in enumerate(both) if v is not None and math.isfinite(v) and math.isfinite(x)]
    return places, [values[i] for i in places] if len(places) < len(values) else values
