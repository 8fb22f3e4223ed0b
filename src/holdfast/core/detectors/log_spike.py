"""A positive quantity far above its baseline, which is that of its logarithm: its noise has an even scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from holdfast.core.base.types import Finding, Flag, Severity, Signal
from holdfast.core.detectors.base import BuiltInDetector
from holdfast.core.detectors.baseline import Baseline

_REBASELINE = 24
_ACCEPTED_STEPS = 8
_GROSS_RATIO = 100.0
_GROSS_RISE = math.log(_GROSS_RATIO)
_LOSS_HIGH = int(Flag.LOSS_HIGH)
_SINGLE_STEPS = 2


class LogSpike(BuiltInDetector):
    """Reports a value `z` deviations of the logarithm and `ratio` times above the baseline, or a hundred times above it.

    `_ACCEPTED_STEPS` high values in a row under a normal loss are a new level, not a spike: the level is accepted with a
    finding, rather than vetoing every later step. While a new baseline is learned, only a gross rise counts.
    """

    field: str
    kind: str
    what: str
    severity: Severity
    needs_loss, max_block = True, 16

    def __init__(self, warmup: int, z: float, ratio: float) -> None:
        self._warmup, self._z, self._ratio = warmup, z, math.log(ratio)
        self._baseline = Baseline(warmup, falling=False)
        self._high_in_a_row = 0
        self._onset = 0
        self._peak = 0.0
        self._gross: float | None = None

    def limits(self) -> dict[str, float]:
        return {}

    def _limit(self) -> float | None:
        """Return the value above which the next one is a spike; None before there is a baseline."""
        if self._baseline.ready:
            return math.exp(min(700.0, self._baseline.next_expected + self._rise()))
        return self._gross

    def _rise(self) -> float:
        return max(min(self._baseline.threshold_distance(self._z), _GROSS_RISE), self._ratio)

    def observe(self, signal: Signal) -> Finding | None:
        value: float | None = getattr(signal, self.field)
        if value is None or not math.isfinite(value) or value <= 0 or signal.overflow:
            return None
        if not math.isfinite(signal.loss):
            return None
        known = self._gross is not None or self._baseline.ready
        limit = self._limit()
        limit = math.inf if limit is None else limit
        high = value > limit
        if not high or not known:
            if 0 < self._high_in_a_row <= _SINGLE_STEPS and self._baseline.ready:
                self._baseline.add_outlier(self._peak)
            self._high_in_a_row = 0
            if signal.flags == 0:
                self._baseline.update(math.log(value))
            return None
        if self._high_in_a_row == 0:
            self._onset, self._peak = signal.step, 0.0
        if self._baseline.ready:
            self._peak = max(self._peak, self._baseline.z(math.log(value)))
        self._high_in_a_row += 1
        if self._high_in_a_row >= _ACCEPTED_STEPS and not signal.flags & _LOSS_HIGH:
            return self._accept_level(signal, value, limit)
        message = f"{self.what} {value:.6g} is far above its baseline"
        return self._finding(signal, value, limit, message, new=self._high_in_a_row == 1)

    def absorb_normal(self, values: Sequence[float], steps: Sequence[float]) -> int:
        """Take in the leading values that `observe` would find nothing wrong with, and return their number."""
        if self._high_in_a_row or not self._baseline.ready or not values:
            return 0
        block = values[: self._baseline.values_until_update()]
        lowest = min(self._baseline.expected(1), self._baseline.expected(len(block)))
        if not (min(block) > 0.0 and max(block) <= _exp(lowest + self._rise())):
            return 0
        self._baseline.extend([math.log(v) for v in block])
        return len(block)

    def _accept_level(self, signal: Signal, value: float, limit: float) -> Finding:
        message = f"{self._high_in_a_row} times {self.what} high under a normal loss: accepted as the new level"
        finding = self._finding(signal, value, limit, message)
        self.rebaseline()
        self._gross = _exp(math.log(value) + _GROSS_RISE)
        return finding

    def _finding(self, signal: Signal, value: float, limit: float, message: str, new: bool = False) -> Finding:
        evidence = {
            self.field: value,
            "expected": _exp(self._baseline.next_expected),
            "limit": limit,
            "in_a_row": self._high_in_a_row,
            "loss": signal.loss,
        }
        return self.report(signal, self.kind, self.severity, self._onset, message, evidence, new=new)

    def rebaseline(self) -> None:
        if self._baseline.ready:
            self._gross = _exp(self._baseline.next_expected + max(2.0 * self._rise(), _GROSS_RISE))
        # Before the first baseline is learned, learning takes as long as the first time.
        self._baseline.restart(None if self._gross is None else min(_REBASELINE, self._warmup))
        self._high_in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "course": self._baseline.state_dict(),
            "run": self._high_in_a_row,
            "onset": self._onset,
            "peak": self._peak,
            "gross": self._gross,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._baseline.load_state_dict(state["course"])
        self._high_in_a_row, self._onset = state["run"], state["onset"]
        self._peak, self._gross = state["peak"], state["gross"]


def _exp(value: float) -> float:
    return math.exp(min(700.0, value))
