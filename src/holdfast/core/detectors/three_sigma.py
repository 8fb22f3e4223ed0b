"""The 3-sigma rule of the stability tree: a loss over mean + 3 sigma of the last 100 losses is a spike.

It has recovered if the loss is back within mean + 0.5 sigma in 50 steps; otherwise it is persistent.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from holdfast.core.base.types import Finding, Kind, Severity, Signal
from holdfast.core.detectors.base import LimitlessDetector

SIGMAS, WINDOW = 3.0, 100
RECOVERED_SIGMAS, RECOVERY_STEPS = 0.5, 50


class ThreeSigma(LimitlessDetector):
    """Applies the rule as published, or with its defects fixed.

    As written: the spike itself enters the window, a NaN there makes every comparison false, and every step over the
    limit is another spike. Fixed: only healthy finite losses enter; mean and sigma are frozen while a spike is open; a
    spike is reported at its start and at its end. One healthy step in 740 is over 3 sigma by chance, so the start is a
    note, and only a persistent spike asks for a rollback.
    """

    name = "three_sigma"
    per_group = True

    def __init__(self, fixed: bool = True, sigmas: float = SIGMAS, window: int = WINDOW) -> None:
        self._fixed, self._sigmas, self._window = fixed, sigmas, window
        self._recent: deque[float] = deque()
        self._open: tuple[int, float, float] | None = None

    def _statistics(self) -> tuple[float, float]:
        # Not by running sums: one large value or NaN would leave an error in them for ever.
        n = len(self._recent)
        mean = sum(self._recent) / n
        return mean, math.sqrt(sum((v - mean) * (v - mean) for v in self._recent) / n)

    def _add(self, loss: float) -> None:
        self._recent.append(loss)
        if len(self._recent) > self._window:
            self._recent.popleft()

    def observe(self, signal: Signal) -> Finding | None:
        loss = signal.loss
        if self._fixed and (not abs(loss) < 1e150 or signal.overflow or signal.flags):
            return None
        if len(self._recent) < self._window:
            self._add(loss)
            return None
        if not self._fixed:
            mean, sigma = self._statistics()
            self._add(loss)
            is_high = loss > mean + self._sigmas * sigma
            return self._spike(signal, mean, sigma, Severity.ROLLBACK) if is_high else None
        if self._open is not None:
            return self._observe_open(signal)
        mean, sigma = self._statistics()
        if not loss > mean + self._sigmas * sigma:
            self._add(loss)
            return None
        self._open = (signal.step, mean, sigma)
        return self._spike(signal, mean, sigma, Severity.NOTE)

    def _observe_open(self, signal: Signal) -> Finding | None:
        assert self._open is not None
        onset, mean, sigma = self._open
        if signal.loss <= mean + RECOVERED_SIGMAS * sigma:
            self._open = None
            self._add(signal.loss)
            return self._outcome(signal, onset, mean, sigma, "recovered", Severity.NOTE)
        if signal.step - onset < RECOVERY_STEPS:
            return None
        self._open = None
        self.rebaseline()
        return self._outcome(signal, onset, mean, sigma, "persistent", Severity.ROLLBACK)

    def _spike(self, signal: Signal, mean: float, sigma: float, severity: Severity) -> Finding:
        message = f"the loss {signal.loss:.6g} is over mean + {self._sigmas:g} sigma of the last {self._window}"
        evidence = {"loss": signal.loss, "mean": mean, "sigma": sigma}
        return self.report(signal, Kind.LOSS_SPIKE, severity, signal.step, message, evidence)

    def _outcome(
        self, signal: Signal, onset: int, mean: float, sigma: float, outcome: str, severity: Severity
    ) -> Finding:
        message = f"the spike of step {onset} has {'recovered' if outcome == 'recovered' else 'not recovered'}"
        evidence = {"loss": signal.loss, "mean": mean, "sigma": sigma, "outcome": outcome}
        return self.report(signal, Kind.LOSS_SPIKE, severity, onset, message, evidence, new=False)

    def rebaseline(self) -> None:
        self._recent.clear()
        self._open = None

    def state_dict(self) -> dict[str, Any]:
        open_ = None if self._open is None else list(self._open)
        return {"recent": list(self._recent), "open": open_}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._recent = deque(state["recent"])
        self._open = None if state["open"] is None else tuple(state["open"])
