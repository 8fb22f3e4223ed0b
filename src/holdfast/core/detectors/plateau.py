"""A loss that no longer falls. The finding is a note: a finished training looks the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Kind, Severity, Signal
from holdfast.core.detectors.base import LimitlessDetector
from holdfast.core.detectors.divergence import median_of

_BLOCK = 16
_SMOOTHING = 0.28
_SMALLEST_GAIN = 0.002


class Plateau(LimitlessDetector):
    """Reports, once per plateau, that the smoothed loss has set no new best level for `plateau_steps` steps."""

    name = "plateau"
    confidence = 0.7
    field, needs_loss, max_block = "loss", True, _BLOCK

    def __init__(self, config: DetectSection) -> None:
        self._plateau_steps = config.plateau_steps
        self._block: list[float] = []
        self._level: float | None = None
        self._best = 0.0
        self._since: int | None = None
        self._reported = False

    def observe(self, signal: Signal) -> Finding | None:
        loss = signal.loss
        if not math.isfinite(loss) or signal.overflow or signal.flags:
            return None
        self._block.append(loss)
        if len(self._block) < _BLOCK:
            return None
        middle, self._block = median_of(self._block), []
        self._level = middle if self._level is None else self._level + _SMOOTHING * (middle - self._level)
        if self._since is None or self._level < self._best - _SMALLEST_GAIN * abs(self._best):
            self._best, self._since, self._reported = self._level, signal.step, False
            return None
        if self._reported or signal.step - self._since < self._plateau_steps:
            return None
        self._reported = True
        steps = signal.step - self._since
        message = f"the loss has not improved on {self._best:.6g} for {steps} steps"
        evidence = {"best": self._best, "level": self._level, "steps": steps}
        return self.report(signal, Kind.PLATEAU, Severity.NOTE, self._since, message, evidence)

    def absorb_normal(self, losses: Sequence[float], steps: Sequence[float]) -> int:
        """Take in the losses that only fill the block, and return their number; its last loss is for `observe`."""
        filling = losses[: _BLOCK - 1 - len(self._block)]
        self._block.extend(filling)
        return len(filling)

    def rebaseline(self) -> None:
        self._block = []
        self._level, self._since, self._reported = None, None, False

    def state_dict(self) -> dict[str, Any]:
        return {
            "block": list(self._block),
            "level": self._level,
            "best": self._best,
            "since": self._since,
            "said": self._reported,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._block, self._level, self._best = list(state["block"]), state["level"], state["best"]
        self._since, self._reported = state["since"], state["said"]
