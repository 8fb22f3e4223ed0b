"""Silent divergence: the loss has left its best level for good, at whatever pace.

Medians of blocks of steps, at three lengths; a length alarms when several of its blocks in a row lie above the best
level it has had by more than blocks differ by chance. Medians do not see single outliers, and blocks know their own
noise, however correlated the steps are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Kind, Severity, Signal
from holdfast.core.detectors.base import Unlimited
from holdfast.core.detectors.expected_shifts import LR_JUMP

_BLOCK = 16
_LENGTHS = ((1, 3), (4, 3), (16, 2))
"""blocks joined into one, and how many such in a row are enough"""
_KNOWN = 4
_SIXTH = 1.38 * math.sqrt(2.0)
"""a sixth of the distances between two normal values is larger than this many deviations"""
_EARLY = 1000
_FORGIVEN = 1.5
_REMEMBERED = 15


class _Scale:
    """One length: its recent medians, the spread between neighbours, the best level, and how many in a row are above."""

    def __init__(self, joined: int, enough: int) -> None:
        self.joined, self.enough = joined, enough
        self.part: list[float] = []
        self.recent: deque[float] = deque(maxlen=_REMEMBERED)
        self.best: float | None = None
        self.best_at = 0
        self.better = False
        """whether the last block made a new best level"""
        self.rise = 0.0
        self.forgiven = 0.0
        """the largest rise so far that ended in a new best level: the staircase of epochs, a bump on the way"""
        self.above = 0
        self.onset = 0

    def spread(self) -> float:
        """How far neighbouring medians differ by chance."""
        apart = sorted(abs(b - a) for a, b in pairwise(self.recent))
        return apart[-1 - len(apart) // 6] / _SIXTH if len(apart) >= _KNOWN else math.inf

    def take(self, middle: float, signal: Signal, begin: int, z: float, rise: float) -> tuple[float, float] | None:
        """One more block; where enough of them are above it: the best level and the limit."""
        limit, self.better = math.inf, False
        if self.best is not None:
            self.rise = max(self.rise, middle - self.best)
            limit = self.best + max(rise * abs(self.best), _FORGIVEN * self.forgiven)
            if middle > limit:
                limit = max(limit, self.best + z * self.spread())
        if middle > limit:
            assert self.best is not None
            if self.above == 0:
                self.onset = begin
            self.above += 1
            # What may be a divergence is not learned from.
            return (self.best, limit) if self.above >= self.enough else None
        self.above = 0
        self.recent.append(middle)
        smooth = middle_of(list(self.recent)[-3:])
        if len(self.recent) >= 2 and (self.best is None or smooth < self.best):
            self.forgiven, self.rise = max(0.9 * self.forgiven, self.rise), 0.0
            self.best, self.best_at, self.better = smooth, signal.step, True
        return None

    def forget(self) -> None:
        self.recent.clear()
        self.part.clear()
        self.best, self.rise, self.above = None, 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "part": list(self.part), "recent": list(self.recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.part, self.recent = list(state["part"]), deque(state["recent"], maxlen=_REMEMBERED)


class Divergence(Unlimited):
    """Asks for a rollback, once; then it waits for a new best level, or a declared shift."""

    name = "divergence"
    field, with_loss, stretch = "loss", True, _BLOCK

    def __init__(self, config: DetectSection) -> None:
        self._config = config
        self._restart()

    def _restart(self) -> None:
        self._block: list[float] = []
        self._begin = 0
        self._count = 0
        self._negative = False
        self._said = False
        self._peaks = (0.0, 0.0)
        """the highest learning rate before the last fall, and of all"""
        self._trough, self._lr, self._rising = math.inf, 0.0, False
        """the lowest learning rate since it was last at its peak; the last one; whether it has risen since the one before"""
        self._scales = [_Scale(*length) for length in _LENGTHS]

    def observe(self, signal: Signal) -> Finding | None:
        loss = signal.loss
        if not math.isfinite(loss) or loss == 0.0 or signal.overflow or signal.flags:
            return None
        if not self._block:
            self._begin = signal.step
        self._block.append(loss)
        if len(self._block) < _BLOCK:
            return None
        return self._closed(signal)

    def calm(self, losses: Sequence[float], steps: Sequence[float]) -> int:
        """How many of these losses only fill the block; its last is for `observe`."""
        some = losses[: _BLOCK - 1 - len(self._block)]
        if not some or 0.0 in some:
            return 0
        if not self._block:
            self._begin = int(steps[0])
        self._block.extend(some)
        return len(some)

    def _closed(self, signal: Signal) -> Finding | None:
        block, self._block = self._block, []
        self._count += 1
        if signal.lr is not None and math.isfinite(signal.lr):
            self._follow(signal.lr)
        self._negative = self._negative or min(block) < 0
        middle = middle_of(block)
        if self._count * _BLOCK <= self._config.warmup_steps:
            return None
        found = None
        # Early on a loss may still rise before it falls (warm-up, a contrastive loss): it takes more to be sure.
        rise = self._config.divergence_rise * max(1.0, _EARLY / (self._count * _BLOCK))
        if self._expected():
            for scale in self._scales:
                scale.forget()
        for scale in self._scales:
            scale.part.append(middle)
            if len(scale.part) < scale.joined:
                continue
            joined, scale.part = middle_of(scale.part), []
            begin = self._begin - (scale.joined - 1) * _BLOCK
            over = scale.take(joined, signal, begin, self._config.divergence_z, rise)
            if over is not None and found is None:
                found = self._finding(signal, scale, joined, *over)
        if any(scale.better for scale in self._scales) and all(scale.above == 0 for scale in self._scales):
            self._said = False
        return found

    def _follow(self, lr: float) -> None:
        before, highest = self._peaks
        self._peaks = (highest, highest) if lr < highest else (before, lr)
        self._rising, self._lr = lr > self._lr, lr
        self._trough = lr if lr >= 0.98 * self._peaks[0] and not self._rising else min(self._trough, lr)

    def _expected(self) -> bool:
        """Whether the learning rate is on its way back to where it has been: a cycle, and the loss rises with it."""
        return self._rising and LR_JUMP * self._trough < self._lr <= 1.02 * self._peaks[0]

    def _finding(self, signal: Signal, scale: _Scale, level: float, best: float, limit: float) -> Finding | None:
        if self._said:
            return None
        self._said = True
        length = scale.joined * _BLOCK
        return Finding(
            kind=Kind.DIVERGENCE,
            # A loss that goes below zero (a reward, a bound) may rise and mean no harm.
            severity=Severity.NOTE if self._negative else Severity.ROLLBACK,
            step=signal.step,
            onset=scale.onset,
            detector=self.name,
            message=f"the loss has left its best level {best:.6g} for {level:.6g} over {scale.above * length} steps",
            evidence={
                "level": level,
                "best": best,
                "best_at": scale.best_at,
                "limit": limit,
                "block_steps": length,
                "blocks_above": scale.above,
                "spread": scale.spread(),
                "grad_norm": signal.grad_norm,
                "lr": signal.lr,
            },
            confidence=0.9,
        )

    def rebaseline(self) -> None:
        self._restart()

    def state_dict(self) -> dict[str, Any]:
        return {
            "block": list(self._block),
            "begin": self._begin,
            "count": self._count,
            "negative": self._negative,
            "peaks": list(self._peaks),
            "lr": [self._trough if math.isfinite(self._trough) else None, self._lr, self._rising],
            "said": self._said,
            "scales": [s.state_dict() for s in self._scales],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._block, self._begin, self._count = list(state["block"]), state["begin"], state["count"]
        self._negative, self._said, self._peaks = state["negative"], state["said"], tuple(state["peaks"])
        trough, self._lr, self._rising = state["lr"]
        self._trough = math.inf if trough is None else trough
        for scale, saved in zip(self._scales, state["scales"], strict=True):
            scale.load_state_dict(saved)


def middle_of(values: list[float]) -> float:
    """The median of a few."""
    ranked, half = sorted(values), len(values) // 2
    return ranked[half] if len(ranked) % 2 else 0.5 * (ranked[half - 1] + ranked[half])
