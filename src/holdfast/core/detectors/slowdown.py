"""Finds the step from which on steps take longer, by how much, and the phase and rank that make them longer.

What disturbs a healthy run makes single steps longer and none shorter. So of the last twelve steps the third shortest
counts: evaluations, checkpoints, recompilations and pauses of any length count for nothing. It is compared with the
same number of the steps before; how far that varies by nature is learned. Steps that are slow again and again, with fast
ones between them, are found by their share.

It reads the rows of metrics.jsonl, beside the training. Its state is not saved: speed belongs to a process.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.core.base.types import Finding, Kind, Severity

Values = NDArray[np.float64]

_FIRST_STEPS = 10
"""the first steps of a process start workers and compile"""
_WINDOW, _LOW = 12, 2
"""steps that are looked at together, and which of their times counts, from 0: the third shortest"""
_GUARD_STEPS = 24
"""the newest steps are not part of the baseline"""
_LEAST_BASELINE, _BASELINE = 40, 2048
_MIN_SHARE, _MIN_SHARE_EARLY = 0.2, 0.35
"""how much longer a step must be, and the same while the baseline has fewer than `_EARLY` steps"""
_EARLY = 128
_SPREADS = 2.0
"""and how many times longer than anything in the baseline, in units of how far that is above its median"""
_MIN_SECONDS = 0.001
_MANY_WINDOW, _MANY_RATIO, _MANY_TAIL, _MIN_RATE = 40, 1.5, 1e-8, 0.02
"""for steps that are slow again and again: the window, which step is slow, how unlikely their number must be, and the least
rate that is assumed in the baseline"""
_MANY_LEAST, _MANY_RUNS = 8, 4
"""the least number of slow steps in the window, and of times that they begin"""
_QUANTILE, _QUANTILE_ERROR = 0.92, 0.25
_REFRESH = 32
_GIVE_UP = 400
"""slow steps after which the new speed is the normal one"""
_ONE_TIME = ("eval", "compile", "checkpoint")
"""phases that do not belong to a step"""
RANK_PHASES = ("between", "data", "compute", "wait")


class Slowdown(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that take longer than before."""

    step: int
    """at which it was found"""
    onset: int
    seconds_before: float
    seconds_after: float
    phase: str
    """the phase that has grown the most; "unknown" without phases"""
    phases_before: dict[str, float]
    phases_after: dict[str, float]
    rank: int | None = None
    """the one rank that has become slower; None if all have, or there is only one"""
    is_intermittent: bool = False
    """only some of the steps are slow"""

    @property
    def percent(self) -> float:
        return 100 * (self.seconds_after / self.seconds_before - 1)

    def describe(self) -> str:
        who = "" if self.rank is None else f" on rank {self.rank}"
        grown = 1e3 * (self.phases_after.get(self.phase, 0.0) - self.phases_before.get(self.phase, 0.0))
        where = "" if self.phase == "unknown" else f"; most of it in {self.phase}{who} ({grown:+.3g} ms)"
        some = "some steps take" if self.is_intermittent else "a step takes"
        return (
            f"since step {self.onset} {some} {1e3 * self.seconds_after:.3g} ms instead of "
            f"{1e3 * self.seconds_before:.3g} ms ({self.percent:+.0f}%){where}"
        )

    def finding(self, cause: str, advice: str, evidence: Mapping[str, Any]) -> Finding:
        """Return the note for the journal."""
        return Finding(
            kind=Kind.SLOWDOWN,
            severity=Severity.NOTE,
            step=self.step,
            onset=self.onset,
            detector="slowdown",
            message=f"{self.describe()}; cause: {cause.replace('_', ' ')}: {advice}",
            evidence={**msgspec.to_builtins(self), "slowdown_cause": cause, **evidence},
        )


class _Times(NamedTuple):
    step: int
    seconds: float
    low: float
    """the third shortest of the twelve steps up to this one"""
    phases: dict[str, float]
    ranks: Values | None


class SlowdownDetector:
    """Watches the rows of one process, in order."""

    def __init__(self) -> None:
        self._seen = 0
        self._window: deque[float] = deque(maxlen=_WINDOW)
        self._recent: deque[_Times] = deque(maxlen=_MANY_WINDOW + _GUARD_STEPS)
        self._before: deque[_Times] = deque(maxlen=_EARLY)
        """the newest rows of the baseline"""
        self._times: deque[float] = deque(maxlen=_BASELINE)
        self._lows: deque[float] = deque(maxlen=_BASELINE)
        self._base = self._limit = self._slow_limit = math.inf
        self._typical = math.inf
        """the median of single steps; `_base` is that of the third shortest of twelve"""
        self._slow_rate = _MIN_RATE
        self._since_refresh = 0
        self.current: Slowdown | None = None
        """the slowdown that lasts"""
        self._slow_rows = 0

    @property
    def is_steady(self) -> bool:
        """Return whether the speed is known and normal."""
        return self.current is None and math.isfinite(self._base)

    def observe(self, row: Mapping[str, Any], ranks: Values | None = None) -> Slowdown | None:
        """Return a slowdown when it is established, once.

        row: as in metrics.jsonl. ranks: seconds of every rank between steps, in the loader, computing and waiting.
        """
        seconds = row.get("step_seconds")
        if row.get("status") != "committed" or not isinstance(seconds, float) or not 0 <= seconds < math.inf:
            return None
        self._seen += 1
        if self._seen <= _FIRST_STEPS:
            return None
        phases = row.get("phases") or {}
        seconds = max(0.0, seconds - sum(phases.get(name, 0.0) for name in _ONE_TIME))
        self._window.append(seconds)
        low = sorted(self._window)[_LOW] if len(self._window) == _WINDOW else 0.0
        new = _Times(int(row["step"]), seconds, low, phases, ranks)
        self._recent.append(new)
        if self.current is not None:
            self._follow()
            return None
        if len(self._recent) > _GUARD_STEPS:
            self._learn(self._recent[-_GUARD_STEPS - 1])
        if low > self._limit:
            return self._report(new, is_intermittent=False)
        return self._report(new, is_intermittent=True) if seconds > self._slow_limit and self._has_many_slow() else None

    def _learn(self, row: _Times) -> None:
        self._before.append(row)
        self._times.append(row.seconds)
        if row.low:
            self._lows.append(row.low)
        self._since_refresh += 1
        if len(self._lows) >= _LEAST_BASELINE and (self._since_refresh >= _REFRESH or self._base == math.inf):
            self._refresh()

    def _refresh(self) -> None:
        """Compute the limits. Ten of twelve steps must be above one that less than a tenth of the baseline is above."""
        self._since_refresh = 0
        lows, times = np.array(self._lows), np.array(self._times)
        self._base = base = float(np.median(lows))
        self._typical = float(np.median(times))
        share = _MIN_SHARE if len(lows) >= _EARLY else _MIN_SHARE_EARLY
        high = float(np.quantile(times, min(1.0, _QUANTILE + _QUANTILE_ERROR / math.sqrt(len(times)))))
        reach = max(0.0, float(lows.max()) - base)
        self._limit = max(base * (1 + share), base + _SPREADS * reach, base + _MIN_SECONDS, high)
        self._slow_limit = max(_MANY_RATIO * base, base * (1 + share), base + _MIN_SECONDS)
        self._slow_rate = max(_MIN_RATE, 1.5 * float((times > self._slow_limit).mean()))

    def _has_many_slow(self) -> bool:
        if len(self._lows) < _EARLY:
            return False
        window = list(self._recent)[-_MANY_WINDOW:]
        are_slow = [row.seconds > self._slow_limit for row in window]
        slow = sum(are_slow)
        times_begun = sum(is_slow and not was for was, is_slow in pairwise(are_slow))
        if times_begun < _MANY_RUNS:  # one pause of several steps
            return False
        is_many = len(window) == _MANY_WINDOW and slow >= max(_MANY_LEAST, 2.5 * self._slow_rate * len(window))
        return is_many and _binomial_tail(slow, len(window), self._slow_rate) < _MANY_TAIL

    # ---- what is reported

    def _report(self, new: _Times, *, is_intermittent: bool) -> Slowdown:
        rows = list(self._recent)
        onset = self._find_first_of_many(rows) if is_intermittent else self._find_onset(rows)
        after = [row for row in rows if row.step >= onset][-_MANY_WINDOW:] or [new]
        before = [row for row in self._before if row.step < onset] or list(self._before)
        times = [row.seconds for row in after]
        seconds_after = float(np.mean(times) if is_intermittent else np.median(times))
        phases_before, phases_after = _typical(before, is_intermittent), _typical(after, is_intermittent)
        rank, phase = self._find_rank(before, after, max(0.0, seconds_after - self._typical))
        if phase is None:
            growth = {name: value - phases_before.get(name, 0.0) for name, value in phases_after.items()}
            phase = max(growth, key=lambda name: growth[name]) if growth else "unknown"
        self.current = Slowdown(
            step=new.step,
            onset=onset,
            seconds_before=self._typical,
            seconds_after=max(seconds_after, self._typical),
            phase=phase,
            phases_before=phases_before,
            phases_after=phases_after,
            rank=rank,
            is_intermittent=is_intermittent,
        )
        self._slow_rows = 0
        return self.current

    def _find_onset(self, rows: list[_Times]) -> int:
        """Return the first slow step: the split of the recent steps into two levels that fits best."""
        cap = self._typical + 3 * max(self._limit - self._base, _MIN_SECONDS)
        times = np.minimum([row.seconds for row in rows], cap)
        best, place = math.inf, max(0, len(rows) - _WINDOW)
        for split in range(1, len(rows) - 2):
            low, high = times[:split], times[split:]
            error = float(np.abs(low - self._typical).sum() + np.abs(high - np.median(high)).sum())
            if error < best:
                best, place = error, split
        return rows[place].step

    def _find_first_of_many(self, rows: list[_Times]) -> int:
        """Return the first slow step from which on slow steps are frequent: it is the likeliest."""
        slow = np.array([row.seconds > self._slow_limit for row in rows])
        rate = min(0.95, max(float(slow[-_MANY_WINDOW:].mean()), 2 * self._slow_rate))
        gains = np.where(slow, math.log(rate / self._slow_rate), math.log((1 - rate) / (1 - self._slow_rate)))
        return rows[int(np.cumsum(gains[::-1])[::-1].argmax())].step

    def _find_rank(self, before: list[_Times], after: list[_Times], growth: float) -> tuple[int | None, str | None]:
        """Return the rank whose own time has grown, and the phase; None if no rank has, or all have."""
        old = [row.ranks for row in before if row.ranks is not None]
        new = [row.ranks for row in after if row.ranks is not None]
        if not old or not new or old[-1].shape != new[-1].shape or old[-1].shape[1] < 2:
            return None, None
        grown = np.median(np.stack(new), axis=0) - np.median(
            np.stack([o for o in old if o.shape == new[-1].shape]), axis=0
        )
        own = grown[:3].sum(axis=0)
        rank = int(own.argmax())
        others = float(np.median(np.delete(own, rank)))
        if own[rank] < 0.5 * growth or others > 0.5 * own[rank]:
            return None, None
        return rank, RANK_PHASES[int(grown[:3, rank].argmax())]

    def _follow(self) -> None:
        """End a slowdown that is over, and take a speed that stays for the normal one."""
        assert self.current is not None
        self._slow_rows += 1
        if self._slow_rows < _GIVE_UP and (self._slow_rows < _MANY_WINDOW or self._slow_rows % _WINDOW):
            return
        middle = 0.5 * (self.current.seconds_before + self.current.seconds_after)
        times = [row.seconds for row in list(self._recent)[-_MANY_WINDOW:]]
        is_over = float(np.mean(times) if self.current.is_intermittent else np.median(times)) < middle
        if is_over or self._slow_rows >= _GIVE_UP:
            self.current = None
            self._recent.clear()
            self._window.clear()
            if not is_over:
                self._times.clear()
                self._lows.clear()
                self._base = self._limit = self._slow_limit = math.inf


def _typical(rows: list[_Times], is_intermittent: bool) -> dict[str, float]:
    """Return the typical seconds of each phase."""
    names = {name for row in rows for name in row.phases}
    middle = np.mean if is_intermittent else np.median
    with_phases = [row.phases for row in rows if row.phases]
    return {name: round(float(middle([each.get(name, 0.0) for each in with_phases])), 6) for name in sorted(names)}


def _binomial_tail(count: int, of: int, rate: float) -> float:
    """Return the probability of at least `count` slow steps out of `of`."""
    return sum(math.comb(of, k) * rate**k * (1 - rate) ** (of - k) for k in range(count, of + 1)) if rate < 1 else 1.0
