"""The baseline of a noisy series: level, falling trend, scale and tail, robust to the outliers it must reveal.

A Holt filter with Huberised updates. The trend may fall but never rises, so that a divergence is not learned as normal.
A far value moves the baseline no more than one two deviations away. Values that are not finite, too large for the
arithmetic, or rejected by the detector never enter. Once settled, the baseline updates in blocks: the thresholds for a
block come from the values before it, in a run and over a log alike.

The tail is about the 99th percentile of healthy values, in deviations. A loss whose single batches jump (heavy tails,
two kinds of batches) thus raises its own thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any, ClassVar

from holdfast.core.detectors.base import SavedFields

LEVEL_GAIN, TREND_GAIN, SCALE_GAIN = 0.06, 0.004, 0.015
NORMAL_TAIL = 2.33
"""the 99th percentile of a normal distribution: where a tail begins; thresholds in deviations refer to it"""
_WIDEST_TAIL, _WIDEST_INITIAL_TAIL = 60.0, 12.0
_TAIL_SHARE, _TAIL_RATE = 0.01, 0.05
LARGEST = 1e150
_DROPPED_Z, _TREND_DAMPING = -1.5, 0.985
_FREQUENT_OUTLIERS, _OUTLIER_RATE_DECAY, _SINGLE_OUTLIER_TAIL = 2.5, 0.993, 4.5
_UNCERTAINTY, _UNCERTAINTY_AFTER_SHIFT, _AUTOCORRELATION_UNCERTAINTY = 10.0, 60.0, 5.0
_AUTOCORRELATION_GAIN, _AUTOCORRELATION_EVERY, _AUTOCORRELATION_BLOCK, _INITIAL_AUTOCORRELATION_GAIN = 0.06, 4, 16, 0.6
_FAR_BELOW = 5.0
"""a value this many deviations below the baseline shows that the noise is wide, not that something is wrong"""
_BLOCK, _SETTLED = 16, 64
_INITIAL_VALUES = 32


class Baseline(SavedFields):
    """Learns from healthy values given to `update`; provides `expected`, `scale` and `threshold_distance(z)`.

    It is `ready` after `start` values. Before that it only collects them.
    """

    saved: ClassVar = {
        "start": "_start", "waiting": ("_pending", list), "count": "count", "level": "level", "trend": "trend",
        "scale": "scale", "tail": "tail", "products": ("_products", tuple), "sample": ("_sample", list),
        "kin": "autocorrelation", "blocks": "_blocks", "near": "_last_was_near", "low": "_last_was_far_below",
        "habit": "_outlier_rate", "doubt": "_uncertainty",
    }  # fmt: skip

    def __init__(self, start: int, *, falling: bool = True) -> None:
        self._start = start
        self._falling = falling
        self._pending: list[float] = []
        self.count = 0
        self.ready = start <= 0
        """whether enough values were taken in for a baseline"""
        self.level = 0.0
        self.trend = 0.0
        self.next_expected = 0.0
        """the value expected next: `expected()`"""
        self.scale = 0.0
        self.tail = NORMAL_TAIL
        self._products: tuple[float, ...] = (0.0, 1.0, -0.5, 1.0)
        """mean products: neighbouring deviations, squared deviations, neighbouring differences, squared differences"""
        self._sample: list[float] = []
        self.autocorrelation = 0.0
        """the correlation of neighbouring values, 0 to 1: if it is high, several in a row tell little more than one"""
        self._blocks = 0
        self._last_was_near = True
        self._last_was_far_below = False
        self._outlier_rate = 0.0
        """single outliers, each fading with the values after it"""
        self._uncertainty = _UNCERTAINTY

    def expected(self, ahead: int = 1) -> float:
        """Return the value expected next, or `ahead` values from now."""
        return self.level + self.trend * (len(self._pending) + ahead)

    def _set_next(self) -> None:
        self.next_expected = self.level + self.trend * (len(self._pending) + 1)

    def z(self, value: float, ahead: int = 1) -> float:
        """Return how far a value would be from the expected one, `ahead` values from now, in deviations."""
        return (value - (self.level + self.trend * (len(self._pending) + ahead))) / self.scale

    def threshold_distance(self, z: float) -> float:
        """Return the distance above the baseline that counts as `z` normal deviations, given its tail.

        Early on the scale itself is uncertain, and the distance is larger. The more neighbours correlate, the less each
        value tells, and after a shift the level may still move: both add to the uncertainty.
        """
        correlation = self.autocorrelation
        widening = 1.0 + _AUTOCORRELATION_UNCERTAINTY * correlation * correlation
        uncertainty = self._uncertainty * widening / max(1, self.count)
        return z * self.scale * (1.0 + uncertainty) * max(1.0, self.tail / NORMAL_TAIL)

    def track_depth(self, values: Sequence[float], depth: float, decay: float, largest: float) -> float:
        """Return how far below the baseline values have been: `depth`, decaying with each value, raised by lower ones."""
        level, trend, scale = self.level, self.trend, self.scale
        for ahead, value in enumerate(values, len(self._pending) + 1):
            depth *= decay
            z = (value - (level + trend * ahead)) / scale
            if -z > depth:
                depth = min(-z, largest)
        return depth

    def values_until_update(self) -> int:
        return max(1, self._block_size() - len(self._pending))

    def _block_size(self) -> int:
        return max(1, min(_BLOCK, self.count // _SETTLED))

    def update(self, value: float) -> None:
        """Take in one value, unless it is not finite or too large for the arithmetic."""
        if not abs(value) < LARGEST:
            return
        self._pending.append(value)
        if self.count < self._start:
            self.count += 1
            self.ready = self.count >= self._start
            del self._pending[:-_INITIAL_VALUES]
            if self.ready:
                self._initialize()
        elif len(self._pending) >= self._block_size():
            self._update_from_block()
        self._set_next()

    def extend(self, values: Sequence[float]) -> None:
        """Take in at most `values_until_update()` values at once, all of them finite."""
        self._pending.extend(values)
        if len(self._pending) >= self._block_size():
            self._update_from_block()
        self._set_next()

    def _update_from_block(self) -> None:
        values, self._pending = self._pending, []
        count, level, trend, scale, tail = len(values), self.level, self.trend, self.scale, self.tail
        pull, spread, beyond_tail, near, expected = 0.0, 0.0, 0, self._last_was_near, level
        depths: list[float] = []
        far_below = self._last_was_far_below
        for value in values:
            expected += trend
            z = (value - expected) / scale
            if z > 2.0:
                pull += 2.0
                spread += z if z < 3.0 else 3.0
                if z > tail:
                    beyond_tail += near  # several in a row are one excursion, not several signs of a heavy tail
                    near = False
                    continue
            elif z < -2.0:
                pull -= 2.0
                spread += -z if z > -3.0 else 3.0
                if z < -_FAR_BELOW:
                    if not far_below:
                        depths.append(-z)
                    far_below = True
                    near = True
                    continue
            else:
                pull += z
                spread += z if z > 0.0 else -z
            near, far_below = True, False
        self._last_was_near, self._last_was_far_below = near, far_below
        self._blocks += 1
        if count < _AUTOCORRELATION_BLOCK or self._blocks % _AUTOCORRELATION_EVERY == 0:
            self._sample_autocorrelation(values)
        self._outlier_rate *= _OUTLIER_RATE_DECAY**count
        self.tail = min(_WIDEST_TAIL, max(2.0, self.tail * math.exp(_TAIL_RATE * (beyond_tail - _TAIL_SHARE * count))))
        mean = pull / count
        if count >= _BLOCK // 2 and mean < _DROPPED_Z:
            # All values are far below: the level has dropped (the end of an epoch, an LR step). It is not a trend.
            self.level = sum(values) / count - trend * (count + 1) / 2 + trend * count
            spread = 0.8 * count  # the noise around the new level is what it was
        else:
            for z in depths:
                self.add_outlier(z)
            gain = max(LEVEL_GAIN, min(0.2, 8.0 / self.count))
            self.level += trend * count + (1.0 - (1.0 - gain) ** count) * mean * scale
            self.trend += max(TREND_GAIN, min(0.02, 0.6 / self.count)) * pull * scale
        # If neighbours correlate, few values tell little about the scale.
        rate = SCALE_GAIN * (1.0 - 0.9 * self.autocorrelation * self.autocorrelation)
        # A loss falls ever more slowly: an early trend kept as it is would run far below it.
        self.trend *= _TREND_DAMPING**count
        if self._falling and self.trend > 0.0:
            self.trend = 0.0
        self.scale = max(
            scale * (1.0 + (1.0 - (1.0 - rate) ** count) * (spread / count / 0.8 - 1.0)), _smallest_scale(self.level)
        )
        self.count += count

    def _sample_autocorrelation(self, values: list[float]) -> None:
        """Collect deviations until there are enough of them for an estimate."""
        level, trend, scale = self.level, self.trend, self.scale
        deviations = ((v - level - trend * i) / scale for i, v in enumerate(values, 1))
        self._sample.extend(-2.0 if z < -2.0 else 2.0 if z > 2.0 else z for z in deviations)
        if len(self._sample) < _AUTOCORRELATION_BLOCK:
            return
        sample, self._sample = self._sample, []
        gain = min(0.25, max(_AUTOCORRELATION_GAIN, len(sample) / (self.count + _SETTLED)))
        self._update_autocorrelation(sample, gain)

    def _update_autocorrelation(self, deviations: list[float], gain: float) -> None:
        """Move the estimate towards that of these consecutive deviations.

        It is the mean of two. The one from the values mistakes a slow misfit of the baseline for correlation. The one
        from their differences (which revert by half if values are independent) misses it under a second, independent
        noise.
        """
        differences = [b - a for a, b in pairwise(deviations)]
        products = (
            sum(a * b for a, b in pairwise(deviations)) / len(differences),
            max(1e-6, sum(a * a for a in deviations) / len(deviations)),
            sum(a * b for a, b in pairwise(differences)) / (len(differences) - 1),
            max(1e-6, sum(a * a for a in differences) / len(differences)),
        )
        self._products = tuple(p + gain * (q - p) for p, q in zip(self._products, products, strict=True))
        neighbours, squares, reversions, squared_differences = self._products
        estimate = 0.5 * (neighbours / squares + 1.0 + 2.0 * reversions / squared_differences)
        self.autocorrelation = max(0.0, min(1.0, estimate))

    def add_outlier(self, z: float) -> None:
        """Widen the tail for a single value `z` deviations away after which the series was normal again.

        A single one moves the tail a little. If outliers are frequent (two kinds of batches, a rare data source), they
        are normal for this series, and the tail extends to them.
        """
        self._outlier_rate += 1.0
        if self._outlier_rate > _FREQUENT_OUTLIERS:
            self.tail = min(_WIDEST_TAIL, max(self.tail, self.tail + 0.5 * (0.9 * z - self.tail)))
        else:
            self.tail = max(self.tail, min(_SINGLE_OUTLIER_TAIL, 0.5 * (self.tail + z / 2.0)))

    def _initialize(self) -> None:
        """Fit level and trend by a Theil-Sen line through the collected values, and the scale by the residuals."""
        values, self._pending = self._pending, []
        n = len(values)
        slopes = [(values[j] - values[i]) / (j - i) for i in range(n) for j in range(i + 1, n)]
        slope = median(slopes) if slopes else 0.0
        detrended = [v - slope * i for i, v in enumerate(values)]
        middle = median(detrended)
        self.level = middle + slope * (n - 1)
        self.trend = min(0.0, slope) if self._falling else 0.0
        residuals = sorted(abs(v - middle) for v in detrended)
        spread = 1.4826 * median(residuals)
        # With few values the median residual may be far too small by chance. The largest tenth may be spikes.
        smaller = residuals[: n - n // 10]
        deviation = math.sqrt(sum(r * r for r in smaller) / len(smaller))
        self.scale = max(spread, 0.5 * deviation, _smallest_scale(self.level))
        if n >= 8:
            clipped = [max(-2.0, min(2.0, (v - middle) / self.scale)) for v in detrended]
            self._update_autocorrelation(clipped, _INITIAL_AUTOCORRELATION_GAIN)
        third_largest = sorted((v - middle) / self.scale for v in detrended)[-3] if n >= 8 else 0.0
        self.tail = min(_WIDEST_INITIAL_TAIL, max(NORMAL_TAIL, 1.2 * third_largest))

    def restart(self, start: int | None = None) -> None:
        """Forget the baseline and learn it from the next `start` values; None: as many as the first time."""
        if start is not None:
            self._start, self._uncertainty = start, _UNCERTAINTY_AFTER_SHIFT
        self._pending = []
        self.count, self.ready = 0, self._start <= 0
        self._set_next()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.ready = self.count >= self._start
        self._set_next()


def _smallest_scale(level: float) -> float:
    """Return the floor of the scale: without one, the first change of a constant series would be infinitely far."""
    return 1e-3 * abs(level) + 1e-9
