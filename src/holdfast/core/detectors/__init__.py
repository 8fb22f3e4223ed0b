"""Detectors: one file each. Signal in, finding out; the same code online and over a log."""

from __future__ import annotations

from holdfast.core.config import Detect
from holdfast.core.detectors.base import Detector
from holdfast.core.detectors.grad_spike import GradSpike
from holdfast.core.detectors.loss_spike import LossSpike
from holdfast.core.detectors.nonfinite import NonFinite


def build(config: Detect) -> list[Detector]:
    """The detectors a configuration asks for, in the order they run."""
    chosen: list[Detector] = []
    if config.nonfinite:
        chosen.append(NonFinite(config))
    if config.loss_spike:
        chosen.append(LossSpike(config))
    if config.grad_spike:
        chosen.append(GradSpike(config))
    return chosen
