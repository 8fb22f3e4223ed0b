"""Anything that can be scored: it is given a recorded curve and returns its alarms.

`Rule` is the tiny interface of the published rules; `Holdfast` runs this project's own detectors as the runtime would.
On a recorded curve nothing is healed: a step that would have been vetoed, and so never seen again, stays in the record.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import msgspec

from benchmarks.detectors.healthy_run import Curve
from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Severity, Signal
from holdfast.core.detectors import build
from holdfast.core.detectors.expected_shifts import ExpectedShifts

PALM_DISTANCE = 100
"""steps that a costly alarm without an onset goes back: PaLM's hundred steps"""
MARGIN, EVERY = 10, 10
"""as the runtime: `recover.rollback_margin` before the onset, then back to a snapshot"""


class Alarm(NamedTuple):
    """One alarm: its step, whether its remedy is costly (roll back, stop) or cheap (skip, clip), and the steps it loses."""

    step: int
    costly: bool
    back_to: int


class Scored(Protocol):
    """A detector that the benchmark can score."""

    name: str
    costly: bool
    """whether it has costly alarms at all"""

    def run(self, curve: Curve) -> list[Alarm]: ...


class Rule:
    """A published rule: one kind of alarm, from loss and gradient norm alone. Knows nothing of declared shifts."""

    name = ""
    acts = ""
    """the published reaction to its alarm"""
    costly = True
    sweep: tuple[float, ...] = ()
    """thresholds for its trade-off curve; the published one is the default of the constructor"""

    def reset(self) -> None:
        raise NotImplementedError

    def observe(self, step: int, loss: float, grad_norm: float | None) -> bool:
        """Whether it alarms at this step; None: the norm was not measured."""
        raise NotImplementedError

    def run(self, curve: Curve) -> list[Alarm]:
        self.reset()
        observe, costly = self.observe, self.costly
        rows = zip(curve.loss.tolist(), curve.norms(), strict=True)
        return [
            Alarm(step, costly, step - PALM_DISTANCE)
            for step, (loss, norm) in enumerate(rows)
            if observe(step, loss, norm)
        ]


class Holdfast:
    """The detectors of this project for a configuration, with expected shifts recognised as over a log."""

    costly = True

    def __init__(self, config: DetectSection | None = None, name: str = "holdfast", factor: float = 1.0) -> None:
        self.name = name
        self.config = scaled(config if config is not None else DetectSection(), factor)

    def run(self, curve: Curve) -> list[Alarm]:
        detectors, declared, alarms = build(self.config), set(curve.shifts), []
        shifts = ExpectedShifts(by_lr=True)
        for at, signal in enumerate(signals(curve)):
            if shifts.observe(signal) is not None or at in declared:
                for detector in detectors:
                    detector.rebaseline()
            for detector in detectors:
                finding = detector.observe(signal)
                if finding is not None and finding.severity > Severity.NOTE:
                    alarms.append(_alarm(finding, at, signal.step))
        return alarms


def _alarm(finding: Finding, at: int, step: int) -> Alarm:
    """Return an alarm at record `at`. A rollback goes to the last snapshot before the margin, a skip one step back."""
    if finding.severity is not Severity.ROLLBACK:
        return Alarm(at, False, at - 1)
    onset = at - (step - finding.onset)
    return Alarm(at, True, max(0, onset - MARGIN) // EVERY * EVERY)


def scaled(config: DetectSection, factor: float) -> DetectSection:
    """Return the configuration with every threshold in deviations multiplied by `factor`."""
    names = [name for name in config.__struct_fields__ if name.endswith("_z") or "_z_" in name]
    return msgspec.structs.replace(config, **{name: getattr(config, name) * factor for name in names})


def signals(curve: Curve) -> list[Signal]:
    """Return the signal of each step, without the fields that only a gate can set."""
    steps = range(len(curve)) if curve.steps is None else [int(step) for step in curve.steps]
    columns: dict[str, list[Any]] = {"loss": curve.loss.tolist(), "grad_norm": curve.norms()}
    columns["lr"] = [None if math.isnan(value) else value for value in curve.lr.tolist()]
    columns.update({name: values.tolist() for name, values in curve.more.items()})
    if curve.overflow is not None:
        columns["overflow"] = curve.overflow.tolist()
    names = list(columns)
    rows = zip(steps, *columns.values(), strict=True)
    return [Signal(step=step, **dict(zip(names, row, strict=True))) for step, *row in rows]
