"""The course of a noisy series: level, falling trend, scale and tail, robust to what it is there to find.

A Holt filter with Huberised updates. The trend may fall and never rises, so that a divergence is not learned as normal;
a value far out moves it no more than one two deviations out; non-finite values never enter, nor those beyond all
arithmetic, nor what its detector has found to be out. Once it has settled it takes values in blocks: the thresholds for
a block come from what was before it, online and over a log alike.

The tail says how far out healthy values come: about their 99th percentile, in deviations. Losses whose single batches
jump (heavy tails, two kinds of batches) so raise their own thresholds, and no others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

LEVEL, TREND, SCALE = 0.06, 0.004, 0.015
NORMAL_TAIL = 2.33
"""the 99th percentile of a normal distribution: where a tail begins, and what thresholds in deviations refer to"""
_WIDEST_TAIL, _FIRST_TAIL = 60.0, 12.0
_TAIL_SHARE, _TAIL_RATE = 0.01, 0.05
LARGEST = 1e150
_DROPPED, _DAMPED = -1.5, 0.985
_HABIT, _HABIT_KEPT, _SINGLE_TAIL = 2.5, 0.993, 4.5
_DOUBT, _DOUBT_AFTER_SHIFT, _KIN_DOUBT = 10.0, 60.0, 5.0
_KINSHIP, _KIN_EVERY, _KIN_BLOCK, _KIN_AT_FIRST = 0.06, 4, 16, 0.6
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
        self._sample: list[float] = []
        self._kin = 0.0
        self._blocks = 0
        self._near = True
        self._low = False
        self._habit = 0.0
        """single outliers of late"""
        self._doubt = _DOUBT
        self._reaches: dict[float, float] = {}
        """what `reach` has said since it last moved"""

    @property
    def ready(self) -> bool:
        return self.count >= self._start

    def expected(self, ahead: int = 1) -> float:
        """What the next value should be, or the one `ahead` values from here."""
        return self.level + self.trend * (len(self._waiting) + ahead)

    def z(self, value: float) -> float:
        return self.ahead(value, 1)

    def ahead(self, value: float, count: int) -> float:
        """How far out a value would be `count` values from here, in deviations."""
        return (value - (self.level + self.trend * (len(self._waiting) + count))) / self.scale

    def reach(self, z: float) -> float:
        """The distance above the course that counts as `z` normal deviations, for a tail like this one's.

        Early on the scale itself is uncertain, and everything reaches farther; more so where neighbours are alike and so
        tell less, and after a shift, since the level may still be on its way.
        """
        reach = self._reaches.get(z)
        if reach is None:
            doubt = self._doubt * (1.0 + _KIN_DOUBT * self._kin * self._kin) / max(1, self.count)
            reach = self._reaches[z] = z * self.scale * (1.0 + doubt) * max(1.0, self.tail / NORMAL_TAIL)
        return reach

    def lowest(self, values: Sequence[float], under: float, kept: float, most: float) -> float:
        """How far under the course these values go, remembered: `under`, fading by `kept` with each of them."""
        level, trend, scale = self.level, self.trend, self.scale
        for ahead, value in enumerate(values, len(self._waiting) + 1):
            under *= kept
            z = (value - (level + trend * ahead)) / scale
            if -z > under:
                under = min(-z, most)
        return under

    def kinship(self) -> float:
        """The correlation of neighbouring values, 0 to 1: where it is high, several in a row say little more than one."""
        return self._kin

    def room(self) -> int:
        """How many more values until it moves."""
        return max(1, self._size() - len(self._waiting))

    def _size(self) -> int:
        return max(1, min(_BLOCK, self.count // _SETTLED))

    def update(self, value: float) -> None:
        """Take in one value, unless it is not finite or beyond arithmetic."""
        if not abs(value) < LARGEST:
            return
        self._waiting.append(value)
        if self.count < self._start:
            self.count += 1
            self._reaches.clear()
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
        self._reaches.clear()
        count, level, trend, scale, tail = len(values), self.level, self.trend, self.scale, self.tail
        pull, spread, far, near, at = 0.0, 0.0, 0, self._near, level
        below: list[float] = []
        low = self._low
        for value in values:
            at += trend
            z = (value - at) / scale
            if z > 2.0:
                pull += 2.0
                spread += z if z < 3.0 else 3.0
                if z > tail:
                    far += near  # several in a row are one excursion, not several signs of a heavy tail
                    near = False
                    continue
            elif z < -2.0:
                pull -= 2.0
                spread += -z if z > -3.0 else 3.0
                if z < -_FAR_BELOW:
                    if not low:
                        below.append(-z)
                    low = True
                    near = True
                    continue
            else:
                pull += z
                spread += z if z > 0.0 else -z
            near, low = True, False
        self._near, self._low = near, low
        self._blocks += 1
        if count < _KIN_BLOCK or self._blocks % _KIN_EVERY == 0:
            self._compare(values)
        self._habit *= _HABIT_KEPT**count
        self.tail = min(_WIDEST_TAIL, max(2.0, self.tail * math.exp(_TAIL_RATE * (far - _TAIL_SHARE * count))))
        mean = pull / count
        dropped = count >= _BLOCK // 2 and mean < _DROPPED
        if not dropped:
            for z in below:
                self.outlier(z)
        if dropped:
            # All far under it: the level has dropped (an epoch's border, an LR step). It is no trend.
            self.level = sum(values) / count - trend * (count + 1) / 2 + trend * count
        else:
            gain = max(LEVEL, min(0.2, 8.0 / self.count))
            self.level += trend * count + (1.0 - (1.0 - gain) ** count) * mean * scale
            self.trend += max(TREND, min(0.02, 0.6 / self.count)) * pull * scale
        # Where neighbours are alike, few of them say little about the scale.
        rate = SCALE * (1.0 - 0.9 * self._kin * self._kin)
        # A fall slows down, as losses do: held on to, an early trend would run far ahead of them.
        self.trend *= _DAMPED**count
        if self._falling and self.trend > 0.0:
            self.trend = 0.0
        if dropped:
            spread = 0.8 * count  # around the new level it is what it was
        self.scale = max(
            scale * (1.0 + (1.0 - (1.0 - rate) ** count) * (spread / count / 0.8 - 1.0)), _floor(self.level)
        )
        self.count += count

    def _compare(self, values: list[float]) -> None:
        """How alike neighbours are, by every fourth block; short ones are joined first.

        Between two estimates: that of the values takes a slow misfit of the course for kinship, and that of their moves
        (independent values turn back by half) does not see it under a second, independent noise.
        """
        level, trend, scale = self.level, self.trend, self.scale
        far = ((v - level - trend * i) / scale for i, v in enumerate(values, 1))
        self._sample.extend(-2.0 if z < -2.0 else 2.0 if z > 2.0 else z for z in far)
        if len(self._sample) < _KIN_BLOCK:
            return
        held, self._sample = self._sample, []
        self._kindred(held, min(0.25, max(_KINSHIP, len(held) / (self.count + _SETTLED))))

    def _kindred(self, held: list[float], weight: float) -> None:
        """Move what is known of kinship towards what these deviations in a row say."""
        moves = [b - a for a, b in pairwise(held)]
        seen = (
            sum(a * b for a, b in pairwise(held)) / len(moves),
            max(1e-6, sum(a * a for a in held) / len(held)),
            sum(a * b for a, b in pairwise(moves)) / (len(moves) - 1),
            max(1e-6, sum(a * a for a in moves) / len(moves)),
        )
        self._products = tuple(p + weight * (q - p) for p, q in zip(self._products, seen, strict=True))
        alike, squares, turns, squared_moves = self._products
        self._kin = max(0.0, min(1.0, 0.5 * (alike / squares + 1.0 + 2.0 * turns / squared_moves)))

    def outlier(self, z: float) -> None:
        """A value `z` deviations out that came alone and left nothing behind: it belongs to the tail.

        A single one moves it a little. Where they come again and again (batches of two kinds, a rare source of data) they
        are what this series does, and the tail reaches out to them.
        """
        self._habit += 1.0
        self._reaches.clear()
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
        if n >= 8:
            self._kindred([max(-2.0, min(2.0, (r - middle) / self.scale)) for r in rest], _KIN_AT_FIRST)
        above = sorted((r - middle) / self.scale for r in rest)
        seen = above[-3] if n >= 8 else 0.0
        self.tail = min(_FIRST_TAIL, max(NORMAL_TAIL, 1.2 * seen))

    def restart(self, start: int | None = None) -> None:
        """Forget the course; learn it anew from the next `start` values."""
        if start is not None:
            self._start, self._doubt = start, _DOUBT_AFTER_SHIFT
        self._waiting = []
        self.count = 0
        self._reaches.clear()

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
            "sample": list(self._sample),
            "kin": self._kin,
            "blocks": self._blocks,
            "near": self._near,
            "low": self._low,
            "habit": self._habit,
            "doubt": self._doubt,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start = state["start"]
        self._reaches.clear()
        self._waiting = list(state["waiting"])
        self.count = state["count"]
        self.level, self.trend, self.scale = state["level"], state["trend"], state["scale"]
        self.tail, self._products, self._sample = state["tail"], tuple(state["products"]), list(state["sample"])
        self._kin, self._blocks, self._near = state["kin"], state["blocks"], state["near"]
        self._habit, self._doubt, self._low = state["habit"], state["doubt"], state["low"]


def _floor(level: float) -> float:
    """A constant series has no scale; without a floor the first change of one ulp would be infinitely far out."""
    return 1e-3 * abs(level) + 1e-9
