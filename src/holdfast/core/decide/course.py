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
_LR_JUMP = 1.5
_LR_JUMP_STEPS = 16
_DESCENDED = 0.75
"""a loss that fell below this share of its untrained level is a descent"""


class CourseStep(NamedTuple):
    """One committed step."""

    step: int
    loss: float
    grad_norm: float | None
    lr: float | None


class LrJump(NamedTuple):
    """A jump of the learning rate on record."""

    step: int
    before: float
    after: float


class Course:
    """Holds the last committed steps of one kind of loss, and the level it began at. A rollback restores it."""

    def __init__(self) -> None:
        self.steps: deque[CourseStep] = deque(maxlen=_REMEMBERED)
        self._first: list[float] = []
        self.is_signed = False
        """whether a loss was below zero"""

    def add(self, signal: Signal) -> None:
        """Add a committed step."""
        if len(self._first) < _FIRST_LOSSES:
            self._first.append(signal.loss)
        if signal.loss < 0:
            self.is_signed = True
        self.steps.append(CourseStep(signal.step, signal.loss, signal.grad_norm, signal.lr))

    @property
    def untrained(self) -> float | None:
        """Return the level of the first losses, or None if there are too few."""
        return median(self._first) if len(self._first) == _FIRST_LOSSES else None

    def losses(self, first: int = 0, last: float = math.inf) -> list[float]:
        """Return the losses of steps `first` to `last`."""
        return [s.loss for s in self.steps if first <= s.step <= last]

    def recent(self, count: int, since: int = 0) -> float | None:
        """Return the median of the last `count` losses from step `since` on; None if there are fewer."""
        losses = self.losses(since)[-count:]
        return median(losses) if len(losses) == count else None

    def reference(self, onset: int) -> tuple[float, float] | None:
        """Return the level before `onset`, and the loss above which the course is off; None if too little is on record."""
        before = self.losses(last=onset - 1)[-_BEFORE:]
        if len(before) < _FIRST_LOSSES:
            return None
        level = median(before)
        spread = 1.4826 * median([abs(loss - level) for loss in before])
        return level, level + max(_OFF_DEVIATIONS * spread, _OFF_SHARE * abs(level))

    def is_descent(self, level: float) -> bool:
        """Return whether the loss had fallen well below its untrained level when it was at `level`."""
        untrained = self.untrained
        return untrained is not None and not self.is_signed and level < _DESCENDED * untrained

    def lr_jump(self, onset: int) -> LrJump | None:
        """Return the last jump of the learning rate up to `onset`, if there was one shortly before."""
        rates = [(s.step, s.lr) for s in self.steps if s.lr and onset - _LR_JUMP_STEPS <= s.step <= onset + 1]
        for (_, before), (step, after) in reversed(list(pairwise(rates))):
            if after > _LR_JUMP * before:
                return LrJump(step, before, after)
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"steps": [list(s) for s in self.steps], "first": list(self._first), "signed": self.is_signed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = deque((CourseStep(*s) for s in state["steps"]), maxlen=_REMEMBERED)
        self._first, self.is_signed = list(state["first"]), state["signed"]


def is_falling(losses: Sequence[float], count: int) -> bool:
    """Return whether the last `count` losses are clearly below the `count` before them."""
    if len(losses) < 2 * count:
        return True
    return median(losses[-count:]) < 0.95 * median(losses[-2 * count : -count])
