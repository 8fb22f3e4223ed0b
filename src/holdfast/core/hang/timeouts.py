"""How long a phase may take: learned from how long it took so far.

A timeout is 4.5 times the 99.9th percentile, and never below a floor: with the time to write the verdict a hang is named
within five times that percentile, or within ten seconds. A phase with few instances has none. Some phases
have a long tail: a slow file, an epoch that begins. So the tail between the 99th and the 99.9th percentile is continued
to one instance in 10^8, and twice the longest instance is allowed, since it ended by itself.
"""

from __future__ import annotations

import math

MIN_INSTANCES = 20
_FACTOR, _FACTOR_OF_LONGEST = 4.5, 2.0
_MAX_FACTOR_OF_LONGEST = 10.0
"""two kinds of instances, fast ones and some slow ones, look like a tail without an end"""
_DECADES = 5
"""from the 99.9th percentile to one instance in 10^8"""
_JITTER_SECONDS = 0.1
"""added to both ends of the tail: the scheduler of a busy machine makes any short phase look heavy-tailed"""
_BUCKETS_PER_OCTAVE, _SMALLEST_SECONDS, _BUCKETS = 8, 1e-6, 400


class PhaseTimes:
    """The distribution of the times of one phase, in buckets 9% wide."""

    def __init__(self) -> None:
        self.count = 0
        self.longest = 0.0
        self._buckets = [0] * _BUCKETS
        self._learned: float | None = None
        self._learned_at = 0

    def add(self, seconds: float) -> None:
        """Count an instance that has ended."""
        self.count += 1
        self.longest = max(self.longest, seconds)
        octaves = math.log2(max(seconds, _SMALLEST_SECONDS) / _SMALLEST_SECONDS)
        self._buckets[min(_BUCKETS - 1, int(octaves * _BUCKETS_PER_OCTAVE))] += 1

    def quantile(self, share: float) -> float:
        """Return the time that `share` of the instances do not exceed; the longest if there are too few to tell."""
        above = self.count * (1 - share)
        if above < 1:
            return self.longest
        for bucket in range(_BUCKETS - 1, -1, -1):
            above -= self._buckets[bucket]
            if above < 0:
                return float(_SMALLEST_SECONDS * 2 ** ((bucket + 0.5) / _BUCKETS_PER_OCTAVE))
        return 0.0

    def timeout(self, floor: float) -> float | None:
        """Return after how many seconds the phase counts as stuck; None if it has been seen too seldom."""
        if self.count < MIN_INSTANCES:
            return None
        if self._learned is None or self.count >= self._learned_at + self._learned_at // 64 + 1:
            self._learned, self._learned_at = self._learn(), self.count
        return max(floor, self._learned, _FACTOR_OF_LONGEST * self.longest)

    def _learn(self) -> float:
        tail, before = self.quantile(0.999), self.quantile(0.99)
        ratio = (tail + _JITTER_SECONDS) / (before + _JITTER_SECONDS)
        continued = tail * ratio**_DECADES if self.count >= 1000 else 0.0
        return max(_FACTOR * tail, min(continued, _MAX_FACTOR_OF_LONGEST * self.longest))
