"""A loss far above its own recent course: one step (skip it), or several of the last few (the state is suspect)."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from holdfast.core.config import Detect
from holdfast.core.detectors.baseline import Baseline
from holdfast.core.types import Finding, Flag, Kind, Severity, Signal

_REBASELINE = 24
_WINDOW, _ENOUGH = 5, 3
_GROSS_Z, _GROSS_RATIO = 50.0, 5.0
_LOG_SHARE = 0.6


class LossSpike:
    """Two alarms with a threshold each.

    Skip: the loss is over `loss_z` deviations above its course, and by at least `loss_rise`. Roll back: `_ENOUGH` of
    the last `_WINDOW` losses are over `loss_z_rollback`; said once per excursion. While it learns a new course after
    an expected shift, only a gross rise over the old course counts.
    """

    name = "loss_spike"

    def __init__(self, config: Detect) -> None:
        self._config = config
        self._course = Baseline(config.warmup_steps)
        # Where noise is multiplicative (a loss near zero), only its logarithm has an even scale: both must agree.
        self._log = Baseline(config.warmup_steps)
        self._positive = True
        self._recent: deque[bool] = deque(maxlen=_WINDOW)
        self._onset: int | None = None
        self._latched = False
        self._said = False
        self._gross: float | None = None

    def limits(self) -> dict[str, float]:
        """The loss above which the next step is to be vetoed."""
        if self._course.ready:
            return {"loss": self._above(self._config.loss_z, self._config.loss_rise)}
        return {} if self._gross is None else {"loss": self._gross}

    def _above(self, z: float, share: float) -> float:
        expected, z = self._course.expected(), z * self._course.widen()
        limit = expected + max(z * self._course.scale, share * abs(expected), self._config.loss_rise_abs)
        if self._positive and self._log.ready:
            limit = max(limit, math.exp(min(700.0, self._log.expected() + _LOG_SHARE * z * self._log.scale)))
        return limit

    def _learn(self, signal: Signal) -> None:
        if signal.flags:  # vetoed, for whatever reason: its loss need not belong to the course
            return
        loss = signal.loss
        self._course.update(loss)
        self._positive = self._positive and loss > 0
        if self._positive:
            self._log.update(math.log(loss))

    def observe(self, signal: Signal) -> Finding | None:
        if not math.isfinite(signal.loss) or signal.overflow:
            return None
        limits = self.limits()
        if not limits:
            self._learn(signal)
            return None
        limit = signal.loss_limit if signal.loss_limit is not None else limits["loss"]
        high = bool(signal.flags & Flag.LOSS_HIGH) or (signal.loss_limit is None and signal.loss > limit)
        if not self._course.ready:
            return self._while_learning(signal, high, limit)
        out = high or signal.loss > self._above(self._config.loss_z_rollback, self._config.loss_rise_rollback)
        self._recent.append(out)
        if out and self._onset is None:
            self._onset = signal.step
        finding = self._judge(signal, high, limit) if out else None
        if not any(self._recent):
            self._onset, self._latched, self._said = None, False, False
        if not out:
            self._learn(signal)
        return finding

    def _judge(self, signal: Signal, high: bool, limit: float) -> Finding | None:
        onset = self._onset if self._onset is not None else signal.step
        if sum(self._recent) >= _ENOUGH and not self._latched:
            self._latched = True
            return self._finding(
                signal,
                Severity.ROLLBACK,
                onset,
                limit,
                f"{sum(self._recent)} of the last {len(self._recent)} losses are",
            )
        if high:
            return self._finding(signal, Severity.SKIP, onset, limit, "the loss is")
        return None

    def _while_learning(self, signal: Signal, high: bool, limit: float) -> Finding | None:
        if not high:
            self._learn(signal)
            self._said = False
            return None
        return self._finding(signal, Severity.SKIP, signal.step, limit, "after an expected shift the loss is")

    def _finding(self, signal: Signal, severity: Severity, onset: int, limit: float, what: str) -> Finding:
        course, new, self._said = self._course, not self._said, True
        z = course.z(signal.loss) if course.ready else None
        return Finding(
            kind=Kind.LOSS_SPIKE,
            severity=severity,
            step=signal.step,
            onset=onset,
            detector=self.name,
            message=f"{what} far above the recent course: {signal.loss:.6g} against {course.expected():.6g}",
            evidence={
                "loss": signal.loss,
                "expected": course.expected(),
                "deviation": course.scale,
                "z": z,
                "limit": limit,
                "high_in_window": sum(self._recent),
                "grad_norm": signal.grad_norm,
            },
            new=new,
        )

    def rebaseline(self) -> None:
        if self._course.ready:
            expected = self._course.expected()
            self._gross = expected + max(_GROSS_Z * self._course.scale, _GROSS_RATIO * abs(expected))
        # Before it has learned anything, it learns for as long as it was to.
        start = None if self._gross is None else min(_REBASELINE, self._config.warmup_steps)
        self._course.restart(start)
        self._log.restart(start)
        self._recent.clear()
        self._onset, self._latched, self._said = None, False, False

    def state_dict(self) -> dict[str, Any]:
        return {
            "course": self._course.state_dict(),
            "log": self._log.state_dict(),
            "positive": self._positive,
            "recent": list(self._recent),
            "onset": self._onset,
            "latched": self._latched,
            "said": self._said,
            "gross": self._gross,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._course.load_state_dict(state["course"])
        self._log.load_state_dict(state["log"])
        self._positive = state["positive"]
        self._recent = deque(state["recent"], maxlen=_WINDOW)
        self._onset, self._latched, self._said = state["onset"], state["latched"], state["said"]
        self._gross = state["gross"]
