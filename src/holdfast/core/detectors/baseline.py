"""The course of a noisy series: level, falling trend and scale, robust to what it is there to find.

A Holt filter with Huberised updates. The trend may fall and never rises, so that a divergence is not learned as normal;
values far out do not enter at all; non-finite values never do, nor those beyond all arithmetic.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Any


class Baseline:
    """Feed it healthy values with `update`; ask it how far out a value is with `z`.

    It is `ready` after `start` values. Before that it only collects them.
    """

    LEVEL, TREND, SCALE = 0.06, 0.004, 0.015
    LARGEST = 1e150
    FROZEN_ABOVE = 4.0

    def __init__(self, start: int, *, falling: bool = True) -> None:
        self._start = start
        self._falling = falling
        self._first: list[float] = []
        self.count = 0
        self.level = 0.0
        self.trend = 0.0
        self.scale = 0.0

    @property
    def ready(self) -> bool:
        return self.count >= self._start

    def expected(self) -> float:
        """What the next value should be."""
        return self.level + self.trend

    def z(self, value: float) -> float:
        return (value - self.expected()) / self.scale

    def widen(self) -> float:
        """Early on the scale itself is uncertain: thresholds are wider by this factor."""
        return 1.0 + 8.0 / max(1, self.count)

    def update(self, value: float) -> None:
        """Take in one value, unless it is not finite or too far out to be part of the course."""
        if not abs(value) < self.LARGEST:
            return
        if not self.ready:
            self._collect(value)
            return
        z = self.z(value)
        if z > self.FROZEN_ABOVE:
            return
        pulled = max(-2.0, min(2.0, z)) * self.scale
        self.level += self.trend + self.LEVEL * pulled
        self.trend += self.TREND * pulled
        if self._falling:
            self.trend = min(0.0, self.trend)
        else:
            self.trend *= 0.98
        self.scale *= 1.0 + self.SCALE * (min(abs(z), 3.0) / 0.8 - 1.0)
        self.scale = max(self.scale, _floor(self.level))
        self.count += 1

    def _collect(self, value: float) -> None:
        self._first.append(value)
        self.count += 1
        if self.ready:
            self._begin(self._first)
            self._first = []

    def _begin(self, values: list[float]) -> None:
        """Level and trend from a Theil-Sen line through the last values, scale from what is left around it."""
        recent = values[-32:]
        n = len(recent)
        slopes = [(recent[j] - recent[i]) / (j - i) for i in range(n) for j in range(i + 1, n)]
        slope = median(slopes) if slopes else 0.0
        rest = [v - slope * i for i, v in enumerate(recent)]
        middle = median(rest)
        self.level = middle + slope * (n - 1)
        self.trend = min(0.0, slope) if self._falling else 0.0
        far = sorted(abs(r - middle) for r in rest)
        spread = 1.4826 * median(far)
        # Few values: the median deviation alone may be far too small by chance. The farthest tenth may be spikes.
        near = far[: n - n // 10]
        deviation = math.sqrt(sum(r * r for r in near) / len(near))
        self.scale = max(spread, 0.5 * deviation, _floor(self.level))

    def restart(self, start: int | None = None) -> None:
        """Forget the course; learn it anew from the next `start` values."""
        if start is not None:
            self._start = start
        self._first = []
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "start": self._start,
            "first": list(self._first),
            "count": self.count,
            "level": self.level,
            "trend": self.trend,
            "scale": self.scale,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start = state["start"]
        self._first = list(state["first"])
        self.count = state["count"]
        self.level, self.trend, self.scale = state["level"], state["trend"], state["scale"]


def _floor(level: float) -> float:
    """A constant series has no scale; without a floor the first change of one ulp would be infinitely far out."""
    return 1e-3 * abs(level) + 1e-6
