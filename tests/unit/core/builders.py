"""Short ways to make what the tests of core feed in, and a journal that can be read back without a disk."""

from __future__ import annotations

import json
from typing import Any

from holdfast.core.base.config import Config, DetectSection, RecoverSection
from holdfast.core.base.types import Finding, Kind, Severity, Signal, Verdict
from holdfast.core.record.journal import NullJournal, dumps

NO_DETECTORS = DetectSection(nonfinite=False, loss_spike=False, grad_spike=False)


def signal(step: int = 100, loss: float = 2.0, grad_norm: float | None = 1.0, **more: Any) -> Signal:
    return Signal(step=step, loss=loss, grad_norm=grad_norm, **more)


def finding(
    kind: str = Kind.LOSS_SPIKE,
    severity: Severity = Severity.SKIP,
    step: int = 100,
    onset: int | None = None,
    new: bool = True,
    **more: Any,
) -> Finding:
    fields = {"detector": "test", "message": str(kind), **more}
    return Finding(kind=kind, severity=severity, step=step, onset=onset or step, new=new, **fields)


def verdict(
    kind: str = Kind.LOSS_SPIKE,
    severity: Severity = Severity.SKIP,
    step: int = 100,
    onset: int | None = None,
    vetoed: bool = True,
    new: bool = True,
) -> Verdict:
    found = finding(kind, severity, step, onset, new)
    return Verdict(step=step, kind=kind, severity=severity, onset=found.onset, vetoed=vetoed, findings=(found,))


def only_policy(**recover: Any) -> Config:
    """A configuration whose findings all come from the test's own detector."""
    return Config(detect=NO_DETECTORS, recover=RecoverSection(**recover))


class Scripted:
    """A detector that reports a given finding, once."""

    name = "scripted"

    def __init__(self, *findings: Finding | None) -> None:
        self.script = list(findings)
        self.seen: list[int] = []
        self.shifts = 0

    def limits(self) -> dict[str, float]:
        return {}

    def observe(self, signal: Signal) -> Finding | None:
        self.seen.append(signal.step)
        return self.script.pop(0) if self.script else None

    def rebaseline(self) -> None:
        self.shifts += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


class Memory(NullJournal):
    """A journal that keeps the lines it would have written; `events` is what a reader would find."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.durable: list[str] = []

    def write(self, event: str, *, durable: bool = False, **fields: Any) -> None:
        self.lines.append(dumps({"event": event, **fields}))
        if durable:
            self.durable.append(event)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]

    def names(self) -> list[str]:
        return [event["event"] for event in self.events]
