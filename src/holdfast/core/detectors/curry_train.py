"""The curry-train watchdog: the loss over 5 times the minimum of the last 1000 steps, for 100 steps running."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

from holdfast.core.base.types import Finding, Kind, Severity, Signal
from holdfast.core.detectors.base import Unlimited

RATIO, SUSTAIN, HISTORY = 5.0, 100, 1000
_BACK, _SKIP_BATCHES = 100, 200
_FIRST = 100


class CurryTrain(Unlimited):
    """As written: every loss enters the window, a NaN makes each comparison false, and once it fires it fires on.

    Mended: only finite losses enter; it fires once per excursion; it is usable from the first `_FIRST` steps; and a loss
    that is back where it began counts too, because a collapse to uniform is less than 5 times any good loss.
    """

    name = "curry_train"

    def __init__(
        self, mended: bool = True, ratio: float = RATIO, sustain: int = SUSTAIN, history: int = HISTORY
    ) -> None:
        self._mended, self._ratio, self._sustain, self._history = mended, ratio, sustain, history
        self._recent: deque[float] = deque(maxlen=history)
        self._lowest: deque[tuple[int, float]] = deque()
        """candidates for the minimum of the window, oldest first: the minimum in constant time"""
        self._count = 0
        self._first: list[float] = []
        self._began: float | None = None
        self._start: int | None = None
        self._said = False

    def observe(self, signal: Signal) -> Finding | None:
        return self._as_mended(signal) if self._mended else self._as_written(signal)

    def _as_written(self, signal: Signal) -> Finding | None:
        self._recent.append(signal.loss)
        if len(self._recent) < self._history:
            return None
        lowest = min(self._recent)
        if not signal.loss > self._ratio * lowest:
            self._start = None
            return None
        # `or`, as it stands in the recipe: a spike that starts at step 0 starts anew at every step.
        self._start = self._start or signal.step
        return self._finding(signal, lowest) if signal.step - self._start >= self._sustain else None

    def _as_mended(self, signal: Signal) -> Finding | None:
        loss = signal.loss
        if not math.isfinite(loss) or signal.overflow or signal.flags:
            return None
        lowest = self._minimum(loss)
        if self._began is None or lowest <= 0:
            return None
        high = loss > self._ratio * lowest or (loss > self._began and self._began > 1.5 * lowest)
        if not high:
            self._start, self._said = None, False
            return None
        if self._start is None:
            self._start = signal.step
        if self._said or signal.step - self._start < self._sustain:
            return None
        self._said = True
        return self._finding(signal, lowest)

    def _minimum(self, loss: float) -> float:
        self._count += 1
        while self._lowest and self._lowest[-1][1] >= loss:
            self._lowest.pop()
        self._lowest.append((self._count, loss))
        if self._lowest[0][0] <= self._count - self._history:
            self._lowest.popleft()
        if self._began is None:
            self._first.append(loss)
            if len(self._first) >= _FIRST:
                self._began, self._first = median(self._first[: _FIRST // 10]), []
        return self._lowest[0][1]

    def _finding(self, signal: Signal, lowest: float) -> Finding:
        onset = signal.step if self._start is None else self._start
        return Finding(
            kind=Kind.LOSS_SPIKE,
            severity=Severity.ROLLBACK,
            step=signal.step,
            onset=onset,
            detector=self.name,
            message=f"the loss has been over {self._ratio:g} times its lowest {lowest:.6g} since step {onset}",
            evidence={
                "loss": signal.loss,
                "lowest": lowest,
                "ratio": _ratio(signal.loss, lowest),
                "rollback_to_step": max(0, onset - _BACK),
                "skip_batches": _SKIP_BATCHES,
            },
        )

    def rebaseline(self) -> None:
        self._recent.clear()
        self._lowest.clear()
        self._first, self._began, self._start, self._said = [], None, None, False

    def state_dict(self) -> dict[str, Any]:
        return {
            "recent": list(self._recent),
            "lowest": [list(pair) for pair in self._lowest],
            "count": self._count,
            "first": list(self._first),
            "began": self._began,
            "start": self._start,
            "said": self._said,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._recent = deque(state["recent"], maxlen=self._history)
        self._lowest = deque((int(n), float(v)) for n, v in state["lowest"])
        self._count, self._first = state["count"], list(state["first"])
        self._began, self._start, self._said = state["began"], state["start"], state["said"]


def _ratio(loss: float, lowest: float) -> float | None:
    ratio = loss / lowest if lowest else math.inf
    return ratio if math.isfinite(ratio) else None
