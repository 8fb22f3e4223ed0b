"""A gradient norm far above its baseline, and the limit above which an update is out of all proportion.

Gradients rise before the loss does. A high norm alone is only recorded: clipping and the optimizer's second moment keep
most such updates small.
"""

from __future__ import annotations

import math
from typing import Any

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Flag, Kind, Severity, Signal
from holdfast.core.detectors.log_spike import LogSpike

_DECAY = 0.9997


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
        if norm is not None and math.isfinite(norm) and norm > 0 and not signal.flags and not signal.overflow:
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
        self._largest, self._count, self._clip = state.get("largest", 0.0), state.get("count", 0), state.get("clip")
