"""The curry-train watchdog: the loss is over 5 times the minimum of the last 1000 steps, for 100 steps in a row."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

from holdfast.core.base.types import Finding, Kind, Severity, Signal
from holdfast.core.detectors.base import LimitlessDetector

RATIO, SUSTAIN, HISTORY = 5.0, 100, 1000
_STEPS_BACK, _SKIP_BATCHES = 100, 200
_INITIAL_STEPS = 100


class CurryTrain(LimitlessDetector):
    """Applies the rule as published, or with its defects fixed.

    As written: every loss enters the window, a NaN makes each comparison false, and it fires at every step of a spike.
    Fixed: only finite losses enter; it fires once per excursion; it works after `judge_after` steps; and a loss back
    at its initial level counts too, because a collapse to uniform is less than 5 times any good loss.
    """

    name = "curry_train"
    per_group = True

    def __init__(
        self,
        fixed: bool = True,
        ratio: float = RATIO,
        sustain: int = SUSTAIN,
        history: int = HISTORY,
        judge_after: int = _INITIAL_STEPS,
    ) -> None:
        self._fixed, self._ratio, self._sustain, self._history = fixed, ratio, sustain, history
        self._judge_after = judge_after
        self._recent: deque[float] = deque(maxlen=history)
        self._lowest: deque[tuple[int, float]] = deque()
        """(number, loss): candidates for the minimum of the window, oldest first; gives the minimum in constant time"""
        self._count = 0
        self._initial_losses: list[float] = []
        self._initial_level: float | None = None
        self._start: int | None = None
        self._reported = False

    def observe(self, signal: Signal) -> Finding | None:
        return self._observe_fixed(signal) if self._fixed else self._observe_as_written(signal)

    def _observe_as_written(self, signal: Signal) -> Finding | None:
        self._recent.append(signal.loss)
        if len(self._recent) < self._history:
            return None
        lowest = min(self._recent)
        if not signal.loss > self._ratio * lowest:
            self._start = None
            return None
        # `or`, as published: a spike that starts at step 0 starts again at every step.
        self._start = self._start or signal.step
        return self._finding(signal, lowest) if signal.step - self._start >= self._sustain else None

    def _observe_fixed(self, signal: Signal) -> Finding | None:
        loss = signal.loss
        if not math.isfinite(loss) or signal.overflow or signal.flags:
            return None
        lowest = self._window_minimum(loss)
        if self._initial_level is None or lowest <= 0:
            return None
        high = loss > self._ratio * lowest or (loss > self._initial_level and self._initial_level > 1.5 * lowest)
        if not high:
            self.end_excursion()
            return None
        if self._start is None:
            self._start = signal.step
        if self._reported or signal.step - self._start < self._sustain:
            return None
        self._reported = True
        return self._finding(signal, lowest)

    def end_excursion(self) -> None:
        """Let a high loss that follows begin a new excursion."""
        self._start, self._reported = None, False

    def _window_minimum(self, loss: float) -> float:
        self._count += 1
        while self._lowest and self._lowest[-1][1] >= loss:
            self._lowest.pop()
        self._lowest.append((self._count, loss))
        if self._lowest[0][0] <= self._count - self._history:
            self._lowest.popleft()
        if self._initial_level is None:
            self._initial_losses.append(loss)
            if len(self._initial_losses) >= self._judge_after:
                first = max(1, min(_INITIAL_STEPS, self._judge_after) // 10)
                self._initial_level = median(self._initial_losses[:first])
                self._initial_losses = []
        return self._lowest[0][1]

    def _finding(self, signal: Signal, lowest: float) -> Finding:
        onset = signal.step if self._start is None else self._start
        ratio = signal.loss / lowest if lowest else math.inf
        return self.report(
            signal,
            Kind.LOSS_SPIKE,
            Severity.ROLLBACK,
            onset,
            f"the loss has been over {self._ratio:g} times its lowest {lowest:.6g} since step {onset}",
            {
                "loss": signal.loss,
                "lowest": lowest,
                "ratio": ratio if math.isfinite(ratio) else None,
                "rollback_to_step": max(0, onset - _STEPS_BACK),
                "skip_batches": _SKIP_BATCHES,
            },
        )

    def rebaseline(self) -> None:
        self._recent.clear()
        self._lowest.clear()
        self._initial_losses, self._initial_level, self._start, self._reported = [], None, None, False

    def state_dict(self) -> dict[str, Any]:
        return {
            "recent": list(self._recent),
            "lowest": [list(pair) for pair in self._lowest],
            "count": self._count,
            "first": list(self._initial_losses),
            "began": self._initial_level,
            "start": self._start,
            "said": self._reported,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._recent = deque(state["recent"], maxlen=self._history)
        self._lowest = deque((int(n), float(v)) for n, v in state["lowest"])
        self._count, self._initial_losses = state["count"], list(state["first"])
        self._initial_level, self._start, self._reported = state["began"], state["start"], state["said"]
