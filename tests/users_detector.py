"""Detectors as users write them, for tests of what a run does with their findings."""

from __future__ import annotations

from typing import Any

from holdfast.core.base.types import Finding, Severity, Signal


class QuietDetector:
    """Finds nothing, limits nothing, and has no state."""

    name = "quiet"

    def limits(self) -> dict[str, float]:
        return {}

    def observe(self, signal: Signal) -> Finding | None:
        return None

    def rebaseline(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class FindsOnce(QuietDetector):
    """Finds, at step `found` and once, what began at `onset`."""

    def __init__(self, name: str, severity: Severity, found: int, onset: int) -> None:
        self.name, self.severity, self.found, self.onset, self.done = name, severity, found, onset, False

    def observe(self, signal: Signal) -> Finding | None:
        if signal.step != self.found or self.done:
            return None
        self.done = True
        return Finding(
            kind=self.name,
            severity=self.severity,
            step=signal.step,
            onset=self.onset,
            detector=self.name,
            message=f"found by {self.name}",
        )
