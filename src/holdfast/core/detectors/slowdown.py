"""Finds the step from which on steps take longer, by how much, and the phase and rank that make them longer.

What disturbs a healthy run makes single steps longer and none shorter. So of the last twelve steps the third shortest
counts: evaluations, checkpoints, recompilations and pauses of any length count for nothing. It is compared, as a ratio,
with the same number of the steps shortly before. How far that ratio varies by nature, at this distance in time, is learned
from the run: noise that is correlated over many steps, and slow drift, raise the limit by themselves. The same is done over
48 steps, which finds later what is too noisy for twelve. Steps that are slow again and again, with fast ones between them,
are found by their number. A speed that falls little by little is compared with that of a thousand steps before; it must have
fallen all the way. Slowdowns that come and go are reported twice; from then on only one that outlasts them.

It reads the rows of metrics.jsonl, beside the training. Its state is not saved: speed belongs to a process.
"""

from __future__ import annotations

import bisect
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
_LEAST_REFERENCE, _LEAST_HISTORY, _HISTORY = 16, 24, 2048
"""steps in a reference, and known ratios, before anything is judged; and ratios that are kept"""
_MIN_SHARE, _MIN_SHARE_EARLY, _EARLY = 0.25, 0.15, 200
"""how much longer a step must be, and how much is added to that at first, less and less up to so many known ratios"""
_SIGMAS, _SPREADS, _FEW, _CORRELATED = 4.5, 1.6, 3.0, 0.4
"""and how far its ratio is above the median of those known, in standard deviations and against the largest. The first is
more while few are known. Ratios closer than this part of the reference are about the same one"""
_DOUBLED = math.log(2.0)
"""while few ratios are known, their standard deviation asks for no more than this"""
_MIN_SECONDS, _PERSISTS = 0.001, 5
"""the least growth that matters, and for how many steps in a row all limits must be exceeded: pauses end before"""
_QUANTILE, _QUANTILE_ERROR = 0.85, 0.25
"""single steps that are longer than this share of all are common: thirteen of fifteen are not, by chance"""
_MANY_WINDOW, _MANY_RATIO, _MANY_TAIL, _MIN_RATE = 40, 1.5, 1e-8, 0.02
"""for steps that are slow again and again: the window, which step is slow, how unlikely their number must be, and the least
rate that is assumed in a healthy run"""
_MANY_LASTS, _MANY_LATE = 16, 1 / 3
"""for how many steps that must go on, and the part of the slow steps that must be in the later half of them"""
_MANY_COMMON, _MANY_LEAST, _MANY_RUNS, _MANY_SPREADS = 4.0, 8, 4, 1.5
"""how far a slow step is outside of what is common; the least number of slow steps in the window, of times that they begin,
and the first against the most seen before"""
_DRIFT_GAP, _DRIFT_REFERENCE, _DRIFT_SHARE, _DRIFT_EVERY = 1024, 256, 0.5, 8
"""for a speed that falls little by little: how far back the reference is, its steps, how much longer a step must be, and
of how many rows one is kept to name the phase"""
_DRIFT_BACK = 0.25
"""the part of the growth by which the times may have gone back on the way: noise that is correlated goes up and down"""
_REFRESH = 32
_GUARD_STEPS, _RECENT, _BEFORE = 24, 96, 128
_GIVE_UP = 400
"""slow steps after which the new speed is the normal one"""
_COMES_AND_GOES, _OUTLASTS = 2, 1.5
"""after so many slowdowns that were over by themselves, one is reported if it lasts this many times as long as the
longest of them"""
_LEAST_PART = 0.5
"""a phase is named if it explains this part of the growth. Programs that share the cores interrupt every phase"""
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
    """the phase that explains most of the growth; "several" if none does, "unknown" without phases"""
    phases_before: dict[str, float]
    phases_after: dict[str, float]
    phase_seconds: float = 0.0
    """by how much the phase has grown, on the rank that is named"""
    rank: int | None = None
    """the one rank that has become slower; None if all have, or there is only one"""
    is_intermittent: bool = False
    """only some of the steps are slow"""
    is_gradual: bool = False
    """the speed has fallen little by little, at the latest from `onset` on"""

    @property
    def percent(self) -> float:
        return 100 * (self.seconds_after / self.seconds_before - 1)

    def describe(self) -> str:
        who = "" if self.rank is None else f" on rank {self.rank}"
        grown = f"{1e3 * self.phase_seconds:+.3g} ms"
        where = "" if self.phase == "unknown" else f"; most of it in {self.phase}{who} ({grown})"
        if self.phase == "several":
            where = "; spread over its phases"
        some = "some steps take" if self.is_intermittent else "a step takes"
        some = f"{some}, little by little," if self.is_gradual else some
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
    excess: float
    """the logarithm of its ratio to the reference; NaN before there is one"""
    slow_steps: int
    """of the last `_MANY_WINDOW`"""
    phases: dict[str, float]
    ranks: Values | None


class _Sliding:
    """The last values, also in order of size."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: deque[float] = deque(maxlen=size)
        self.ordered: list[float] = []

    def add(self, value: float) -> None:
        if len(self._values) == self.size:
            del self.ordered[bisect.bisect_left(self.ordered, self._values[0])]
        self._values.append(value)
        bisect.insort(self.ordered, value)


class _SpeedLevel:
    """A low one of the last `window` times against the median of the same over the `reference` steps before the last `gap`.

    All values are logarithms, so that differences are ratios.
    """

    def __init__(self, window: int, low: int, gap: int, reference: int) -> None:
        self.size, self._low, self._gap = window, low, gap
        self._lows = _Sliding(reference)
        self._history: deque[float] = deque(maxlen=_HISTORY)
        """ratios that ended `gap` steps ago"""
        self.limit = math.inf
        self.restart(is_new_speed=False)

    def restart(self, *, is_new_speed: bool) -> None:
        """Forget the newest steps, and the reference if it does not apply any more."""
        self._window = _Sliding(self.size)
        self._waiting: deque[tuple[float, float]] = deque()
        """the newest `gap` lows, and their ratios"""
        self.exceeded = 0
        """how often in a row the limit was exceeded"""
        if is_new_speed:
            self._lows = _Sliding(self._lows.size)

    @property
    def known(self) -> int:
        """Return how many ratios are known."""
        return len(self._history)

    @property
    def reference(self) -> float:
        """Return the reference; NaN before there is one."""
        lows = self._lows.ordered
        return lows[len(lows) // 2] if len(lows) >= _LEAST_REFERENCE else math.nan

    def add(self, value: float) -> float:
        """Return the ratio of the steps up to this one; NaN before there is one."""
        self._window.add(value)
        if len(self._window.ordered) < self.size:
            return math.nan
        low = self._window.ordered[self._low]
        ratio = low - self.reference
        self._waiting.append((low, ratio))
        if len(self._waiting) > self._gap:
            old, old_ratio = self._waiting.popleft()
            self._lows.add(old)
            if not math.isnan(old_ratio):
                self._history.append(old_ratio)
        return ratio

    def rises_steadily(self) -> bool:
        """Return whether the lows of the last `gap` steps have grown without going back much."""
        lows = np.array([low for low, _ in self._waiting])[:: self.size]
        back = float((np.maximum.accumulate(lows) - lows).max())
        return back <= _DRIFT_BACK * float(lows[-1] - self.reference)

    def refresh(self, floor: float) -> None:
        """Compute the limit from the known ratios."""
        if self.known >= _LEAST_HISTORY:
            known = np.array(self._history)
            independent = len(known) / (_CORRELATED * self._lows.size)
            spread = _SIGMAS * (1 + _FEW / independent) * float(known.std())
            if len(known) < _EARLY:
                spread = min(spread, _DOUBLED)
            drift = float(np.median(known))
            self.limit = max(floor, drift + max(spread, _SPREADS * (float(known.max()) - drift)))


class SlowdownDetector:
    """Watches the rows of one process, in order."""

    def __init__(self) -> None:
        self._seen = 0
        self._short, self._long = _SpeedLevel(12, 2, 20, 64), _SpeedLevel(48, 9, 64, 256)
        self._drift = _SpeedLevel(48, 9, _DRIFT_GAP, _DRIFT_REFERENCE)
        self._old: deque[_Times] = deque(maxlen=(_DRIFT_GAP + _DRIFT_REFERENCE) // _DRIFT_EVERY)
        """one of every few rows, as far back as the reference of `_drift`"""
        self._recent: deque[_Times] = deque()
        self._before: deque[_Times] = deque(maxlen=_BEFORE)
        """the rows before `_recent`"""
        self._excesses: deque[float] = deque(maxlen=_HISTORY)
        self._counts: deque[int] = deque(maxlen=_HISTORY)
        self._are_slow: deque[bool] = deque(maxlen=_MANY_WINDOW)
        self._common = self._slow_excess = math.inf
        """what single steps exceed seldom, and what makes one slow"""
        self._slow_rate = _MIN_RATE
        self._since_refresh = 0
        self.current: Slowdown | None = None
        """the slowdown that lasts"""
        self._slow_rows = 0
        self._past: deque[int] = deque(maxlen=_HISTORY)
        """how many rows slowdowns have lasted that were over by themselves"""
        self._has_reported = False

    @property
    def is_steady(self) -> bool:
        """Return whether the speed is known and normal."""
        return self.current is None and math.isfinite(self._short.limit) and not math.isnan(self._short.reference)

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
        seconds = max(1e-9, seconds - sum(phases.get(name, 0.0) for name in _ONE_TIME))
        value, reference = math.log(seconds), self._short.reference
        self._are_slow.append(value - reference > self._slow_excess)
        slow_steps = self._are_slow.count(True)
        self._recent.append(_Times(int(row["step"]), seconds, value - reference, slow_steps, phases, ranks))
        if self.current is not None:
            self._follow()
            return self._outlasts_earlier(int(row["step"]))
        is_slow_short, is_slow_long = self._is_slow(self._short, value), self._is_slow(self._long, value)
        is_often_slow = self._are_slow[-1] and self._has_many_slow() and self._keeps_being_slow()
        has_drifted = self._has_drifted(value)
        self._learn()
        is_slow = is_slow_short or is_slow_long
        if is_slow or is_often_slow:
            found = self._describe(is_intermittent=not is_slow)
        elif has_drifted:
            found = self._describe_drift()
        else:
            return None
        self._has_reported = len(self._past) < _COMES_AND_GOES
        return found if self._has_reported else None

    def _outlasts_earlier(self, step: int) -> Slowdown | None:
        """Return a slowdown that was held back, once it has lasted longer than those that came and went."""
        if self.current is None or self._has_reported or self._slow_rows < _OUTLASTS * max(self._past):
            return None
        self._has_reported = True
        return msgspec.structs.replace(self.current, step=step)

    def _is_slow(self, level: _SpeedLevel, value: float) -> bool:
        ratio = level.add(value)
        is_long = math.exp(level.reference) * math.expm1(ratio) >= _MIN_SECONDS
        level.exceeded = level.exceeded + 1 if is_long and ratio > max(level.limit, self._common) else 0
        return level.exceeded >= _PERSISTS

    def _has_drifted(self, value: float) -> bool:
        if self._seen % _DRIFT_EVERY == 0:
            self._old.append(self._recent[-1])
        level = self._drift
        level.exceeded = level.exceeded + 1 if level.add(value) > level.limit else 0
        return level.exceeded >= level.size and level.rises_steadily()

    def _learn(self) -> None:
        """Take over the rows that cannot be part of a new slowdown, and compute the limits now and then."""
        if len(self._recent) > _GUARD_STEPS and not math.isnan((row := self._recent[-_GUARD_STEPS]).excess):
            self._excesses.append(row.excess)
            self._counts.append(row.slow_steps)
        if len(self._recent) > _RECENT:
            self._before.append(self._recent.popleft())
        self._since_refresh += 1
        often = _REFRESH if self._short.known < _EARLY else 4 * _REFRESH
        if self._since_refresh < often and math.isfinite(self._short.limit):
            return
        self._since_refresh = 0
        share = _MIN_SHARE + _MIN_SHARE_EARLY * max(0.0, 1 - self._short.known / _EARLY)
        for level in (self._short, self._long):
            level.refresh(math.log1p(share))
        self._drift.refresh(math.log1p(_DRIFT_SHARE))
        if len(self._excesses) >= _LEAST_HISTORY:
            excesses = np.array(self._excesses)
            quantile = min(1.0, _QUANTILE + _QUANTILE_ERROR / math.sqrt(len(excesses)))
            self._common = float(np.quantile(excesses, quantile))
            self._slow_excess = max(math.log(max(_MANY_RATIO, 1 + share)), _MANY_COMMON * self._common)
            self._slow_rate = max(_MIN_RATE, 1.5 * float((excesses > self._slow_excess).mean()))

    def _has_many_slow(self) -> bool:
        slow, size = self._are_slow.count(True), len(self._are_slow)
        times_begun = sum(is_slow and not was for was, is_slow in pairwise(self._are_slow))
        if len(self._excesses) < _MANY_WINDOW or size < _MANY_WINDOW or times_begun < _MANY_RUNS:
            return False  # one pause of several steps begins once
        least = max(_MANY_LEAST, 2.5 * self._slow_rate * size, _MANY_SPREADS * max(self._counts) + 1)
        return slow >= least and _binomial_tail(slow, size, self._slow_rate) < _MANY_TAIL

    def _keeps_being_slow(self) -> bool:
        """Return whether steps have been slow now and then for a while. After the start of an epoch they soon are not."""
        rows = list(self._recent)
        since = [row.excess > self._slow_excess for row in rows[self._find_first_of_many(rows) :]]
        return len(since) >= _MANY_LASTS and sum(since[len(since) // 2 :]) >= _MANY_LATE * sum(since)

    # ---- what is reported

    def _describe(self, *, is_intermittent: bool) -> Slowdown:
        rows = list(self._recent)
        onset = self._find_first_of_many(rows) if is_intermittent else self._find_onset(rows)
        before, after = [*self._before, *rows[:onset]][-_BEFORE:], rows[onset:]
        return self._compare(before, after, rows[onset].step, is_intermittent=is_intermittent)

    def _describe_drift(self) -> Slowdown:
        before = list(self._old)[: _DRIFT_REFERENCE // _DRIFT_EVERY]
        after = list(self._recent)[-self._drift.size :]
        return self._compare(before, after, before[-1].step, is_gradual=True)

    def _compare(
        self,
        before: list[_Times],
        after: list[_Times],
        onset: int,
        *,
        is_intermittent: bool = False,
        is_gradual: bool = False,
    ) -> Slowdown:
        middle = np.mean if is_intermittent else np.median
        seconds_before, seconds_after = (float(middle([row.seconds for row in part])) for part in (before, after))
        phases_before, phases_after = _typical(before, is_intermittent), _typical(after, is_intermittent)
        rank, growth = self._find_rank(before, after, max(0.0, seconds_after - seconds_before))
        if rank is None:
            growth = {name: value - phases_before.get(name, 0.0) for name, value in phases_after.items()}
        phase = max(growth, key=lambda name: growth[name]) if growth else "unknown"
        phase_seconds = growth.get(phase, 0.0)
        if rank is None and growth and phase_seconds < _LEAST_PART * (seconds_after - seconds_before):
            phase = "several"
        self.current = Slowdown(
            step=after[-1].step,
            onset=onset,
            seconds_before=seconds_before,
            seconds_after=max(seconds_after, seconds_before),
            phase=phase,
            phases_before=phases_before,
            phases_after=phases_after,
            phase_seconds=phase_seconds,
            rank=rank,
            is_intermittent=is_intermittent,
            is_gradual=is_gradual,
        )
        self._slow_rows = 0
        return self.current

    def _find_onset(self, rows: list[_Times]) -> int:
        """Return the place of the first slow step: the split of the recent steps into two levels that fits best."""
        typical = math.exp(self._short.reference)
        cap = typical + 3 * max(typical * math.expm1(self._short.limit), _MIN_SECONDS)
        times = np.minimum([row.seconds for row in rows], cap)
        best, place = math.inf, len(rows) - 1
        for split in range(1, len(rows) - 2):
            low, high = times[:split], times[split:]
            error = float(np.abs(low - np.median(low)).sum() + np.abs(high - np.median(high)).sum())
            if error < best and np.median(high) > np.median(low):
                best, place = error, split
        return place

    def _find_first_of_many(self, rows: list[_Times]) -> int:
        """Return the place of the first slow step from which on slow steps are frequent: it is the likeliest."""
        slow = np.array([row.excess > self._slow_excess for row in rows])
        rate = min(0.95, max(float(slow[-_MANY_WINDOW:].mean()), 2 * self._slow_rate))
        gains = np.where(slow, math.log(rate / self._slow_rate), math.log((1 - rate) / (1 - self._slow_rate)))
        return max(1, int(np.cumsum(gains[::-1])[::-1].argmax()))

    def _find_rank(
        self, before: list[_Times], after: list[_Times], growth: float
    ) -> tuple[int | None, dict[str, float]]:
        """Return the rank whose own time has grown, and by how much in each phase; None if no rank has, or all have."""
        old = [row.ranks for row in before if row.ranks is not None]
        new = [row.ranks for row in after if row.ranks is not None]
        if not old or not new or old[-1].shape != new[-1].shape or old[-1].shape[1] < 2:
            return None, {}
        grown = np.median(np.stack(new), axis=0) - np.median(
            np.stack([o for o in old if o.shape == new[-1].shape]), axis=0
        )
        own = grown[:3].sum(axis=0)
        rank = int(own.argmax())
        others = float(np.median(np.delete(own, rank)))
        if own[rank] < 0.5 * growth or others > 0.5 * own[rank]:
            return None, {}
        return rank, dict(zip(RANK_PHASES, grown[:3, rank].tolist(), strict=False))

    def _follow(self) -> None:
        """End a slowdown that is over, and take a speed that stays for the normal one."""
        assert self.current is not None
        self._slow_rows += 1
        if self._slow_rows < _GIVE_UP and (self._slow_rows < _MANY_WINDOW or self._slow_rows % 8):
            return
        middle = 0.5 * (self.current.seconds_before + self.current.seconds_after)
        times = [row.seconds for row in list(self._recent)[-_MANY_WINDOW:]]
        is_over = float(np.mean(times) if self.current.is_intermittent else np.median(times)) < middle
        if is_over or self._slow_rows >= _GIVE_UP:
            self.current = None
            self._past.extend([self._slow_rows] if is_over else [])
            self._recent.clear()
            self._are_slow.clear()
            self._old.clear()
            for level in (self._short, self._long, self._drift):
                level.restart(is_new_speed=not is_over)
            if not is_over:
                self._before.clear()
            self._since_refresh = 4 * _REFRESH


def _typical(rows: list[_Times], is_intermittent: bool) -> dict[str, float]:
    """Return the typical seconds of each phase."""
    names = {name for row in rows for name in row.phases}
    middle = np.mean if is_intermittent else np.median
    with_phases = [row.phases for row in rows if row.phases]
    return {name: round(float(middle([each.get(name, 0.0) for each in with_phases])), 6) for name in sorted(names)}


def _binomial_tail(count: int, of: int, rate: float) -> float:
    """Return the probability of at least `count` slow steps out of `of`."""
    return sum(math.comb(of, k) * rate**k * (1 - rate) ** (of - k) for k in range(count, of + 1)) if rate < 1 else 1.0
