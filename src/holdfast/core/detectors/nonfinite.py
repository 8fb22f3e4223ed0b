"""NaN and Inf in loss and gradient; fp16 overflow that does not end."""

from __future__ import annotations

import math
from typing import Any

from holdfast.core.config import Detect
from holdfast.core.types import Finding, Flag, Kind, Severity, Signal


class NonFinite:
    """A non-finite loss, or a non-finite gradient that is not a loss scaler finding its level.

    The gate's flag is the truth where there is one; over a log, the numbers are.
    """

    name = "nonfinite"

    def __init__(self, config: Detect) -> None:
        self._streak_limit = config.overflow_streak
        self._streak = 0
        self._onset = 0
        self._under_one = False

    def limits(self) -> dict[str, float]:
        return {}

    def observe(self, signal: Signal) -> Finding | None:
        if signal.overflow:
            return self._overflow(signal)
        self._streak = 0
        if signal.flags & Flag.LOSS_NONFINITE or not math.isfinite(signal.loss):
            return self._finding(signal, Kind.NONFINITE_LOSS, f"loss is {signal.loss}")
        norm = signal.grad_norm
        if signal.flags & Flag.GRAD_NONFINITE or (norm is not None and not math.isfinite(norm)):
            return self._finding(
                signal, Kind.NONFINITE_GRAD, f"gradient norm is {norm} while the loss is {signal.loss:.6g}"
            )
        if signal.loss_scale is not None and signal.loss_scale >= 1:
            self._under_one = False
        return None

    def _overflow(self, signal: Signal) -> Finding | None:
        if self._streak == 0:
            self._onset = signal.step
        self._streak += 1
        evidence = {"overflows_in_a_row": self._streak, "loss_scale": signal.loss_scale}
        if self._streak >= self._streak_limit:
            self._streak = 0
            return Finding(
                kind=Kind.SCALE_COLLAPSE,
                severity=Severity.ROLLBACK,
                step=signal.step,
                onset=self._onset,
                detector=self.name,
                message=f"{self._streak_limit} fp16 overflows in a row; the loss scale is {signal.loss_scale}",
                evidence=evidence,
            )
        if signal.loss_scale is not None and signal.loss_scale < 1 and not self._under_one:
            self._under_one = True
            return Finding(
                kind=Kind.SCALE_COLLAPSE,
                severity=Severity.NOTE,
                step=signal.step,
                onset=self._onset,
                detector=self.name,
                message=f"the loss scale fell to {signal.loss_scale}: gradients overflow systematically, not by chance",
                evidence=evidence,
            )
        return None

    def _finding(self, signal: Signal, kind: Kind, message: str) -> Finding:
        return Finding(
            kind=kind,
            severity=Severity.SKIP,
            step=signal.step,
            onset=signal.step,
            detector=self.name,
            message=message,
            evidence={"loss": signal.loss, "grad_norm": signal.grad_norm},
        )

    def rebaseline(self) -> None:
        """Non-finite is never muted."""

    def state_dict(self) -> dict[str, Any]:
        return {"streak": self._streak, "onset": self._onset, "under_one": self._under_one}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._streak, self._onset, self._under_one = state["streak"], state["onset"], state["under_one"]
