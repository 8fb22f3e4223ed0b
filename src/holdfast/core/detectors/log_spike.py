"""A positive quantity far above its own recent course. It is followed in its logarithm, whose noise is even."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from holdfast.core.base.types import Finding, Flag, Severity, Signal
from holdfast.core.detectors.baseline import Course

_REBASELINE = 24
_ACCEPT_AFTER = 8
_GROSS_RATIO = 100.0
_GROSS_RISE = math.log(_GROSS_RATIO)
_LOSS_HIGH, _GRAD_HIGH = int(Flag.LOSS_HIGH), int(Flag.GRAD_HIGH)
_ALONE = 2


class LogSpike:
    """`z` deviations of the logarithm and `ratio` times the course: both. However wide its noise, a hundred times is out.

    `_ACCEPT_AFTER` high values in a row under a loss on its course are a new level, not a spike: it is accepted, on
    record, rather than vetoing every step from there on. While it learns a new course, only a gross rise counts.
    """

    name: str
    field: str
    kind: str
    what: str
    severity: Severity
    with_loss, stretch = True, 16
    vetoes: str | None
    """the limit it sets for the gate, if any"""

    def __init__(self, warmup: int, z: float, ratio: float) -> None:
        self._warmup, self._z, self._ratio = warmup, z, math.log(ratio)
        self._course = Course(warmup, falling=False)
        self._run = 0
        self._onset = 0
        self._peak = 0.0
        self._gross: float | None = None

    def limits(self) -> dict[str, float]:
        if self.vetoes is None:
            return {}
        limit = self._limit()
        return {} if limit is None else {self.vetoes: limit}

    def _limit(self) -> float | None:
        """The value above which the next one is a spike; None while there is nothing to compare with."""
        if self._course.ready:
            return _exp(self._course.expected() + self._rise())
        return self._gross

    def _rise(self) -> float:
        return max(min(self._course.reach(self._z), _GROSS_RISE), self._ratio)

    def observe(self, signal: Signal) -> Finding | None:
        value: float | None = getattr(signal, self.field)
        if value is None or not math.isfinite(value) or value <= 0 or signal.overflow:
            return None
        if not math.isfinite(signal.loss):
            return None
        known = self._gross is not None or self._course.ready
        limit = signal.grad_limit if self.vetoes is not None else None
        if limit is not None:
            high = bool(signal.flags & _GRAD_HIGH)
        else:
            own = self._limit()
            limit = math.inf if own is None else own
            high = value > limit
        if not high or not known:
            if 0 < self._run <= _ALONE and self._course.ready:
                self._course.outlier(self._peak)
            self._run = 0
            if signal.flags == 0:
                self._course.update(math.log(value))
            return None
        if self._run == 0:
            self._onset, self._peak = signal.step, 0.0
        if self._course.ready:
            self._peak = max(self._peak, self._course.z(math.log(value)))
        self._run += 1
        if self._run >= _ACCEPT_AFTER and not signal.flags & _LOSS_HIGH:
            return self._accept(signal, value, limit)
        message = f"{self.what} {value:.6g} is far above its recent course"
        return self._finding(signal, value, limit, message, new=self._run == 1)

    def calm(self, values: Sequence[float], steps: Sequence[float]) -> int:
        """How many of these values, in a row from here, are certain to be found nothing wrong with; they are taken in."""
        if self._run or not self._course.ready or not values:
            return 0
        some = values[: self._course.room()]
        ends = min(self._course.expected(1), self._course.expected(len(some)))
        if not (min(some) > 0.0 and max(some) <= _exp(ends + self._rise())):
            return 0
        self._course.extend([math.log(v) for v in some])
        return len(some)

    def _accept(self, signal: Signal, value: float, limit: float) -> Finding:
        message = f"{self._run} times {self.what} high under a normal loss: taken as the new level"
        finding = self._finding(signal, value, limit, message)
        self.rebaseline()
        self._gross = _exp(math.log(value) + _GROSS_RISE)
        return finding

    def _finding(self, signal: Signal, value: float, limit: float, message: str, new: bool = False) -> Finding:
        return Finding(
            kind=self.kind,
            severity=self.severity,
            step=signal.step,
            onset=self._onset,
            detector=self.name,
            message=message,
            evidence={
                self.field: value,
                "expected": _exp(self._course.expected()),
                "limit": limit,
                "in_a_row": self._run,
                "loss": signal.loss,
            },
            new=new,
        )

    def rebaseline(self) -> None:
        if self._course.ready:
            self._gross = _exp(self._course.expected() + max(2.0 * self._rise(), _GROSS_RISE))
        # Before it has learned anything, it learns for as long as it was to.
        self._course.restart(None if self._gross is None else min(_REBASELINE, self._warmup))
        self._run = 0

    def state_dict(self) -> dict[str, Any]:
        own = {"run": self._run, "onset": self._onset, "peak": self._peak, "gross": self._gross}
        return {"course": self._course.state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._course.load_state_dict(state["course"])
        self._run, self._onset = state["run"], state["onset"]
        self._peak, self._gross = state["peak"], state["gross"]


def _exp(value: float) -> float:
    return math.exp(min(700.0, value))
