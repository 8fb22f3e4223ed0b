"""Detectors: one file each. Signal in, finding out; the same code online and over a log."""

from __future__ import annotations

from holdfast.core.base.config import DetectSection
from holdfast.core.detectors.base import Detector
from holdfast.core.detectors.curry_train import CurryTrain
from holdfast.core.detectors.dead_run import DeadRun
from holdfast.core.detectors.divergence import Divergence
from holdfast.core.detectors.duplicate_batch import DuplicateBatch
from holdfast.core.detectors.grad_spike import GradSpike
from holdfast.core.detectors.learning_rate import LearningRate
from holdfast.core.detectors.loss_scale import LossScale
from holdfast.core.detectors.loss_spike import LossSpike
from holdfast.core.detectors.monotone import Monotone
from holdfast.core.detectors.nonfinite import NonFinite
from holdfast.core.detectors.plateau import Plateau
from holdfast.core.detectors.three_sigma import ThreeSigma
from holdfast.core.detectors.update_spike import UpdateSpike
from holdfast.core.detectors.weight_norm import WeightNorm


def build(config: DetectSection) -> list[Detector]:
    """The detectors a configuration asks for, in the order they run."""
    chosen: list[Detector] = []
    if config.nonfinite:
        chosen += [NonFinite(config), LossScale(config)]
    chosen += _on_the_loss(config)
    if config.grad_spike:
        chosen.append(GradSpike(config))
    if config.update_spike:
        chosen.append(UpdateSpike(config))
    if config.advisory:
        chosen += [
            Plateau(config),
            LearningRate(config),
            DuplicateBatch(config),
            WeightNorm(config),
            DeadRun(config),
        ]
    return chosen


def _on_the_loss(config: DetectSection) -> list[Detector]:
    mended = not config.preset.endswith("-as-written")
    match config.preset.removesuffix("-as-written"):
        case "curry-train":
            return [CurryTrain(mended)]
        case "three-sigma":
            return [ThreeSigma(mended)]
        case "monotone-200":
            return [Monotone(mended)]
    chosen: list[Detector] = []
    if config.loss_spike:
        chosen.append(LossSpike(config))
    if config.divergence:
        chosen.append(Divergence(config))
    return chosen
