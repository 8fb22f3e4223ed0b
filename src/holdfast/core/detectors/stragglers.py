"""Names a rank that is slower than the others, the phase that makes it slow, and the step at which that began.

Each step has the seconds of every rank between steps, in the loader, computing, and waiting. Whatever disturbs a healthy
rank makes single steps longer and none shorter. So of a block of steps one of the shortest times counts, and a pause of any
length counts for nothing. A rank's excess in a phase is that time less the median of the other ranks, as a share of the
phase. A CUSUM adds the excess up; the more it varies by nature, the higher the sum must be.

It follows from the rows of all ranks alone, so all ranks name the same one. It is a note: nothing is done about it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.core.base.types import Finding, Kind, Severity

Values = NDArray[np.float64]

PHASES = ("between_steps", "data", "compute")
"""the phases in which a rank can be slow, in the order of a step; then it waits for the other ranks"""
_CURES = {
    "between_steps": "what does the loop do between steps on this rank alone (logging, evaluation, hooks)?",
    "data": "look at its storage, its loader workers and the load of its CPU",
    "compute": "look at its clocks, its temperature, other processes, and whether its batches are larger",
}
_DATA = 1
_CHECKED = (0, _DATA, 2, _DATA)
"""the phase of each score. Data has two: workers that are too slow make the loader slow in bursts, so its mean counts too"""
_SHARES = np.array([[0.5], [0.5], [0.25], [0.5]])
"""a phase shorter than this share of a step counts as that long: a slow phase that costs next to nothing is not named"""
_MIN_STEP_SECONDS = 0.02
_BLOCK, _LOW = 8, 1
"""steps of a block, and which of their times counts: the second shortest"""
_SLACK = 0.08
"""the excess that is tolerated"""
_LEAST_CAP, _CAP_SPREADS = 0.2, 1.5
"""the most that one block counts, and the same in units of how far neighbouring blocks differ"""
_LEAST_BLOCKS = np.array([[3.0], [3.0], [3.0], [7.0]])
"""so many blocks at the cap are needed at least; a mean is not safe from pauses, and needs more of them"""
_CERTAINTY, _PER_RANKS = 30.0, 0.2
"""the required score in units of what noise reaches, for two ranks; and how much more for e times as many"""
_MEMORY, _PRIOR_BLOCKS, _PRIOR_VARIANCE = 24, 8, 0.001
"""blocks over which noise is measured; what is assumed at the beginning, and how many blocks that counts for"""
_FIRST_STEPS = 8
"""the first steps of a process start workers and compile"""


class _Episode(NamedTuple):
    phase: int
    onset: int


class Stragglers:
    """Watches the ranks of one run. Not part of the saved state: speed belongs to a process, not to its training."""

    def __init__(self, hosts: Sequence[str], size: int) -> None:
        self._hosts, self._size = hosts, size
        self._certainty = _CERTAINTY * (1 + _PER_RANKS * math.log(size / 2))
        shape = len(_CHECKED), size
        self._window: Values = np.empty((_BLOCK, len(PHASES) + 1, size))
        self._steps = 0
        self._began = self._first_step = 0
        """the first step of the block, and of all"""
        self._recent: deque[Values] = deque(maxlen=_MEMORY)
        """the times of recent blocks"""
        self._blocks = 0
        self._last: Values = np.zeros(shape)
        self._spread: Values = np.zeros((len(_CHECKED), 1))
        """how far neighbouring blocks differ"""
        self._variance: Values = np.full(shape, _PRIOR_VARIANCE)
        self._score: Values = np.zeros(shape)
        self._since = np.zeros(shape, dtype=np.int64)
        """the step from which on the score is above 0"""
        self._named: dict[int, _Episode] = {}

    def observe(self, step: int, seconds: Values) -> tuple[list[Finding], list[str]]:
        """Return the ranks that are found slow at this step, and what to note about ranks that are no longer slow.

        seconds: of each phase, and the wait (rows), on each rank (columns).
        """
        self._steps += 1
        if self._steps <= _FIRST_STEPS:
            return [], []
        place = (self._steps - _FIRST_STEPS - 1) % _BLOCK
        self._window[place] = seconds
        if place == 0:
            self._began = step
            self._first_step = self._first_step or step
        return self._judge(step) if place == _BLOCK - 1 else ([], [])

    def _judge(self, step: int) -> tuple[list[Finding], list[str]]:
        if not np.isfinite(self._window).all():
            return [], []
        low = np.concatenate((self._window, np.cumsum(self._window, axis=1)), axis=1)
        low = np.partition(low, _LOW, axis=0)[_LOW]
        data = np.minimum(self._window[:, _DATA], np.median(low[-1])).mean(axis=0)  # a pause counts as one step
        times = np.concatenate((low, data[None]))
        self._recent.append(times)
        excess = _relative_excess(times)
        if self._blocks:
            self._learn(excess)
        self._last, self._blocks = excess, self._blocks + 1
        cap, score = np.clip(_CAP_SPREADS * self._spread, _LEAST_CAP, 1.0), self._score
        noise = np.maximum(self._variance, np.median(self._variance, axis=1, keepdims=True))
        limit = np.maximum(_LEAST_BLOCKS * (cap - _SLACK), noise * (self._certainty / (2 * _SLACK)))
        self._since[score == 0.0] = self._began
        score += np.clip(excess, -cap, cap) - _SLACK
        np.clip(score, 0.0, limit, out=score)
        return self._begin(step, score / limit), self._end(step)

    def _learn(self, excess: Values) -> None:
        """Learn how much the excess varies by nature. Neither its level nor one change of level is part of that."""
        change, weight = np.abs(excess - self._last), 1 / min(self._blocks + _PRIOR_BLOCKS, _MEMORY)
        self._spread += weight * (change.mean(axis=1, keepdims=True) - self._spread)
        cap = np.clip(_CAP_SPREADS * self._spread, _LEAST_CAP, 1.0)
        self._variance += weight * (np.minimum(change, cap) ** 2 / 2 - self._variance)

    def _begin(self, step: int, share: Values) -> list[Finding]:
        findings = []
        for rank in np.flatnonzero((share >= 1.0).any(axis=0)).tolist():
            if rank not in self._named:
                row = int(np.argmax(share[:, rank]))
                self._named[rank] = _Episode(_CHECKED[row], int(self._since[row, rank]))
                findings.append(self._describe(step, rank, self._named[rank]))
        return findings

    def _end(self, step: int) -> list[str]:
        notes = []
        checked = np.array(_CHECKED)
        for rank in [r for r, episode in self._named.items() if not self._score[checked == episode.phase, r].any()]:
            phase, onset = self._named.pop(rank)
            notes.append(
                f"step {step}: {self._name(rank)} is as fast as the other ranks again; it was slow in {PHASES[phase]} "
                f"since step {onset}"
            )
        return notes

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._hosts[rank]})" if rank < len(self._hosts) else f"rank {rank}"

    def _describe(self, step: int, rank: int, episode: _Episode) -> Finding:
        phase, onset = episode
        blocks = list(self._recent)[-max(1, (step - onset + 1) // _BLOCK) :]
        times: Values = np.median(np.stack(blocks), axis=0)
        times[_DATA] = times[-1]
        times = times[: len(PHASES) + 1]
        others: Values = np.median(np.delete(times, rank, axis=1), axis=1)
        lost = max(0.0, float(times[phase, rank] - others[phase]))
        step_seconds = max(float(np.median(times.sum(axis=0))), _MIN_STEP_SECONDS)
        percent = 100 * lost / max(step_seconds - lost, lost)
        is_first = onset == self._first_step
        since = "since the process started" if is_first else f"since step {onset}"
        compared = "the other rank" if self._size == 2 else "the median of the others"
        message = (
            f"{self._name(rank)} has been slow in {PHASES[phase]} {since}: {1e3 * times[phase, rank]:.3g} ms a step, "
            f"{compared} {1e3 * others[phase]:.3g} ms; every rank waits for it, about {percent:.0f}% of a step; "
            f"{_CURES[PHASES[phase]]}"
        )
        names = (*PHASES, "wait")
        evidence = {
            "rank": rank,
            "host": self._hosts[rank] if rank < len(self._hosts) else "",
            "phase": PHASES[phase],
            "percent": round(percent, 1),
            "since_start": is_first,
            "seconds": dict(zip(names, times[:, rank].tolist(), strict=True)),
            "others": dict(zip(names, others.tolist(), strict=True)),
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


def _relative_excess(times: Values) -> Values:
    """Return by how much each rank is slower than the others in each check, as a share of the phase, from -1 to 1.

    times: of each phase and the wait, then the sums of each up to there, then the mean of the loader. A rank that has waited
    for others inside a phase is slow in it, but not behind them at its end: the lesser counts.
    """
    phases, size = len(PHASES), times.shape[1]
    middle = (size - 1) // 2, size // 2
    low, high = np.partition(times, middle, axis=1)[:, middle].T[:, :, None]
    # The median of the other ranks; if their number is even, the median of all.
    excess = times - np.where(times <= low, high, low)
    excess[:phases] = np.minimum(excess[:phases], excess[phases + 1 : -2])
    chosen = [*range(phases), -1]
    medians = (low + high) / 2
    scale = np.maximum(medians[chosen], _SHARES * np.maximum(medians[-2], _MIN_STEP_SECONDS))
    values: Values = np.clip(excess[chosen] / scale, -1.0, 1.0)
    return values
