"""The recent course of a loss: the values that experiments are judged by."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from holdfast.core.base.types import Signal

_REMEMBERED = 160
_FIRST_LOSSES = 8
_BEFORE = 32
_OFF_DEVIATIONS, _OFF_SHARE = 4.0, 0.015
_SMALLEST_LEAP = 0.1
_LR_JUMP = 1.5
_LR_JUMP_STEPS = 16
_DESCENDED = 0.8
"""a loss that fell below this share of its untrained level has descended"""
_WANDERS = 0.15
"""a descent never rises by this share of its untrained level and comes back by itself"""
BLOCK = 32
_RESIDUAL_WINDOW = 15


class RecordedLrJump(NamedTuple):
    """A jump of the learning rate on record."""

    step: int
    before: float
    after: float


class Course:
    """Holds the last committed steps of one kind of loss, and the level it began at. A rollback restores it."""

    def __init__(self) -> None:
        self.signals: deque[Signal] = deque(maxlen=_REMEMBERED)
        """append each committed step, count it, and call `close_block` after every `BLOCK` of them"""
        self.count = 0
        self._first: list[float] = []
        self.is_signed = False
        """whether a loss was below zero"""
        self._best = math.inf
        self._rises: list[tuple[int, float]] = []
        """step and height of the largest rises above the best level so far, of medians of blocks, each above the last"""

    def close_block(self) -> None:
        """Take in the last `BLOCK` steps."""
        block = [signal.loss for signal in self.signals][-BLOCK:]
        if not self._first:
            self._first = block[:_FIRST_LOSSES]
        self.is_signed = self.is_signed or min(block) < 0
        middle = median(block)
        self._best = min(self._best, middle)
        if not self._rises or middle - self._best > self._rises[-1][1]:
            self._rises = [*self._rises[-_FIRST_LOSSES:], (self.signals[-1].step, middle - self._best)]

    @property
    def untrained(self) -> float | None:
        """Return the level of the first losses, or None if there are too few."""
        return median(self._first) if self._first else None

    @property
    def best(self) -> float:
        """Return the lowest median of a block of steps."""
        return self._best

    def losses(self, first: int = 0, last: float = math.inf) -> list[float]:
        """Return the losses of steps `first` to `last`."""
        return [s.loss for s in self.signals if first <= s.step <= last]

    def recent(self, count: int, since: int = 0) -> float | None:
        """Return the median of the last `count` losses from step `since` on; None if there are fewer."""
        losses = self.losses(since)[-count:]
        return median(losses) if len(losses) == count else None

    def reference(self, onset: int) -> tuple[float, float] | None:
        """Return the level before `onset`, and the loss above which the course is off; None if too little is on record."""
        past = self.losses(last=onset - 1)
        before = past[-_BEFORE:]
        if len(before) < _FIRST_LOSSES:
            return None
        level = median(before)
        spread = 1.4826 * median([abs(loss - level) for loss in before])
        return level, level + max(_OFF_DEVIATIONS * spread, _OFF_SHARE * abs(level), _second_largest_residual(past))

    def is_leap(self, loss: float) -> bool:
        """Return whether a loss is as far above all recent ones as these are apart."""
        if len(self.signals) < _BEFORE or loss - self.signals[-1].loss <= _SMALLEST_LEAP * abs(loss):
            return False
        recent = self.losses()[-_BEFORE:]
        return loss > 2 * max(recent) - min(recent)

    def batches_at_fault(self, onset: int) -> list[Signal]:
        """Return the steps of an excursion that began and ended from one batch to the next: their data was the cause."""
        reference = self.reference(onset)
        if reference is None:
            return []
        level, limit = reference
        off = [s for s in self.signals if s.step >= onset and s.loss > limit]
        if not off:
            return []
        height = median([s.loss for s in off]) - level
        after = next((s.loss for s in self.signals if s.step > off[-1].step), math.inf)
        is_solid = len(off) >= 0.8 * (off[-1].step - off[0].step + 1)
        is_sharp = off[0].loss >= level + 0.5 * height and after <= level + 0.25 * height
        return off if is_solid and is_sharp else []

    def is_descent(self, level: float, onset: int) -> bool:
        """Return whether the loss was at `level` before `onset` by a descent: far below untrained, and never wandering."""
        untrained = self.untrained
        if untrained is None or self.is_signed or not level < _DESCENDED * untrained:
            return False
        rises = [height for step, height in self._rises if step < onset]
        return not rises or rises[-1] < _WANDERS * untrained

    def lr_jump(self, onset: int) -> RecordedLrJump | None:
        """Return the last jump of the learning rate up to `onset`, if there was one shortly before."""
        rates = [(s.step, s.lr) for s in self.signals if s.lr and onset - _LR_JUMP_STEPS <= s.step <= onset + 1]
        for (_, before), (step, after) in reversed(list(pairwise(rates))):
            if after > _LR_JUMP * before:
                return RecordedLrJump(step, before, after)
        return None

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": [[s.step, s.loss, s.lr] for s in self.signals],
            "count": self.count,
            "first": list(self._first),
            "signed": self.is_signed,
            "best": self._best if math.isfinite(self._best) else None,
            "rises": [list(rise) for rise in self._rises],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        signals = (Signal(step=step, loss=loss, lr=lr) for step, loss, lr in state["steps"])
        self.signals = deque(signals, maxlen=_REMEMBERED)
        self.count = state["count"]
        self._first, self.is_signed = list(state["first"]), state["signed"]
        self._best = math.inf if state["best"] is None else state["best"]
        self._rises = [(int(step), float(height)) for step, height in state["rises"]]


def _second_largest_residual(losses: Sequence[float]) -> float:
    """Return how far above its neighbours a loss has been, the farthest one aside: batches of another kind are normal."""
    residuals = [0.0, 0.0]
    for n in range(_RESIDUAL_WINDOW, len(losses)):
        residuals.append(losses[n] - median(losses[n - _RESIDUAL_WINDOW : n]))
    return sorted(residuals)[-2]


def is_falling(losses: Sequence[float], count: int) -> bool:
    """Return whether the last `count` losses are clearly below the `count` before them."""
    if len(losses) < 2 * count:
        return True
    return median(losses[-count:]) < 0.95 * median(losses[-2 * count : -count])
