"""Mean and deviation over the last values, O(1) a value; NaN for as long as a value in it is not finite."""

from __future__ import annotations

import math
from collections import deque


class Window:
    """Running sums, recomputed each time the window has turned over once, so that rounding errors do not add up."""

    def __init__(self, size: int) -> None:
        self.values: deque[float] = deque(maxlen=size)
        self._size = size
        self._sum = self._squares = 0.0
        self._bad = 0
        self._since = 0

    def __len__(self) -> int:
        return len(self.values)

    @property
    def full(self) -> bool:
        return len(self.values) == self._size

    def push(self, value: float) -> None:
        if len(self.values) == self._size:
            old = self.values[0]
            if math.isfinite(old):
                self._sum -= old
                self._squares -= old * old
            else:
                self._bad -= 1
        self.values.append(value)
        if math.isfinite(value):
            self._sum += value
            self._squares += value * value
        else:
            self._bad += 1
        self._since += 1
        if self._since >= self._size:
            finite = [v for v in self.values if math.isfinite(v)]
            self._sum, self._squares, self._since = math.fsum(finite), math.fsum(v * v for v in finite), 0

    def mean(self) -> float:
        return self._sum / len(self.values) if self.values and not self._bad else math.nan

    def deviation(self, unbiased: bool = False) -> float:
        """Standard deviation over n, or over n - 1."""
        n = len(self.values)
        if self._bad or n < 2:
            return math.nan
        spread = max(0.0, self._squares - self._sum * self._sum / n)
        return math.sqrt(spread / (n - 1 if unbiased else n))
