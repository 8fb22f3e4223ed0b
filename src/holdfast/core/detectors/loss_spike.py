"""A loss far above its own recent course: one step (skip it), or several of the last few (the state is suspect).

When the excursion ends it is said how: recovered, or persistent, and then the new level is the course from there on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Flag, Kind, Severity, Signal
from holdfast.core.detectors.baseline import LARGEST, Course

_REBASELINE = 24
_GROSS_Z, _GROSS_RATIO = 50.0, 5.0
_LOG_SHARE = 0.6
_LOG_MOST = math.log(5.0)
"""however wide multiplicative noise is, five times its course is out"""
_PERSISTS = 100
_ALONE = 2
# The score of an excursion, for a limit of 6 deviations: each loss adds what it has over the calm, at most _MOST of it,
# so that it takes three to reach _ENOUGH; a loss on its course takes the calm away.
_UNIT = 6.0
_CALM, _MOST, _ENOUGH, _FULL = 2.0, 3.7, 7.5, 15.0
_OPEN = 2.0
_KIN_WIDENS = 13.0
_JUMP, _JUMP_MOST = 4.0, 2.5
# Losses as far under the course as over it are a noise that has grown wide, and no spike.
_UNDER, _UNDER_KEPT, _UNDER_MOST = 2.4, 0.985, 6.0
_LOSS_HIGH = int(Flag.LOSS_HIGH)


class LossSpike:
    """Two alarms with a threshold each.

    Skip: the loss is over `loss_z` deviations above its course, and by at least `loss_rise`. Roll back: a running score
    of the deviations (a CUSUM), in which one loss counts for at most a third, says that the losses are out together; said
    once per excursion. The more neighbouring losses are alike, the more it takes. While it learns a new course after an
    expected shift, only a gross rise over the old course counts. A loss of exactly zero (a hinge that no sample
    violates) is never high and says nothing about the course.
    """

    name = "loss_spike"
    field, with_loss, stretch = "loss", True, 16

    def __init__(self, config: DetectSection) -> None:
        self._config = config
        self._course = Course(config.warmup_steps)
        # Where noise is multiplicative (a loss near zero), only its logarithm has an even scale: both must agree.
        self._log = Course(config.warmup_steps)
        self._positive = True
        # The highest the calm can be; where a skip takes more than that, one limit tells that nothing is found.
        most = (_CALM + _KIN_WIDENS * 0.65**2) * config.loss_z_rollback / _UNIT
        self._skips_above_calm = config.loss_z >= most and config.loss_rise >= config.loss_rise_rollback
        self._began: float | None = None
        """about where the loss began: a rise that is nothing against it is nothing"""
        self._score = 0.0
        self._onset = 0
        """where the score left zero"""
        self._before = 0.0
        self._under = 0.0
        """how far under the course losses have lately been, in deviations"""
        self._open = False
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
        limit = expected + max(course.reach(z), self._least(share, expected))
        if self._positive and log.ready:
            rise = min(_LOG_MOST, _LOG_SHARE * log.reach(z))
            limit = max(limit, math.exp(min(700.0, log.expected(ahead) + rise)))
        return limit

    def _least(self, share: float, expected: float) -> float:
        """The smallest rise that counts."""
        return max(share * abs(expected), self._config.loss_rise_initial * abs(self._began or 0.0))

    def _deviations(self, loss: float, ahead: int = 1) -> float:
        """How far out a loss is, in deviations such that `loss_z_rollback` of them are `_UNIT`."""
        course, log = self._course, self._log
        expected = course.expected(ahead)
        rise = loss - expected
        if loss == 0.0 or rise < self._least(self._config.loss_rise_rollback, expected):
            return 0.0
        z = rise / course.reach(1.0)
        if self._positive and log.ready and loss > 0.0:
            unit = min(_LOG_MOST / _UNIT, _LOG_SHARE * log.reach(1.0))
            z = min(z, (math.log(loss) - log.expected(ahead)) / unit)
        return z / max(1.0, self._under / _UNDER) * _UNIT / self._config.loss_z_rollback

    def _over(self, far: float) -> float:
        """What a loss adds to the score. Chance that lasts also comes slowly: a jump from the loss before counts extra."""
        kin, before, calm = self._course.kinship(), self._before, self._calm()
        if far == 0.0 and before == 0.0:  # what the lines below come to
            return -calm
        self._before = far if far > calm else 0.0
        jump = (far - kin * before) / math.sqrt(1.0 - 0.9 * kin * kin)
        return far - calm + min(_JUMP_MOST, max(0.0, 0.6 * (jump - _JUMP)))

    def _calm(self) -> float:
        """Deviations that are taken for chance: more, where neighbouring losses are alike and chance lasts."""
        return _CALM + _KIN_WIDENS * max(0.0, self._course.kinship() - 0.35) ** 2

    def _nothing(self) -> float:
        """Deviations up to which a loss adds nothing to a score of zero, the extra for a jump included."""
        kin, calm = self._course.kinship(), self._calm()
        unit = math.sqrt(1.0 - 0.9 * kin * kin)
        quiet = calm if calm <= _JUMP * unit else (calm + 0.6 * _JUMP) / (1.0 + 0.6 / unit)
        return quiet * (1.0 - 1e-9)

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
        loss, flags, course = signal.loss, signal.flags, self._course
        if not math.isfinite(loss) or signal.overflow:
            return None
        if self._gross is None and not course.ready:
            self._learn(signal)
            return None
        limit, high = signal.loss_limit, bool(flags & _LOSS_HIGH)
        if limit is None:
            limit = self.limits()["loss"]
            high = high or loss > limit
        if not course.ready:
            return self._while_learning(signal, high, limit)
        self._under *= _UNDER_KEPT
        if loss != 0.0 and not flags:
            self._under = max(self._under, min(_UNDER_MOST, -course.ahead(loss, 1)))
        over = self._over(self._deviations(loss)) if not high else _MOST
        if self._score == 0.0:
            self._onset = signal.step
        self._score = min(_FULL, max(0.0, self._score + min(over, _MOST)))
        if high or self._score > _OPEN:
            self._open = True
            if over > 0:
                return self._excursion(signal, high, limit)
        self._learn(signal)
        return self._returned(signal) if self._open and self._score == 0.0 else None

    def calm(self, losses: Sequence[float], steps: Sequence[float]) -> int:
        """How many of these losses, in a row from here, are certain to be found nothing wrong with; they are taken in.

        For reading a log: the same course, limits and score as `observe`, a block at a time. 0 where it must look closer.
        """
        course, config = self._course, self._config
        if self._open or not course.ready or not losses:
            return 0
        count = min(len(losses), course.room(), self._log.room() if self._positive else len(losses))
        some = losses[:count]
        limit = self._above(self._nothing() * config.loss_z_rollback / _UNIT, config.loss_rise_rollback, count)
        if not self._skips_above_calm:
            limit = min(limit, self._above(config.loss_z, config.loss_rise, count))
        lowest = min(some)
        if (
            not -LARGEST < lowest <= max(some) < LARGEST
            or (self._positive and not lowest > 0.0)
            or (lowest <= 0.0 and 0.0 in some)
        ):
            return 0
        if self._score > 0.0 or max(some) > limit:
            count = self._quiet(some, steps, limit)
            some = some[:count]
            if not count:
                return 0
        else:
            self._before, self._under = 0.0, course.lowest(some, self._under, _UNDER_KEPT, _UNDER_MOST)
        course.extend(some)
        if self._positive:
            self._log.extend([math.log(v) for v in some])
        return count

    def _quiet(self, losses: Sequence[float], steps: Sequence[float], limit: float) -> int:
        """How many of these leave the score too low to open an excursion; the score goes along."""
        high = self._above(self._config.loss_z, self._config.loss_rise, len(losses))
        for i, loss in enumerate(losses):
            far = self._course.ahead(loss, i + 1)
            under = max(self._under * _UNDER_KEPT, min(_UNDER_MOST, -far))
            if self._score == 0.0 and loss <= limit:
                self._before, self._under = 0.0, under
                continue
            kept = self._before, self._under
            self._under = under
            over = self._over(self._deviations(loss, i + 1))
            score = min(_FULL, max(0.0, self._score + min(over, _MOST)))
            if loss > high or score > _OPEN:
                self._before, self._under = kept
                return i
            if self._score == 0.0:
                self._onset = int(steps[i])
            self._score = score
        return len(losses)

    def _excursion(self, signal: Signal, high: bool, limit: float) -> Finding | None:
        self._out += 1
        if self._out == 1 or signal.loss > self._peak[1]:
            self._peak = (self._z(signal.loss), signal.loss)
        if self._out >= _PERSISTS and not signal.flags:
            return self._persists(signal, limit)
        if not self._latched and self._score > _ENOUGH:
            self._latched = True
            return self._finding(signal, Severity.ROLLBACK, self._onset, limit, "the losses are together")
        if high:
            return self._finding(signal, Severity.SKIP, self._onset, limit, "the loss is")
        return None

    def _z(self, loss: float) -> float:
        """Deviations above the course, by the course that makes less of it."""
        z = self._course.z(loss)
        return min(z, self._log.z(math.log(loss))) if self._positive and self._log.ready and loss > 0 else z

    def _returned(self, signal: Signal) -> Finding | None:
        onset, out, (z, peak) = self._onset, self._out, self._peak
        said, latched = self._said, self._latched
        self._forget()
        if 0 < out <= _ALONE:
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
        onset, out, peak = self._onset, self._out, self._peak[1]
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
                "score": self._score,
                "enough": _ENOUGH,
                "grad_norm": signal.grad_norm,
            },
            new=new,
        )

    def _forget(self) -> None:
        self._score, self._out, self._open, self._latched, self._said = 0.0, 0, False, False, False

    def rebaseline(self) -> None:
        if self._course.ready:
            expected = self._course.expected()
            self._gross = expected + max(_GROSS_Z * self._course.scale, _GROSS_RATIO * abs(expected))
        # Before it has learned anything, it learns for as long as it was to.
        start = None if self._gross is None else min(_REBASELINE, self._config.warmup_steps)
        self._course.restart(start)
        self._log.restart(start)
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        return {
            "course": self._course.state_dict(),
            "log": self._log.state_dict(),
            "positive": self._positive,
            "began": self._began,
            "score": self._score,
            "under": self._under,
            "before": self._before,
            "onset": self._onset,
            "open": self._open,
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
        self._score, self._under, self._open = state["score"], state["under"], state["open"]
        self._before = state["before"]
        self._onset, self._out, self._peak = state["onset"], state["out"], tuple(state["peak"])
        self._latched, self._said, self._gross = state["latched"], state["said"], state["gross"]
