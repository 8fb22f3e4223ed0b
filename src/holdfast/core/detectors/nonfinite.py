"""NaN and Inf in loss and gradient. The runtime checks parameters, moments and buffers on their device."""

from __future__ import annotations

import math
from typing import Any

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Flag, Kind, Severity, Signal
from holdfast.core.detectors.base import LimitlessDetector

_LOSS, _GRAD = int(Flag.LOSS_NONFINITE), int(Flag.GRAD_NONFINITE)


class NonFinite(LimitlessDetector):
    """Reports a non-finite loss, or a non-finite gradient that is not a loss-scale overflow.

    It uses the flags of the gate; over a log, which has none, it uses the numbers.
    """

    name = "nonfinite"

    def __init__(self, config: DetectSection) -> None:
        del config

    def observe(self, signal: Signal) -> Finding | None:
        if signal.overflow:
            return None
        if signal.flags & _LOSS or not math.isfinite(signal.loss):
            return self._finding(signal, Kind.NONFINITE_LOSS, f"loss is {signal.loss}")
        norm = signal.grad_norm
        if signal.flags & _GRAD or (norm is not None and not math.isfinite(norm)):
            message = f"gradient norm is {norm} while the loss is {signal.loss:.6g}"
            return self._finding(signal, Kind.NONFINITE_GRAD, message)
        return None

    def _finding(self, signal: Signal, kind: Kind, message: str) -> Finding:
        evidence = {"loss": signal.loss, "grad_norm": signal.grad_norm}
        return self.report(signal, kind, Severity.SKIP, signal.step, message, evidence)

    def rebaseline(self) -> None:
        """Keep reporting: no expected shift explains a non-finite value."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: it has no state."""
