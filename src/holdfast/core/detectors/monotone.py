"""The monotone-200 rule of the stability tree: the loss has risen for 200 steps in a row."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

from holdfast.core.base.types import Finding, Kind, Severity, Signal
from holdfast.core.detectors.base import LimitlessDetector

STEPS = 200
_BLOCK = 10
_TREND_Z = 4.5
_SMALLEST_RISE = 0.01


class Monotone(LimitlessDetector):
    """Applies the rule as published, or with its defects fixed.

    As written: 200 losses, each above the one before, which no real loss ever does. Fixed: a Mann-Kendall trend of
    `_TREND_Z` deviations over the medians of 20 blocks of 10 steps. The last quarter must also be `_SMALLEST_RISE`
    above the first. It is reported once per rise.
    """

    name = "monotone"
    per_group = True

    def __init__(self, fixed: bool = True, steps: int = STEPS) -> None:
        self._fixed, self._steps = fixed, steps
        self._last: float | None = None
        self._rises_in_a_row = 0
        self._since = 0
        self._block: list[float] = []
        self._medians: deque[tuple[int, float]] = deque(maxlen=max(4, steps // _BLOCK))
        self._reported = False

    def observe(self, signal: Signal) -> Finding | None:
        return self._observe_fixed(signal) if self._fixed else self._observe_as_written(signal)

    def _observe_as_written(self, signal: Signal) -> Finding | None:
        last, self._last = self._last, signal.loss
        if last is None or not signal.loss > last:
            self._rises_in_a_row, self._since = 0, signal.step
            return None
        self._rises_in_a_row += 1
        if self._rises_in_a_row < self._steps:
            return None
        return self._finding(signal, self._since, {"steps": self._rises_in_a_row})

    def _observe_fixed(self, signal: Signal) -> Finding | None:
        if not math.isfinite(signal.loss) or signal.overflow or signal.flags:
            return None
        self._block.append(signal.loss)
        if len(self._block) < _BLOCK:
            return None
        self._medians.append((signal.step, median(self._block)))
        self._block = []
        if len(self._medians) < (self._medians.maxlen or 0):
            return None
        values = [v for _, v in self._medians]
        z, quarter = mann_kendall(values), max(1, len(values) // 4)
        low, high = median(values[:quarter]), median(values[-quarter:])
        if z < _TREND_Z or high - low < _SMALLEST_RISE * abs(low):
            self._reported = False
            return None
        if self._reported:
            return None
        self._reported = True
        onset = max(1, self._medians[0][0] - _BLOCK + 1)
        return self._finding(signal, onset, {"trend_z": z, "before": low, "level": high, "steps": self._steps})

    def _finding(self, signal: Signal, onset: int, numbers: dict[str, Any]) -> Finding:
        message = f"the loss has been rising for {self._steps} steps, to {signal.loss:.6g}"
        evidence = {"loss": signal.loss, "lr": signal.lr, **numbers}
        return self.report(signal, Kind.DIVERGENCE, Severity.ROLLBACK, onset, message, evidence)

    def rebaseline(self) -> None:
        self._last, self._rises_in_a_row, self._block, self._reported = None, 0, [], False
        self._medians.clear()

    def state_dict(self) -> dict[str, Any]:
        return {
            "last": self._last,
            "rising": self._rises_in_a_row,
            "since": self._since,
            "block": list(self._block),
            "medians": [list(m) for m in self._medians],
            "said": self._reported,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last, self._rises_in_a_row, self._since = state["last"], state["rising"], state["since"]
        self._block, self._reported = list(state["block"]), state["said"]
        self._medians = deque(((int(s), float(v)) for s, v in state["medians"]), maxlen=self._medians.maxlen)


def mann_kendall(values: list[float]) -> float:
    """Return the Mann-Kendall trend statistic in deviations: positive if the values rise."""
    n = len(values)
    score = sum((b > a) - (b < a) for i, a in enumerate(values) for b in values[i + 1 :])
    variance = n * (n - 1) * (2 * n + 5) / 18.0
    return (score - (score > 0) + (score < 0)) / math.sqrt(variance) if variance else 0.0
