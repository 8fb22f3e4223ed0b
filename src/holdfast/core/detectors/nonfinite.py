"""NaN and Inf in loss and gradient, and the fp16 loss scale that answers them.

The runtime checks parameters, moments and buffers on their device.
"""

from __future__ import annotations

import math
from typing import ClassVar

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Flag, Kind, Severity, Signal
from holdfast.core.detectors.base import LimitlessDetector

_LOSS, _GRAD = int(Flag.LOSS_NONFINITE), int(Flag.GRAD_NONFINITE)
_GROWTH_INTERVAL = 2000
_STUCK_STEPS = 3 * _GROWTH_INTERVAL


class NonFinite(LimitlessDetector):
    """Reports a non-finite loss, or a non-finite gradient that is not a loss-scale overflow.

    It uses the flags of the gate; over a log, which has none, it uses the numbers.
    """

    name, needs = "nonfinite", "flags"

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


class LossScale(LimitlessDetector):
    """Reports a loss scale that is stuck, under 1, or overflowing again and again.

    A healthy dynamic scale is a sawtooth: it doubles after a growth interval without overflow and halves on each. One
    that is constant for several intervals is not adjusted. A scale under 1, or `overflow_streak` overflows in a row, is
    not chance: activations overflow in the forward pass, which no loss scale cures, or the LR is too high.
    """

    name = needs = "loss_scale"
    field = "loss_scale"
    saved: ClassVar = {
        "streak": "_streak", "onset": "_onset", "under_one": "_under_one", "last": "_last", "since": "_since",
        "same": "_same",
    }  # fmt: skip

    def __init__(self, config: DetectSection) -> None:
        self._streak_limit = config.overflow_streak
        self._streak = 0
        self._onset = 0
        self._under_one = False
        self._last: float | None = None
        self._since = 0
        self._same = 0

    def observe(self, signal: Signal) -> Finding | None:
        scale = signal.loss_scale
        if scale is not None and not math.isfinite(scale):
            scale = None
        if signal.overflow:
            if scale is not None and scale != self._last:
                self._last, self._since = scale, signal.step
            self._same = 0
            return self._overflow(signal)
        self._streak = 0
        if scale is None:
            return None
        if scale >= 1:
            self._under_one = False
        elif not self._under_one:
            self._onset = signal.step
            return self._collapsed(signal)
        if scale != self._last:
            self._last, self._since, self._same = scale, signal.step, 0
        self._same += 1
        if signal.step - self._since < _STUCK_STEPS or self._same < 2 or scale == 1.0:
            return None
        since, self._since = self._since, signal.step
        message = f"the loss scale has been {scale:g} since step {since}: dynamic loss scaling is not active"
        return self._finding(signal, Kind.SCALE_STUCK, Severity.NOTE, since, message)

    def _overflow(self, signal: Signal) -> Finding | None:
        if self._streak == 0:
            self._onset = signal.step
        self._streak += 1
        if self._streak >= self._streak_limit:
            streak, self._streak = self._streak, 0
            message = f"{streak} fp16 overflows in a row; the loss scale is {signal.loss_scale}"
            return self._finding(signal, Kind.SCALE_COLLAPSE, Severity.ROLLBACK, self._onset, message, streak)
        if signal.loss_scale is not None and signal.loss_scale < 1 and not self._under_one:
            return self._collapsed(signal)
        return None

    def _collapsed(self, signal: Signal) -> Finding:
        self._under_one = True
        message = f"the loss scale fell to {signal.loss_scale}: gradients overflow systematically, not by chance"
        return self._finding(signal, Kind.SCALE_COLLAPSE, Severity.NOTE, self._onset, message, self._streak)

    def _finding(
        self, signal: Signal, kind: Kind, severity: Severity, onset: int, message: str, streak: int = 0
    ) -> Finding:
        evidence = {"overflows_in_a_row": streak, "loss_scale": signal.loss_scale}
        return self.report(signal, kind, severity, onset, message, evidence)

    def rebaseline(self) -> None:
        """Keep everything: no expected shift explains an overflow."""
