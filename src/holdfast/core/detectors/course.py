"""The course of a noisy series: level, falling trend, scale and tail, robust to what it is there to find.

A Holt filter with Huberised updates. The trend may fall and never rises, so that a divergence is not learned as normal;
a value far out moves it no more than one two deviations out; non-finite values never enter, nor those beyond all
arithmetic, nor what its detector has found to be out. Once it has settled it
takes values in blocks: the thresholds for a block come from what was before it, online and over a log alike.

The tail says how far out healthy values come: about their 99th percentile, in deviations. Losses whose single batches
jump (heavy tails, two kinds of batches) so raise their own thresholds, and no others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

LEVEL, TREND, SCALE = 0.06, 0.004, 0.015
NORMAL_TAIL = 2.33
"""the 99th percentile of a normal distribution: where a tail begins, and what thresholds in deviations refer to"""
_WIDEST_TAIL = 60.0
_TAIL_SHARE, _TAIL_RATE = 0.01, 0.05
_LARGEST = 1e150
_DROPPED, _DAMPED = -1.5, 0.985
_HABIT, _HABIT_KEPT, _SINGLE_TAIL = 2.5, 0.993, 4.5
_DOUBT, _DOUBT_AFTER_SHIFT = 10.0, 60.0
_KINSHIP = 0.004
_FAR_BELOW = 5.0
"""a value this far under the course says that the noise is wide, not that something is wrong"""
_BLOCK, _SETTLED = 16, 64
_LOOK_BACK = 32


class Course:
    """Feed it healthy values with `update`; ask it for `expected`, `scale` and `reach(z)`.

    It is `ready` after `start` values. Before that it only collects them.
    """

    def __init__(self, start: int, *, falling: bool = True) -> None:
        self._start = start
        self._falling = falling
        self._waiting: list[float] = []
        self.count = 0
        self.level = 0.0
        self.trend = 0.0
        self.scale = 0.0
        self.tail = NORMAL_TAIL
        self._products: tuple[float, ...] = (0.0, 1.0, -0.5, 1.0)
        """of neighbouring deviations and of each with itself; of neighbouring moves and of each with itself"""
        self._last: tuple[bool, float, float] = (True, 0.0, 0.0)
        """the value before: whether it was near, its deviation, and its move"""
        self._habit = 0.0
        """single outliers of late"""
        self._doubt = _DOUBT

    @property
    def ready(self) -> bool:
        return self.count >= self._start

    def expected(self, ahead: int = 1) -> float:
        """What the next value should be, or the one `ahead` values from here."""
        return self.level + self.trend * (len(self._waiting) + ahead)

    def z(self, value: float) -> float:
        return (value - self.expected()) / self.scale

    def reach(self, z: float) -> float:
        """The distance above the course that counts as `z` normal deviations, for a tail like this one's.

        Early on the scale itself is uncertain, and everything reaches farther; more so after a shift, since the level may
        still be on its way.
        """
        return z * self.scale * (1.0 + self._doubt / max(1, self.count)) * max(1.0, self.tail / NORMAL_TAIL)

    def kinship(self) -> float:
        """The correlation of neighbouring values, 0 to 1: where it is high, several in a row say little more than one.

        Between two estimates: that of the values takes a slow misfit of the course for kinship, and that of their moves
        (independent values turn back by half) does not see it under a second, independent noise.
        """
        values, squares, turns, moves = self._products
        return max(0.0, min(1.0, 0.5 * (values / squares + 1.0 + 2.0 * turns / moves)))

    def room(self) -> int:
        """How many more values until it moves."""
        return max(1, self._size() - len(self._waiting))

    def _size(self) -> int:
        return max(1, min(_BLOCK, self.count // _SETTLED))

    def update(self, value: float) -> None:
        """Take in one value, unless it is not finite or beyond arithmetic."""
        if not abs(value) < _LARGEST:
            return
        self._waiting.append(value)
        if self.count < self._start:
            self.count += 1
            del self._waiting[:-_LOOK_BACK]
            if self.ready:
                self._begin()
        elif len(self._waiting) >= self._size():
            self._absorb()

    def extend(self, values: Sequence[float]) -> None:
        """The same for several values at once, at most `room()` of them, all of them finite."""
        self._waiting.extend(values)
        if len(self._waiting) >= self._size():
            self._absorb()

    def _absorb(self) -> None:
        values, self._waiting = self._waiting, []
        level, trend, scale, tail = self.level, self.trend, self.scale, self.tail
        taken, pull, rest, spread, far, at = 0, 0.0, 0.0, 0.0, 0, level
        near, last, moved = self._last
        alike, square, turn, move = 0.0, 0.0, 0.0, 0.0
        for value in values:
            at += trend
            z = (value - at) / scale
            if z > tail:
                far += near  # several in a row are one excursion, not several signs of a heavy tail
                near = False
            else:
                near = True
                if z < -_FAR_BELOW:
                    self.outlier(-z)
            taken += 1
            held = -2.0 if z < -2.0 else 2.0 if z > 2.0 else z
            pull += held
            rest += value - at
            step = held - last
            alike += held * last
            square += held * held
            turn += step * moved
            move += step * step
            last, moved = held, step
            spread += 3.0 if z > 3.0 or z < -3.0 else z if z > 0 else -z
        count = len(values)
        self._habit *= _HABIT_KEPT**count
        self.tail = min(_WIDEST_TAIL, max(1.0, self.tail * math.exp(_TAIL_RATE * (far - _TAIL_SHARE * count))))
        self.level += trend * count
        self._last = (near, last, moved)
        if taken:
            weight = taken * max(_KINSHIP, 1.0 / (self.count + _SETTLED))
            seen = (alike / taken, max(square / taken, 1e-6), turn / taken, max(move / taken, 1e-6))
            self._products = tuple(p + weight * (q - p) for p, q in zip(self._products, seen, strict=True))
            if taken >= _BLOCK // 2 and pull / taken < _DROPPED:
                # All far under it: the level has dropped (an epoch's border, an LR step). It is no trend.
                self.level += rest / taken
            else:
                gain = max(LEVEL, min(0.2, 8.0 / self.count))
                self.level += (1.0 - (1.0 - gain) ** taken) * pull / taken * scale
                self.trend += max(TREND, min(0.02, 0.6 / self.count)) * pull * scale
            # Where neighbours are alike, few of them say little about the scale.
            rate = SCALE * (1.0 - 0.9 * self.kinship() ** 2)
            self.scale *= 1.0 + (1.0 - (1.0 - rate) ** taken) * (spread / taken / 0.8 - 1.0)
        # A fall slows down, as losses do: held on to, an early trend would run far ahead of them.
        self.trend *= _DAMPED**count
        if self._falling:
            self.trend = min(0.0, self.trend)
        self.scale = max(self.scale, _floor(self.level))
        self.count += count

    def outlier(self, z: float) -> None:
        """A value `z` deviations out that came alone and left nothing behind: it belongs to the tail.

        A single one moves it a little. Where they come again and again (batches of two kinds, a rare source of data) they
        are what this series does, and the tail reaches out to them.
        """
        self._habit += 1.0
        if self._habit > _HABIT:
            self.tail = min(_WIDEST_TAIL, max(self.tail, self.tail + 0.5 * (0.9 * z - self.tail)))
        else:
            self.tail = max(self.tail, min(_SINGLE_TAIL, 0.5 * (self.tail + z / 2.0)))

    def _begin(self) -> None:
        """Level and trend from a Theil-Sen line through the last values, scale from what is left around it."""
        recent, self._waiting = self._waiting, []
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
        above = sorted((r - middle) / self.scale for r in rest)
        seen = above[-3] if n >= 8 else 0.0
        self.tail = min(_WIDEST_TAIL, max(NORMAL_TAIL, 1.2 * seen))

    def restart(self, start: int | None = None) -> None:
        """Forget the course; learn it anew from the next `start` values."""
        if start is not None:
            self._start, self._doubt = start, _DOUBT_AFTER_SHIFT
        self._waiting = []
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "start": self._start,
            "waiting": list(self._waiting),
            "count": self.count,
            "level": self.level,
            "trend": self.trend,
            "scale": self.scale,
            "tail": self.tail,
            "products": list(self._products),
            "last": list(self._last),
            "habit": self._habit,
            "doubt": self._doubt,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start = state["start"]
        self._waiting = list(state["waiting"])
        self.count = state["count"]
        self.level, self.trend, self.scale = state["level"], state["trend"], state["scale"]
        self.tail, self._products, self._last = state["tail"], tuple(state["products"]), tuple(state["last"])
        self._habit, self._doubt = state["habit"], state["doubt"]


def _floor(level: float) -> float:
    """A constant series has no scale; without a floor the first change of one ulp would be infinitely far out."""
    return 1e-3 * abs(level) + 1e-9
