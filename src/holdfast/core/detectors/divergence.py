"""Silent divergence: the loss rises above its best level and stays there, at whatever pace.

The detector takes medians of blocks of steps, at three lengths. A length raises the alarm when several of its blocks in
a row are above its best level by more than blocks differ by chance. Medians ignore single outliers, and the spread
between blocks includes the correlation between steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Kind, Severity, Signal
from holdfast.core.detectors.base import LimitlessDetector, SavedFields
from holdfast.core.detectors.expected_shifts import LR_JUMP

_BLOCK = 16
_LENGTHS = ((1, 3), (4, 3), (16, 2))
"""blocks joined into one, and how many of those in a row raise the alarm"""
_ENOUGH_DIFFERENCES = 4
_SIXTH_LARGEST = 1.38 * math.sqrt(2.0)
"""one sixth of the differences between two normal values exceed this many deviations"""
_EARLY_STEPS = 1000
_RECOVERED_RISE_FACTOR = 1.5
_RECENT_MEDIANS = 15


class _BlockLength(SavedFields):
    """Holds the state of one block length: recent medians, the best level, and the number of blocks in a row above it."""

    saved: ClassVar = {
        "joined": "joined", "enough": "enough", "part": ("partial", list),
        "recent": ("recent", partial(deque, maxlen=_RECENT_MEDIANS)), "best": "best", "best_at": "best_at",
        "better": "better", "rise": "rise", "forgiven": "recovered_rise", "above": "above", "onset": "onset",
    }  # fmt: skip

    def __init__(self, joined: int, enough: int) -> None:
        self.joined, self.enough = joined, enough
        self.partial: list[float] = []
        self.recent: deque[float] = deque(maxlen=_RECENT_MEDIANS)
        self.best: float | None = None
        self.best_at = 0
        self.better = False
        """whether the last block set a new best level"""
        self.rise = 0.0
        self.recovered_rise = 0.0
        """the largest rise that ended in a new best level: the staircase of epochs, or a bump"""
        self.above = 0
        self.onset = 0

    def spread(self) -> float:
        """Return how far neighbouring medians differ by chance."""
        differences = sorted(abs(b - a) for a, b in pairwise(self.recent))
        enough = len(differences) >= _ENOUGH_DIFFERENCES
        return differences[-1 - len(differences) // 6] / _SIXTH_LARGEST if enough else math.inf

    def add_median(
        self, middle: float, signal: Signal, begin: int, z: float, rise: float
    ) -> tuple[float, float] | None:
        """Add the median of a block. Return the best level and the limit if enough blocks in a row are above it."""
        limit, self.better = math.inf, False
        if self.best is not None:
            self.rise = max(self.rise, middle - self.best)
            limit = self.best + max(rise * abs(self.best), _RECOVERED_RISE_FACTOR * self.recovered_rise)
            if middle > limit:
                limit = max(limit, self.best + z * self.spread())
        if middle > limit:
            assert self.best is not None
            if self.above == 0:
                self.onset = begin
            self.above += 1
            # Blocks that may be a divergence do not enter the spread.
            return (self.best, limit) if self.above >= self.enough else None
        self.above = 0
        self.recent.append(middle)
        smooth = median_of(list(self.recent)[-3:])
        if len(self.recent) >= 2 and (self.best is None or smooth < self.best):
            self.recovered_rise, self.rise = max(0.9 * self.recovered_rise, self.rise), 0.0
            self.best, self.best_at, self.better = smooth, signal.step, True
        return None

    def forget(self) -> None:
        self.recent.clear()
        self.partial.clear()
        self.best, self.rise, self.above = None, 0.0, 0


class Divergence(LimitlessDetector):
    """Asks for a rollback once, then waits for a new best level or an expected shift."""

    name = "divergence"
    per_group = True
    confidence = 0.9
    field, needs_loss, max_block = "loss", True, _BLOCK

    def __init__(self, config: DetectSection) -> None:
        self._config = config
        self._restart()

    def _restart(self) -> None:
        self._block: list[float] = []
        self._begin = 0
        self._count = 0
        self._negative = False
        self._reported = False
        self._lr_peaks = (0.0, 0.0)
        """the highest learning rate before the last fall, and overall"""
        self._lr_trough, self._lr, self._lr_rising = math.inf, 0.0, False
        """the lowest learning rate since its last peak; the last one; whether that was a rise"""
        self._lengths = [_BlockLength(*length) for length in _LENGTHS]

    def observe(self, signal: Signal) -> Finding | None:
        loss = signal.loss
        if not math.isfinite(loss) or loss == 0.0 or signal.overflow or signal.flags:
            return None
        if not self._block:
            self._begin = signal.step
        self._block.append(loss)
        if len(self._block) < _BLOCK:
            return None
        return self._close_block(signal)

    def absorb_normal(self, losses: Sequence[float], steps: Sequence[float]) -> int:
        """Take in the losses that only fill the block, and return their number; its last loss is for `observe`."""
        filling = losses[: _BLOCK - 1 - len(self._block)]
        if not filling or 0.0 in filling:
            return 0
        if not self._block:
            self._begin = int(steps[0])
        self._block.extend(filling)
        return len(filling)

    def _close_block(self, signal: Signal) -> Finding | None:
        block, self._block = self._block, []
        self._count += 1
        if signal.lr is not None and math.isfinite(signal.lr):
            self._track_lr(signal.lr)
        self._negative = self._negative or min(block) < 0
        middle = median_of(block)
        if self._count * _BLOCK <= self._config.warmup_steps:
            return None
        finding = None
        # Early on a loss may still rise before it falls (warm-up, a contrastive loss), so the limit is higher.
        rise = self._config.divergence_rise * max(1.0, _EARLY_STEPS / (self._count * _BLOCK))
        if self._lr_returns():
            for length in self._lengths:
                length.forget()
        for length in self._lengths:
            length.partial.append(middle)
            if len(length.partial) < length.joined:
                continue
            joined, length.partial = median_of(length.partial), []
            begin = self._begin - (length.joined - 1) * _BLOCK
            over = length.add_median(joined, signal, begin, self._config.divergence_z, rise)
            if over is not None and finding is None:
                finding = self._finding(signal, length, joined, *over)
        if any(length.better for length in self._lengths) and all(length.above == 0 for length in self._lengths):
            self._reported = False
        return finding

    def _track_lr(self, lr: float) -> None:
        before, highest = self._lr_peaks
        self._lr_peaks = (highest, highest) if lr < highest else (before, lr)
        self._lr_rising, self._lr = lr > self._lr, lr
        self._lr_trough = lr if lr >= 0.98 * self._lr_peaks[0] and not self._lr_rising else min(self._lr_trough, lr)

    def _lr_returns(self) -> bool:
        """Return whether the learning rate climbs back to an earlier level: in such a cycle the loss rises with it."""
        return self._lr_rising and LR_JUMP * self._lr_trough < self._lr <= 1.02 * self._lr_peaks[0]

    def _finding(self, signal: Signal, length: _BlockLength, level: float, best: float, limit: float) -> Finding | None:
        if self._reported:
            return None
        self._reported = True
        steps = length.joined * _BLOCK
        return self.report(
            signal,
            Kind.DIVERGENCE,
            # A loss below zero (a reward, a bound) may rise without harm.
            Severity.NOTE if self._negative else Severity.ROLLBACK,
            length.onset,
            f"the loss has risen from its best level {best:.6g} to {level:.6g} over {length.above * steps} steps",
            {
                "level": level,
                "best": best,
                "best_at": length.best_at,
                "limit": limit,
                "block_steps": steps,
                "blocks_above": length.above,
                "spread": length.spread(),
                "grad_norm": signal.grad_norm,
                "lr": signal.lr,
            },
        )

    def rebaseline(self) -> None:
        self._restart()

    def state_dict(self) -> dict[str, Any]:
        return {
            "block": list(self._block),
            "begin": self._begin,
            "count": self._count,
            "negative": self._negative,
            "peaks": list(self._lr_peaks),
            "lr": [self._lr_trough if math.isfinite(self._lr_trough) else None, self._lr, self._lr_rising],
            "said": self._reported,
            "scales": [length.state_dict() for length in self._lengths],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._block, self._begin, self._count = list(state["block"]), state["begin"], state["count"]
        self._negative, self._reported, self._lr_peaks = state["negative"], state["said"], tuple(state["peaks"])
        trough, self._lr, self._lr_rising = state["lr"]
        self._lr_trough = math.inf if trough is None else trough
        for length, saved in zip(self._lengths, state["scales"], strict=True):
            length.load_state_dict(saved)


def median_of(values: list[float]) -> float:
    """Return the median of a short list, faster than statistics.median."""
    ranked, half = sorted(values), len(values) // 2
    return ranked[half] if len(ranked) % 2 else 0.5 * (ranked[half - 1] + ranked[half])
