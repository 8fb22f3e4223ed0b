"""A learning rate that jumps out of a smooth schedule, or stops in the middle of its decay. The finding is a note."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Kind, Severity, Signal
from holdfast.core.detectors.base import LimitlessDetector
from holdfast.core.detectors.expected_shifts import LR_JUMP

_DECAY_RECORDS, _FROZEN_RECORDS = 50, 200
_STILL_HIGH = 0.2
_ZERO_RECORDS = 50


class LearningRate(LimitlessDetector):
    """Reports a jump and a frozen rate.

    Jump: more than `LR_JUMP` times the rate of the previous record, after a steady or smooth stretch. Frozen: the rate
    fell at nearly every record for a while and then stopped well above zero; or it stays zero.
    """

    name = "learning_rate"
    field, needs_loss, max_block = "lr", False, 1024

    def __init__(self, config: DetectSection) -> None:
        del config
        self._last: float | None = None
        self._peak = 0.0
        self._smooth_records = 0
        self._falls = 0
        self._still_records = 0
        self._since = 0
        self._reported = False

    def observe(self, signal: Signal) -> Finding | None:
        lr, last = signal.lr, self._last
        if lr is None or not math.isfinite(lr) or lr < 0 or signal.overflow or signal.flags:
            return None
        self._last = lr
        if last is None:
            self._peak = max(self._peak, lr)
            return None
        peak, self._peak = self._peak, max(self._peak, lr)
        if last > 0 and lr > LR_JUMP * last and self._smooth_records >= _ZERO_RECORDS:
            self._smooth_records = self._falls = self._still_records = 0
            return self._jump(signal, last, lr, peak)
        self._smooth_records = self._smooth_records + 1 if last == 0 or lr <= 1.05 * last else 0
        if lr != last:
            self._falls = self._falls + 1 if lr < last else 0
            self._still_records, self._reported = 0, False
            return None
        if self._still_records == 0:
            self._since = signal.step
        self._still_records += 1
        return self._frozen(signal, lr)

    def absorb_normal(self, rates: Sequence[float], steps: Sequence[float]) -> int:
        """Take in the leading rates that `observe` would find nothing wrong with, and return their number."""
        last = self._last
        if last is None:
            return 0
        for i, lr in enumerate(rates):
            if (
                lr < 0
                or (last > 0 and lr > LR_JUMP * last)
                or (lr == last and (self._still_records == 0 or self._may_freeze(lr)))
            ):
                return i
            self._smooth_records = self._smooth_records + 1 if last == 0 or lr <= 1.05 * last else 0
            if lr == last:
                self._still_records += 1
            else:
                self._falls = self._falls + 1 if lr < last else 0
                self._still_records, self._reported = 0, False
            self._peak = max(self._peak, lr)
            self._last = last = lr
        return len(rates)

    def _may_freeze(self, lr: float) -> bool:
        return not self._reported and (lr == 0.0 or self._falls >= _DECAY_RECORDS)

    def _jump(self, signal: Signal, last: float, lr: float, peak: float) -> Finding:
        is_restart = lr <= 1.05 * peak
        where = "back towards its peak, as in a restart of the schedule" if is_restart else "above any earlier rate"
        message = f"the learning rate went from {last:.4g} to {lr:.4g} in one step, {where}"
        evidence = {"lr": lr, "before": last, "ratio": lr / last, "peak": peak, "restart": is_restart}
        return self.report(signal, Kind.LR_JUMP, Severity.NOTE, signal.step, message, evidence)

    def _frozen(self, signal: Signal, lr: float) -> Finding | None:
        zero = lr == 0.0 and self._still_records >= _ZERO_RECORDS and self._peak > 0
        stopped = (
            self._falls >= _DECAY_RECORDS and self._still_records >= _FROZEN_RECORDS and lr > _STILL_HIGH * self._peak
        )
        if self._reported or not (zero or stopped):
            return None
        self._reported = True
        how = "has been zero" if zero else f"stopped at {lr:.4g} in the middle of its decay"
        message = f"the learning rate {how} since step {self._since}"
        return self.report(signal, Kind.LR_FROZEN, Severity.NOTE, self._since, message, {"lr": lr, "peak": self._peak})

    def rebaseline(self) -> None:
        """Start over at the next record: an expected shift may move the rate."""
        self._last, self._smooth_records = None, 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "_last": self._last,
            "_peak": self._peak,
            "_smooth": self._smooth_records,
            "_falls": self._falls,
            "_still": self._still_records,
            "_since": self._since,
            "_said": self._reported,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last, self._peak, self._smooth_records = state["_last"], state["_peak"], state["_smooth"]
        self._falls, self._still_records = state["_falls"], state["_still"]
        self._since, self._reported = state["_since"], state["_said"]
