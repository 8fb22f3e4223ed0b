"""The 3-sigma rule of the stability tree: over mean + 3 sigma of the last 100 losses; recovered if back within
mean + 0.5 sigma in 50 steps, else persistent."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from holdfast.core.base.types import Finding, Kind, Severity, Signal
from holdfast.core.detectors.base import Unlimited

SIGMAS, WINDOW = 3.0, 100
RECOVERED_SIGMAS, RECOVERY_STEPS = 0.5, 50


class ThreeSigma(Unlimited):
    """As written: the spike itself enters the window, a NaN there makes every comparison false, and nothing latches, so
    that every step over the limit is one more spike.

    Mended: only healthy finite losses enter; mean and sigma stand still while a spike is open; one spike is said once,
    and again when it has recovered or proved persistent. One healthy step in 740 is over 3 sigma by chance, so the spike
    alone is on record only; it is the persistent one that asks for a rollback.
    """

    name = "three_sigma"

    def __init__(self, mended: bool = True, sigmas: float = SIGMAS, window: int = WINDOW) -> None:
        self._mended, self._sigmas, self._window = mended, sigmas, window
        self._recent: deque[float] = deque()
        self._open: tuple[int, float, float] | None = None

    def _statistics(self) -> tuple[float, float]:
        # From the window itself: running sums never get back what they lose beside one large value, or to a NaN.
        n = len(self._recent)
        mean = sum(self._recent) / n
        return mean, math.sqrt(sum((v - mean) * (v - mean) for v in self._recent) / n)

    def _enter(self, loss: float) -> None:
        self._recent.append(loss)
        if len(self._recent) > self._window:
            self._recent.popleft()

    def observe(self, signal: Signal) -> Finding | None:
        loss = signal.loss
        if self._mended and (not abs(loss) < 1e150 or signal.overflow or signal.flags):
            return None
        if len(self._recent) < self._window:
            self._enter(loss)
            return None
        if not self._mended:
            mean, sigma = self._statistics()
            self._enter(loss)
            return (
                self._spike(signal, signal.step, mean, sigma, Severity.ROLLBACK)
                if self._high(loss, mean, sigma)
                else None
            )
        if self._open is not None:
            return self._while_open(signal)
        mean, sigma = self._statistics()
        if not self._high(loss, mean, sigma):
            self._enter(loss)
            return None
        self._open = (signal.step, mean, sigma)
        return self._spike(signal, signal.step, mean, sigma, Severity.NOTE)

    def _high(self, loss: float, mean: float, sigma: float) -> bool:
        return loss > mean + self._sigmas * sigma

    def _while_open(self, signal: Signal) -> Finding | None:
        assert self._open is not None
        onset, mean, sigma = self._open
        if signal.loss <= mean + RECOVERED_SIGMAS * sigma:
            self._open = None
            self._enter(signal.loss)
            return self._outcome(signal, onset, mean, sigma, "recovered", Severity.NOTE)
        if signal.step - onset < RECOVERY_STEPS:
            return None
        self._open = None
        self.rebaseline()
        return self._outcome(signal, onset, mean, sigma, "persistent", Severity.ROLLBACK)

    def _spike(self, signal: Signal, onset: int, mean: float, sigma: float, severity: Severity) -> Finding:
        message = f"the loss {signal.loss:.6g} is over mean + {self._sigmas:g} sigma of the last {self._window}"
        return self._finding(signal, onset, severity, message, {"mean": mean, "sigma": sigma})

    def _outcome(
        self, signal: Signal, onset: int, mean: float, sigma: float, outcome: str, severity: Severity
    ) -> Finding:
        message = f"the spike of step {onset} has {'recovered' if outcome == 'recovered' else 'not recovered'}"
        return self._finding(signal, onset, severity, message, {"mean": mean, "sigma": sigma, "outcome": outcome})

    def _finding(
        self, signal: Signal, onset: int, severity: Severity, message: str, numbers: dict[str, Any]
    ) -> Finding:
        return Finding(
            kind=Kind.LOSS_SPIKE,
            severity=severity,
            step=signal.step,
            onset=onset,
            detector=self.name,
            message=message,
            evidence={"loss": signal.loss, **numbers},
            new="outcome" not in numbers,
        )

    def rebaseline(self) -> None:
        self._recent.clear()
        self._open = None

    def state_dict(self) -> dict[str, Any]:
        open_ = None if self._open is None else list(self._open)
        return {"recent": list(self._recent), "open": open_}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._recent = deque(state["recent"])
        self._open = None if state["open"] is None else tuple(state["open"])
