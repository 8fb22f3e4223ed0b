"""An update far larger than the optimizer's second moment predicts, and a second moment that cannot be what updates made it.

Adam divides the gradient by the root of its second moment. If that lags behind the gradient, the update grows one to
eight steps before the loss does. That finding is a note: only the spike itself, if it comes, has consequences.

The gradient norm over the update size follows the root of the second moment. It rises in one step by no more than the
gradient allows. If it rises far more, and stays there, the second moment was changed by something else.
"""

from __future__ import annotations

import math
from typing import Any

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Kind, Severity, Signal
from holdfast.core.detectors.log_spike import LogSpike

_IMPOSSIBLE_RISE = math.log(30.0)
_ORDINARY_UPDATE = 3.0
_CONFIRMED_STEPS = 8


class UpdateSpike(LogSpike):
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
        if size and norm and not signal.flags and not signal.overflow and math.isfinite(size) and math.isfinite(norm):
            finding = self._follow_second_moment(signal, size, math.log(norm) - math.log(size))
            if finding is not None:
                return finding
        return super().observe(signal)

    def _follow_second_moment(self, signal: Signal, size: float, root: float) -> Finding | None:
        last, self._last = self._last, (size, root)
        if self._before is None:
            if last is not None and last[0] < _ORDINARY_UPDATE and root - last[1] > _IMPOSSIBLE_RISE:
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
        moment = state.get("moment", {"last": None, "before": None, "rose_at": 0})
        self._last = None if moment["last"] is None else (moment["last"][0], moment["last"][1])
        self._before, self._rose_at = moment["before"], moment["rose_at"]
