"""A positive quantity far above its baseline, which is that of its logarithm: gradient norm and update size.

Gradients rise before the loss does. A high norm alone is only recorded: clipping and the optimizer's second moment keep
most such updates small. Adam divides the gradient by the root of its second moment; if that lags behind the gradient, the
update grows one to eight steps before the loss does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Flag, Kind, Severity, Signal
from holdfast.core.detectors.base import BuiltInDetector
from holdfast.core.detectors.baseline import Baseline

_REBASELINE = 24
_ACCEPTED_STEPS = 8
_GROSS_RATIO = 100.0
_GROSS_RISE = math.log(_GROSS_RATIO)
_LOSS_HIGH = int(Flag.LOSS_HIGH)
_DECAY = 0.9997
_IMPOSSIBLE_RISE = math.log(30.0)
_ORDINARY_UPDATE = 3.0
_CONFIRMED_STEPS = 8
_SINGLE_STEPS = 2


class LogSpike(BuiltInDetector):
    """Reports a value `z` deviations of the logarithm and `ratio` times above the baseline, or a hundred times above it.

    `_ACCEPTED_STEPS` high values in a row under a normal loss are a new level, not a spike: the level is accepted with a
    finding, rather than vetoing every later step. While a new baseline is learned, only a gross rise counts.
    """

    field: str
    kind: str
    what: str
    severity: Severity
    needs_loss, max_block = True, 16
    saved: ClassVar = {
        "course": "_baseline", "run": "_high_in_a_row", "onset": "_onset", "peak": "_peak", "gross": "_gross",
    }  # fmt: skip

    def __init__(self, warmup: int, z: float, ratio: float) -> None:
        self._warmup, self._z, self._ratio = warmup, z, math.log(ratio)
        self._baseline = Baseline(warmup, falling=False)
        self._high_in_a_row = 0
        self._onset = 0
        self._peak = 0.0
        self._gross: float | None = None

    def limits(self) -> dict[str, float]:
        return {}

    def _limit(self) -> float | None:
        """Return the value above which the next one is a spike; None before there is a baseline."""
        if self._baseline.ready:
            return math.exp(min(700.0, self._baseline.next_expected + self._rise()))
        return self._gross

    def _rise(self) -> float:
        return max(min(self._baseline.threshold_distance(self._z), _GROSS_RISE), self._ratio)

    def observe(self, signal: Signal) -> Finding | None:
        value: float | None = getattr(signal, self.field)
        if value is None or not math.isfinite(value) or value <= 0 or signal.overflow:
            return None
        if not math.isfinite(signal.loss):
            return None
        known = self._gross is not None or self._baseline.ready
        limit = self._limit()
        limit = math.inf if limit is None else limit
        high = value > limit
        if not high or not known:
            if 0 < self._high_in_a_row <= _SINGLE_STEPS and self._baseline.ready:
                self._baseline.add_outlier(self._peak)
            self._high_in_a_row = 0
            if signal.flags == 0:
                self._baseline.update(math.log(value))
            return None
        if self._high_in_a_row == 0:
            self._onset, self._peak = signal.step, 0.0
        if self._baseline.ready:
            self._peak = max(self._peak, self._baseline.z(math.log(value)))
        self._high_in_a_row += 1
        if self._high_in_a_row >= _ACCEPTED_STEPS and not signal.flags & _LOSS_HIGH:
            return self._accept_level(signal, value, limit)
        message = f"{self.what} {value:.6g} is far above its baseline"
        return self._finding(signal, value, limit, message, new=self._high_in_a_row == 1)

    def absorb_normal(self, values: Sequence[float], steps: Sequence[float]) -> int:
        """Take in the leading values that `observe` would find nothing wrong with, and return their number."""
        if self._high_in_a_row or not self._baseline.ready or not values:
            return 0
        block = values[: self._baseline.values_until_update()]
        lowest = min(self._baseline.expected(1), self._baseline.expected(len(block)))
        if not (min(block) > 0.0 and max(block) <= _exp(lowest + self._rise())):
            return 0
        self._baseline.extend([math.log(v) for v in block])
        return len(block)

    def _accept_level(self, signal: Signal, value: float, limit: float) -> Finding:
        message = f"{self._high_in_a_row} times {self.what} high under a normal loss: accepted as the new level"
        finding = self._finding(signal, value, limit, message)
        self.rebaseline()
        self._gross = _exp(math.log(value) + _GROSS_RISE)
        return finding

    def _finding(self, signal: Signal, value: float, limit: float, message: str, new: bool = False) -> Finding:
        evidence = {
            self.field: value,
            "expected": _exp(self._baseline.next_expected),
            "limit": limit,
            "in_a_row": self._high_in_a_row,
            "loss": signal.loss,
        }
        return self.report(signal, self.kind, self.severity, self._onset, message, evidence, new=new)

    def rebaseline(self) -> None:
        if self._baseline.ready:
            self._gross = _exp(self._baseline.next_expected + max(2.0 * self._rise(), _GROSS_RISE))
        # Before the first baseline is learned, learning takes as long as the first time.
        self._baseline.restart(None if self._gross is None else min(_REBASELINE, self._warmup))
        self._high_in_a_row = 0


class GradSpike(LogSpike):
    """Sets the limit for the gate: `grad_veto_ratio` times the largest norm, after clipping, of any recent step."""

    name = "grad_spike"
    field = "grad_norm"
    kind = Kind.GRAD_SPIKE
    what = "gradient norm"
    severity = Severity.SKIP

    def __init__(self, config: DetectSection) -> None:
        super().__init__(config.warmup_steps, config.grad_z, config.grad_ratio)
        self._veto_ratio = config.grad_veto_ratio
        self._largest, self._count = 0.0, 0
        self._clip: float | None = None

    def limits(self) -> dict[str, float]:
        limit = self._veto_ratio * self._largest
        # A clip below the limit keeps every update in proportion.
        if self._count < self._warmup or (self._clip is not None and self._clip <= limit):
            return {}
        return {"grad_norm": limit}

    def observe(self, signal: Signal) -> Finding | None:
        norm = signal.grad_norm
        if norm is None or not math.isfinite(norm) or norm <= 0 or signal.overflow or not math.isfinite(signal.loss):
            return None
        if not signal.flags:
            self._clip = signal.clip
            self._largest = max(_DECAY * self._largest, norm if self._clip is None else min(norm, self._clip))
            self._count += 1
        if signal.flags & Flag.GRAD_HIGH:
            message = f"gradient norm {norm:.6g}: an update out of all proportion"
            evidence = {"grad_norm": norm, "limit": signal.grad_limit, "loss": signal.loss}
            return self.report(signal, self.kind, self.severity, signal.step, message, evidence)
        return super().observe(signal)

    def rebaseline(self) -> None:
        super().rebaseline()
        self._largest, self._count = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "largest": self._largest, "count": self._count, "clip": self._clip}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._largest, self._count, self._clip = state["largest"], state["count"], state["clip"]


class UpdateSpike(LogSpike):
    """Reports an update that is far larger than the second moment predicts, and a second moment that no update made.

    The first is a note: only the spike itself, if it comes, has consequences. The gradient norm over the update size
    follows the root of the second moment, and rises in one step by no more than the gradient allows. If it rises far
    more and stays there, something else has changed the second moment.
    """

    name = "update_spike"
    field = "update_rms"
    kind = Kind.UPDATE_SPIKE
    what = "update size"
    severity = Severity.NOTE
    sets_limits = False

    def __init__(self, config: DetectSection) -> None:
        super().__init__(config.warmup_steps, config.update_z, config.update_ratio)
        self._last: tuple[float, float] | None = None
        """the update size, and the log of the gradient norm over it, of the last step"""
        self._before: float | None = None
        """that log before it rose"""
        self._rose_at = 0

    def observe(self, signal: Signal) -> Finding | None:
        size, norm = signal.update_rms, signal.grad_norm
        has_landed = not signal.flags and not signal.overflow and math.isfinite(signal.loss)
        if has_landed and size is not None and norm is not None and 0 < size < math.inf and 0 < norm < math.inf:
            finding = self._follow_second_moment(signal, size, math.log(norm) - math.log(size))
            if finding is not None:
                return finding
        return super().observe(signal)

    def absorb_normal(self, values: Sequence[float], steps: Sequence[float]) -> int:
        """Return 0: a block of update sizes lacks the gradient norms."""
        return 0

    def _follow_second_moment(self, signal: Signal, size: float, root: float) -> Finding | None:
        last, self._last = self._last, (size, root)
        if self._before is None:
            if last is not None and last[0] < _ORDINARY_UPDATE:
                gradient_rise = max(0.0, root + math.log(size) - last[1] - math.log(last[0]))
                if root - last[1] > _IMPOSSIBLE_RISE + gradient_rise:
                    self._before, self._rose_at = last[1], signal.step
            return None
        if root - self._before < _IMPOSSIBLE_RISE:
            self._before = None
            return None
        if signal.step < self._rose_at + _CONFIRMED_STEPS:
            return None
        ratio, self._before = math.exp(min(300.0, root - self._before)), None
        message = f"the optimizer's second moments are {ratio:.3g} squared times what the gradients make them"
        evidence = {"ratio": ratio, "update_rms": size, "grad_norm": signal.grad_norm}
        return self.report(signal, Kind.STATE_JUMP, Severity.ROLLBACK, self._rose_at, message, evidence)

    def rebaseline(self) -> None:
        super().rebaseline()
        self._last = self._before = None

    def state_dict(self) -> dict[str, Any]:
        moment = {"last": self._last, "before": self._before, "rose_at": self._rose_at}
        return {**super().state_dict(), "moment": moment}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        moment = state["moment"]
        self._last = None if moment["last"] is None else (moment["last"][0], moment["last"][1])
        self._before, self._rose_at = moment["before"], moment["rose_at"]


def _exp(value: float) -> float:
    return math.exp(min(700.0, value))
