"""A learning rate that jumps where the schedule had been smooth, or stops in the middle of its decay. On record only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Kind, Severity, Signal
from holdfast.core.detectors.base import Unlimited
from holdfast.core.detectors.expected_shifts import LR_JUMP

_DECAYED, _STOPPED = 50, 200
_STILL_HIGH = 0.2
_ZERO_FOR = 50


class LearningRate(Unlimited):
    """Jump: more than `LR_JUMP` times the rate of the record before, once the rate has been steady or smooth.

    Frozen: it fell at nearly every record for a while, and then has not moved at all, well above its end; or it is zero.
    """

    name = "learning_rate"
    field, with_loss, stretch = "lr", False, 1024

    def __init__(self, config: DetectSection) -> None:
        del config
        self._last: float | None = None
        self._peak = 0.0
        self._smooth = 0
        self._falls = 0
        self._still = 0
        self._since = 0
        self._said = False

    def observe(self, signal: Signal) -> Finding | None:
        lr, last = signal.lr, self._last
        if lr is None or not math.isfinite(lr) or lr < 0 or signal.overflow or signal.flags:
            return None
        self._last = lr
        if last is None:
            self._peak = max(self._peak, lr)
            return None
        peak, self._peak = self._peak, max(self._peak, lr)
        if last > 0 and lr > LR_JUMP * last and self._smooth >= _ZERO_FOR:
            self._smooth = self._falls = self._still = 0
            return self._jump(signal, last, lr, peak)
        self._smooth = self._smooth + 1 if last == 0 or lr <= 1.05 * last else 0
        if lr != last:
            self._falls = self._falls + 1 if lr < last else 0
            self._still, self._said = 0, False
            return None
        if self._still == 0:
            self._since = signal.step
        self._still += 1
        return self._frozen(signal, lr)

    def calm(self, rates: Sequence[float], steps: Sequence[float]) -> int:
        """How many of these rates, in a row from here, are certain to be found nothing wrong with; they are taken in."""
        last = self._last
        if last is None:
            return 0
        for i, lr in enumerate(rates):
            if (
                lr < 0
                or (last > 0 and lr > LR_JUMP * last)
                or (lr == last and (self._still == 0 or self._may_freeze(lr)))
            ):
                return i
            self._smooth = self._smooth + 1 if last == 0 or lr <= 1.05 * last else 0
            if lr == last:
                self._still += 1
            else:
                self._falls = self._falls + 1 if lr < last else 0
                self._still, self._said = 0, False
            self._peak = max(self._peak, lr)
            self._last = last = lr
        return len(rates)

    def _may_freeze(self, lr: float) -> bool:
        return not self._said and (lr == 0.0 or self._falls >= _DECAYED)

    def _jump(self, signal: Signal, last: float, lr: float, peak: float) -> Finding:
        back = lr <= 1.05 * peak
        told = "back towards its peak, as a restart of the schedule would" if back else "above anything before"
        return self._finding(
            signal,
            Kind.LR_JUMP,
            signal.step,
            f"the learning rate went from {last:.4g} to {lr:.4g} in one step, {told}",
            {"lr": lr, "before": last, "ratio": lr / last, "peak": peak, "restart": back},
        )

    def _frozen(self, signal: Signal, lr: float) -> Finding | None:
        zero = lr == 0.0 and self._still >= _ZERO_FOR and self._peak > 0
        stopped = self._falls >= _DECAYED and self._still >= _STOPPED and lr > _STILL_HIGH * self._peak
        if self._said or not (zero or stopped):
            return None
        self._said = True
        how = "has been zero" if zero else f"stopped at {lr:.4g} in the middle of its decay"
        message = f"the learning rate {how} since step {self._since}"
        return self._finding(signal, Kind.LR_FROZEN, self._since, message, {"lr": lr, "peak": self._peak})

    def _finding(self, signal: Signal, kind: Kind, onset: int, message: str, evidence: dict[str, Any]) -> Finding:
        return Finding(
            kind=kind,
            severity=Severity.NOTE,
            step=signal.step,
            onset=onset,
            detector=self.name,
            message=message,
            evidence=evidence,
        )

    def rebaseline(self) -> None:
        """A declared shift may move the rate: the next record is the first."""
        self._last, self._smooth = None, 0

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
