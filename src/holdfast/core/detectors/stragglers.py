"""Names a rank that is slower than the others, the phase that makes it slow, and the step at which that began.

Each step has the seconds of every rank between steps, in the loader, computing, and waiting. A rank's excess in a phase is
its time less the median of the other ranks, as a share of the phase. A CUSUM adds the excess up; one step counts for little,
however long it took, and the more the excess varies by nature, the higher the sum must be. It follows from the rows of all
ranks alone, so all ranks name the same one. It is a note: nothing is done about it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.core.base.types import Finding, Kind, Severity

Values = NDArray[np.float64]

PHASES = ("between_steps", "data", "compute")
"""the phases in which a rank can be slow, in the order of a step; the fourth row of times is the wait for other ranks"""
_CURES = {
    "between_steps": "what does the loop do between steps on this rank alone (logging, evaluation, hooks)?",
    "data": "look at its storage, its loader workers and the load of its CPU",
    "compute": "look at its clocks, its temperature, other processes, and whether its batches are larger",
}
_SHARES = np.array([[0.5], [0.5], [0.25]])
"""a phase shorter than this share of a step counts as that long: a slow phase that costs next to nothing is not named"""
_MIN_STEP_SECONDS = 0.02
_SLACK = 0.08
"""the excess that is tolerated"""
_LEAST_CAP, _CAP_SPREADS = 0.2, 1.5
"""the most that one step counts, and the same in units of how far neighbouring steps differ"""
_LEAST_STEPS = 24
"""so many steps at the cap are needed at least"""
_CERTAINTY = 25.0
"""noise without trend reaches the required score once in e to this power steps"""
_BLOCK, _BLOCKS = 8, 24
"""noise is the variance of the means of blocks of steps, over so many blocks"""
_FIRST_STEPS = 8
"""the first steps of a process start workers and compile"""
_REMEMBERED_STEPS = 64


class _Episode(NamedTuple):
    phase: int
    onset: int


class Stragglers:
    """Watches the ranks of one run. Not part of the saved state: speed belongs to a process, not to its training."""

    def __init__(self, hosts: Sequence[str], size: int) -> None:
        self._hosts, self._size = hosts, size
        shape = len(PHASES), size
        self._score: Values = np.zeros(shape)
        self._since = np.zeros(shape, dtype=np.int64)
        """the step from which on the score is above 0"""
        self._named: dict[int, _Episode] = {}
        self._recent: deque[Values] = deque(maxlen=_REMEMBERED_STEPS)
        self._steps = 0
        self._first_step: int | None = None
        # Noise: how far neighbouring steps differ, and how much the means of blocks vary.
        self._last: Values | None = None
        self._spread: Values = np.zeros((len(PHASES), 1))
        self._sum: Values = np.zeros(shape)
        self._last_mean: Values | None = None
        self._variance: Values = np.zeros(shape)
        self._blocks = 0
        self._cap: Values = np.full((len(PHASES), 1), _LEAST_CAP)
        self._limit: Values = np.full(shape, np.inf)
        """the score at which a rank is named"""

    def observe(self, step: int, seconds: Values) -> tuple[list[Finding], list[str]]:
        """Return the ranks that are found slow at this step, and what to note about ranks that are no longer slow.

        seconds: of each phase, and the wait (rows), on each rank (columns).
        """
        self._steps += 1
        if self._steps <= _FIRST_STEPS or not np.isfinite(seconds).all():
            return [], []
        if self._first_step is None:
            self._first_step = step
        self._recent.append(seconds.copy())
        excess = _relative_excess(seconds)
        counted: Values = np.clip(excess, -self._cap, self._cap)
        self._learn(excess, counted)
        score, limit = self._score, self._limit
        self._since[score == 0.0] = step
        score += counted - _SLACK
        np.clip(score, 0.0, limit, out=score)
        findings = self._begin(step) if (score >= limit).any() else []
        return findings, self._end(step) if self._named else []

    def _learn(self, excess: Values, counted: Values) -> None:
        """Learn how much the excess varies by nature. Its level is no part of that: a rank may always have been slow."""
        if self._last is not None:
            self._spread += (np.abs(excess - self._last).mean(axis=1, keepdims=True) - self._spread) / min(
                self._steps - _FIRST_STEPS - 1, _BLOCK * _BLOCKS
            )
        self._last = excess
        self._sum += counted
        if (self._steps - _FIRST_STEPS) % _BLOCK:
            return
        mean, self._sum = self._sum / _BLOCK, np.zeros_like(self._sum)
        if self._last_mean is not None:
            self._blocks += 1
            variance = (mean - self._last_mean) ** 2 * (_BLOCK / 2)
            self._variance += (variance - self._variance) / min(self._blocks, _BLOCKS)
        self._last_mean = mean
        if self._blocks > 1:
            self._cap = np.clip(_CAP_SPREADS * self._spread, _LEAST_CAP, 1.0)
            typical = np.median(self._variance, axis=1, keepdims=True)
            noise = np.maximum(self._variance, typical) * (_CERTAINTY / (2 * _SLACK))
            self._limit = np.maximum(_LEAST_STEPS * (self._cap - _SLACK), noise)

    def _begin(self, step: int) -> list[Finding]:
        findings, limit = [], self._limit
        for rank in np.flatnonzero((self._score >= limit).any(axis=0)).tolist():
            if rank not in self._named:
                phase = int(np.argmax(self._score[:, rank] / limit[:, rank]))
                self._named[rank] = _Episode(phase, int(self._since[phase, rank]))
                findings.append(self._describe(step, rank, self._named[rank]))
        return findings

    def _end(self, step: int) -> list[str]:
        over = [rank for rank in self._named if not self._score[:, rank].any()]
        notes = []
        for rank in over:
            phase, onset = self._named.pop(rank)
            notes.append(
                f"{self._name(rank)} is as fast as the other ranks again at step {step}; it was slow in {PHASES[phase]} "
                f"from step {onset} on"
            )
        return notes

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._hosts[rank]})" if rank < len(self._hosts) else f"rank {rank}"

    def _describe(self, step: int, rank: int, episode: _Episode) -> Finding:
        phase, onset = episode
        times: Values = np.median(np.stack(list(self._recent)[-(step - onset + 1) :]), axis=0)
        local = float(times[phase, rank])
        others, wait = (float(np.median(np.delete(times[row], rank))) for row in (phase, -1))
        period = float(np.median(times.sum(axis=0)))
        lost = max(0.0, local - others)
        percent = 100 * lost / max(period - lost, _MIN_STEP_SECONDS / 2)
        is_first = self._first_step is not None and onset <= self._first_step + _BLOCK
        since = "since the run was started" if is_first else f"since step {onset}"
        compared = "the other rank" if self._size == 2 else "the median of the other ranks"
        message = (
            f"{self._name(rank)} has been slow in {PHASES[phase]} {since}: {1e3 * local:.3g} ms a step, {compared} "
            f"{1e3 * others:.3g} ms; a step takes {percent:.0f}% longer for all ranks; {_CURES[PHASES[phase]]}"
        )
        evidence = {
            "rank": rank,
            "host": self._hosts[rank] if rank < len(self._hosts) else "",
            "phase": PHASES[phase],
            "percent": round(percent, 1),
            "seconds": {name: float(times[row, rank]) for row, name in enumerate((*PHASES, "wait"))},
            "others": {name: float(np.median(np.delete(times[row], rank))) for row, name in enumerate(PHASES)},
            "others_wait": wait,
            "since_start": is_first,
        }
        return Finding(
            kind=Kind.STRAGGLER,
            severity=Severity.NOTE,
            step=step,
            onset=onset,
            detector="stragglers",
            message=message,
            evidence=evidence,
        )


def _relative_excess(seconds: Values) -> Values:
    """Return by how much each rank is slower than the others in each phase, as a share of the phase, from -1 to 1.

    A rank that has waited for others inside a phase is slow in it, but not behind them at its end: the lesser counts.
    """
    phases = len(PHASES)
    times = np.concatenate((seconds[:phases], np.cumsum(seconds, axis=0)))
    size = times.shape[1]
    middle = (size - 1) // 2, size // 2
    low, high = np.partition(times, middle, axis=1)[:, middle].T[:, :, None]
    # The median of the other ranks; if their number is even, the median of all.
    excess = times - np.where(times <= low, high, low)
    medians = (low + high) / 2
    scale = np.maximum(medians[:phases], _SHARES * np.maximum(medians[-1], _MIN_STEP_SECONDS))
    values: Values = np.clip(np.minimum(excess[:phases], excess[phases:-1]) / scale, -1.0, 1.0)
    return values
