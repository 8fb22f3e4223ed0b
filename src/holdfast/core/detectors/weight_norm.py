"""A weight norm that changes by a factor within 200 steps: weight decay or LR is off. The finding is a note."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Kind, Severity, Signal
from holdfast.core.detectors.base import LimitlessDetector

_WINDOW_STEPS = 200


class WeightNorm(LimitlessDetector):
    """Compares each norm after `warmup_steps` with the oldest of the last `_WINDOW_STEPS` steps."""

    name = "weight_norm"
    field = "weight_norm"

    def __init__(self, config: DetectSection) -> None:
        self._ratio, self._warmup = config.weight_norm_ratio, config.warmup_steps
        self._recent: deque[tuple[int, float]] = deque(maxlen=_WINDOW_STEPS + 1)
        self._reported = False

    def observe(self, signal: Signal) -> Finding | None:
        norm = signal.weight_norm
        if norm is None or not math.isfinite(norm) or norm <= 0 or signal.flags or signal.step <= self._warmup:
            return None
        recent = self._recent
        recent.append((signal.step, norm))
        while recent[0][0] < signal.step - _WINDOW_STEPS:
            recent.popleft()
        since, before = recent[0]
        change = norm / before
        if max(norm, before) / min(norm, before) < self._ratio:
            self._reported = False
            return None
        if self._reported:
            return None
        self._reported = True
        verb = "grew" if change > 1 else "shrank"
        steps, ratio = signal.step - since, change if math.isfinite(change) else None
        message = f"the norm of the weights {verb} from {before:.6g} to {norm:.6g} in {steps} steps"
        evidence = {"weight_norm": norm, "before": before, "ratio": ratio, "steps": steps}
        return self.report(signal, Kind.WEIGHT_NORM, Severity.NOTE, since, message, evidence)

    def rebaseline(self) -> None:
        self._recent.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"recent": [list(r) for r in self._recent], "said": self._reported}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._recent = deque(((int(s), float(n)) for s, n in state["recent"]), maxlen=_WINDOW_STEPS + 1)
        self._reported = state["said"]
