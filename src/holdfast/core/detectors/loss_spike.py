"""A loss far above its own recent course: one step (skip it), or several of the last few (the state is suspect).

When the excursion ends it is said how: recovered, or persistent, and then the new level is the course from there on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from holdfast.core.config import Detect
from holdfast.core.detectors.course import Course
from holdfast.core.types import Finding, Flag, Kind, Severity, Signal

_REBASELINE = 24
_WINDOW, _ENOUGH = 5, 3
_GROSS_Z, _GROSS_RATIO = 50.0, 5.0
_LOG_SHARE = 0.6
_PERSISTS = 100
_ALONE = 2


class LossSpike:
    """Two alarms with a threshold each.

    Skip: the loss is over `loss_z` deviations above its course, and by at least `loss_rise`. Roll back: `_ENOUGH` of
    the last `_WINDOW` losses are over `loss_z_rollback`; said once per excursion. While it learns a new course after
    an expected shift, only a gross rise over the old course counts. A loss of exactly zero (a hinge that no sample
    violates) is never high and says nothing about the course.
    """

    name = "loss_spike"

    def __init__(self, config: Detect) -> None:
        self._config = config
        self._course = Course(config.warmup_steps)
        # Where noise is multiplicative (a loss near zero), only its logarithm has an even scale: both must agree.
        self._log = Course(config.warmup_steps)
        self._positive = True
        self._recent: deque[bool] = deque(maxlen=_WINDOW)
        self._began: float | None = None
        """about where the loss began: a rise that is nothing against it is nothing"""
        self._onset: int | None = None
        self._out = 0
        self._peak = (0.0, 0.0)
        self._latched = False
        self._said = False
        self._gross: float | None = None

    def limits(self) -> dict[str, float]:
        """The loss above which the next step is to be vetoed."""
        if self._course.ready:
            return {"loss": self._above(self._config.loss_z, self._config.loss_rise)}
        return {} if self._gross is None else {"loss": self._gross}

    def _above(self, z: float, share: float, ahead: int = 1) -> float:
        course, log = self._course, self._log
        expected = course.expected(ahead)
        least = self._config.loss_rise_abs * abs(self._began or 0.0)
        limit = expected + max(course.reach(z), share * abs(expected), least)
        if self._positive and log.ready:
            limit = max(limit, math.exp(min(700.0, log.expected(ahead) + _LOG_SHARE * log.reach(z))))
        return limit

    def _learn(self, signal: Signal) -> None:
        loss = signal.loss
        if signal.flags or loss == 0.0:  # vetoed, for whatever reason: its loss need not belong to the course
            return
        self._course.update(loss)
        self._positive = self._positive and loss > 0
        if self._positive:
            self._log.update(math.log(loss))
        if self._began is None and self._course.ready:
            self._began = self._course.level

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
        if not out:
            self._learn(signal)
            return self._returned(signal) if self._onset is not None and not any(self._recent) else None
        return self._excursion(signal, high, limit)

    def calm(self, losses: Sequence[float]) -> int:
        """How many of these losses, in a row from here, are certain to be found nothing wrong with; they are taken in.

        For reading a log: the same course and limits as `observe`, a block at a time. 0 where it must look closer.
        """
        if self._onset is not None or not self._course.ready or not losses:
            return 0
        count = min(len(losses), self._course.room(), self._log.room() if self._positive else len(losses))
        some = losses[:count]
        if max(some) > self._above(self._config.loss_z_rollback, self._config.loss_rise_rollback, ahead=count):
            return 0
        if self._positive and not min(some) > 0.0 or 0.0 in some:
            return 0
        self._recent.extend([False] * min(count, _WINDOW))
        self._course.extend(some)
        if self._positive:
            self._log.extend([math.log(v) for v in some])
        return count

    def _excursion(self, signal: Signal, high: bool, limit: float) -> Finding | None:
        if self._onset is None:
            self._onset, self._out, self._peak = signal.step, 0, (0.0, -math.inf)
        self._out += 1
        if signal.loss > self._peak[1]:
            self._peak = (self._z(signal.loss), signal.loss)
        if self._out >= _PERSISTS and not signal.flags:
            return self._persists(signal, limit)
        if sum(self._recent) >= _ENOUGH and not self._latched:
            self._latched = True
            what = f"{sum(self._recent)} of the last {len(self._recent)} losses are"
            return self._finding(signal, Severity.ROLLBACK, self._onset, limit, what)
        if high:
            return self._finding(signal, Severity.SKIP, self._onset, limit, "the loss is")
        return None

    def _z(self, loss: float) -> float:
        """Deviations above the course, by the course that makes less of it."""
        z = self._course.z(loss)
        return min(z, self._log.z(math.log(loss))) if self._positive and self._log.ready and loss > 0 else z

    def _returned(self, signal: Signal) -> Finding | None:
        onset, out, (z, peak) = self._onset or signal.step, self._out, self._peak
        said, latched = self._said, self._latched
        self._forget()
        if out <= _ALONE:
            self._course.outlier(z)
            self._log.outlier(z)
        if not (said or latched):
            return None
        message = (
            f"the loss is back on its course {signal.step - onset} steps after step {onset}; it had reached {peak:.6g}"
        )
        evidence = {"outcome": "recovered", "peak": peak, "steps_out": out, "loss": signal.loss}
        return self._note(signal, onset, message, evidence)

    def _persists(self, signal: Signal, limit: float) -> Finding:
        onset, out, peak = self._onset or signal.step, self._out, self._peak[1]
        expected = self._course.expected()
        self._accept(signal.loss)
        message = f"the loss has not come back in {out} steps since step {onset}: taken as the new level"
        evidence = {"outcome": "persistent", "peak": peak, "steps_out": out, "loss": signal.loss}
        return self._note(signal, onset, message, {**evidence, "expected": expected, "limit": limit})

    def _accept(self, loss: float) -> None:
        """Whatever the level is now is the course, and gross is what is gross against it."""
        self.rebaseline()
        self._gross = loss + _GROSS_RATIO * abs(loss)

    def _note(self, signal: Signal, onset: int, message: str, evidence: dict[str, Any]) -> Finding:
        return Finding(
            kind=Kind.LOSS_SPIKE,
            severity=Severity.NOTE,
            step=signal.step,
            onset=onset,
            detector=self.name,
            message=message,
            evidence=evidence,
            new=False,
        )

    def _while_learning(self, signal: Signal, high: bool, limit: float) -> Finding | None:
        if not high:
            self._learn(signal)
            self._said, self._out = False, 0
            return None
        self._out += 1
        if self._out >= _PERSISTS and not signal.flags:
            self._accept(signal.loss)
            return None
        return self._finding(signal, Severity.SKIP, signal.step, limit, "after an expected shift the loss is")

    def _finding(self, signal: Signal, severity: Severity, onset: int, limit: float, what: str) -> Finding:
        course, new, self._said = self._course, not self._said, True
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
                "tail": course.tail,
                "z": course.z(signal.loss) if course.ready else None,
                "limit": limit,
                "high_in_window": sum(self._recent),
                "grad_norm": signal.grad_norm,
            },
            new=new,
        )

    def _forget(self) -> None:
        self._onset, self._out, self._latched, self._said = None, 0, False, False

    def rebaseline(self) -> None:
        if self._course.ready:
            expected = self._course.expected()
            self._gross = expected + max(_GROSS_Z * self._course.scale, _GROSS_RATIO * abs(expected))
        # Before it has learned anything, it learns for as long as it was to.
        start = None if self._gross is None else min(_REBASELINE, self._config.warmup_steps)
        self._course.restart(start)
        self._log.restart(start)
        self._recent.clear()
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        return {
            "course": self._course.state_dict(),
            "log": self._log.state_dict(),
            "positive": self._positive,
            "began": self._began,
            "recent": list(self._recent),
            "onset": self._onset,
            "out": self._out,
            "peak": list(self._peak),
            "latched": self._latched,
            "said": self._said,
            "gross": self._gross,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._course.load_state_dict(state["course"])
        self._log.load_state_dict(state["log"])
        self._positive, self._began = state["positive"], state["began"]
        self._recent = deque(state["recent"], maxlen=_WINDOW)
        self._onset, self._out, self._peak = state["onset"], state["out"], tuple(state["peak"])
        self._latched, self._said, self._gross = state["latched"], state["said"], state["gross"]
