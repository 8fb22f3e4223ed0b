"""Detectors, one per file. They turn signals into findings, with the same code in a run and over a log."""

from __future__ import annotations

from holdfast.core.base.config import DetectSection
from holdfast.core.detectors.advisory import DeadRun, DuplicateBatch, LearningRate, Plateau, WeightNorm, ZeroGradient
from holdfast.core.detectors.base import Detector
from holdfast.core.detectors.curry_train import CurryTrain
from holdfast.core.detectors.divergence import Divergence
from holdfast.core.detectors.log_spike import GradSpike, UpdateSpike
from holdfast.core.detectors.loss_spike import LossSpike
from holdfast.core.detectors.monotone import Monotone
from holdfast.core.detectors.nonfinite import LossScale, NonFinite
from holdfast.core.detectors.three_sigma import ThreeSigma

_PUBLISHED_RULES = {"curry-train": CurryTrain, "three-sigma": ThreeSigma, "monotone-200": Monotone}


def build(config: DetectSection) -> list[Detector]:
    """Return the detectors that a configuration asks for, in the order in which they run."""
    detectors: list[Detector] = []
    if config.nonfinite:
        detectors += [NonFinite(config), LossScale(config)]
    rule = _PUBLISHED_RULES.get(config.preset.removesuffix("-as-written"))
    if rule is not None:  # it replaces the rules for the loss
        detectors.append(rule(fixed=not config.preset.endswith("-as-written")))
    else:
        if config.loss_spike:
            detectors.append(LossSpike(config))
        if config.divergence:
            detectors.append(Divergence(config))
    if config.grad_spike:
        detectors.append(GradSpike(config))
    if config.update_spike:
        detectors.append(UpdateSpike(config))
    if config.advisory:
        advisory = (Plateau, LearningRate, DuplicateBatch, WeightNorm, ZeroGradient, DeadRun)
        detectors += [detector(config) for detector in advisory]
    return detectors
