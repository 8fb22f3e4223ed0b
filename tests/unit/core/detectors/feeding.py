"""What the tests of the detectors feed in: signals, healthy noise, streams of anything at all; and how they compare."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import msgspec
import numpy as np

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Flag, Severity, Signal
from holdfast.core.detectors import (
    CurryTrain,
    DeadRun,
    Divergence,
    DuplicateBatch,
    GradSpike,
    LearningRate,
    LossScale,
    LossSpike,
    Monotone,
    NonFinite,
    Plateau,
    ThreeSigma,
    UpdateSpike,
    WeightNorm,
    ZeroGradient,
)
from holdfast.core.detectors.base import Detector

DEFAULT = (
    NonFinite,
    LossScale,
    LossSpike,
    Divergence,
    GradSpike,
    UpdateSpike,
    Plateau,
    LearningRate,
    DuplicateBatch,
    WeightNorm,
    ZeroGradient,
    DeadRun,
)
MADE: dict[str, Callable[[DetectSection], Any]] = {kind.name: kind for kind in DEFAULT} | {
    "curry_train": lambda config: CurryTrain(True, sustain=3, history=12),
    "three_sigma": lambda config: ThreeSigma(True, window=12),
    "monotone": lambda config: Monotone(True, steps=40),
}
AS_WRITTEN: dict[str, Callable[[DetectSection], Any]] = {
    "curry_train": lambda config: CurryTrain(False, sustain=3, history=12),
    "three_sigma": lambda config: ThreeSigma(False, window=12),
    "monotone": lambda config: Monotone(False, steps=5),
}


def signal(step: int, loss: float = 2.0, grad_norm: float | None = 1.0, **more: Any) -> Signal:
    return Signal(step=step, loss=loss, grad_norm=grad_norm, **more)


def noisy(count: int, seed: int = 0, level: float = 2.2, noise: float = 0.02) -> list[float]:
    """A healthy stretch: a level and relative Gaussian noise."""
    return [float(v) for v in level * (1 + noise * np.random.default_rng(seed).normal(size=count))]


def ar1(count: int, seed: int, rho: float = 0.8) -> np.ndarray:
    """Noise whose neighbours are alike, of deviation 1."""
    values = np.random.default_rng(seed).normal(size=count)
    for i in range(1, count):
        values[i] = rho * values[i - 1] + math.sqrt(1 - rho**2) * values[i]
    return values


def watch(detector: Detector, losses: Iterable[float], first: int = 1, **more: Any) -> list[Finding]:
    """Everything the detector says of a log of losses."""
    said = [detector.observe(signal(n, float(loss), None, **more)) for n, loss in enumerate(losses, first)]
    return [f for f in said if f is not None]


def watch_field(detector: Detector, field: str, values: Iterable[Any], first: int = 1, **more: Any) -> list[Finding]:
    """The same for a log of another quantity, under a healthy loss."""
    said = [detector.observe(Signal(step=n, loss=2.0, **{field: v}, **more)) for n, v in enumerate(values, first)]
    return [f for f in said if f is not None]


def costly(found: Iterable[Finding]) -> list[Finding]:
    return [f for f in found if f.severity is Severity.ROLLBACK]


def only(limits: dict[str, float]) -> float:
    (value,) = limits.values()
    return value


def high_above(detector: Detector) -> float:
    """Return the loss above which the next one is reported; infinity while none would be."""
    found = copy.deepcopy(detector).observe(signal(10**6, 1e308, None))
    return math.inf if found is None else float(found.evidence["limit"])


def same(one: Any, other: Any) -> bool:
    """Equal as written down: a NaN equals a NaN."""
    return repr(msgspec.to_builtins(one)) == repr(msgspec.to_builtins(other))


def finite(value: Any) -> bool:
    """Whether every number in it is one."""
    if isinstance(value, dict):
        return all(finite(v) for v in value.values())
    if isinstance(value, list | tuple):
        return all(finite(v) for v in value)
    return not isinstance(value, float) or math.isfinite(value)


# ---- streams of anything


BROKEN = (math.nan, math.inf, -math.inf)
HUGE = (1e38, 1e149, 1e154, 1e300, -1e149, -1e300)
ODD = (0.0, -0.0, 5e-324, 1e-300, -1.0, -50.0, 50.0, 1e4)


def play(detector: Detector, event: Signal | str) -> Finding | None:
    if isinstance(event, str):
        detector.rebaseline()
        return None
    return detector.observe(event)


@functools.cache
def stream(seed: int, count: int, rare: tuple[float, ...] = (*BROKEN, *HUGE, *ODD), share: float = 0.04) -> list[Any]:
    """Signals at growing steps around a loss of 2, in stretches of moods, with rare values, gaps, flags, overflows and
    shifts ("shift") among them."""
    random = Random(seed)
    events: list[Any] = []
    level, wide, repeat, mood = 2.0, 0.02, False, 0
    step, scale = 0, 65536.0

    def one(centre: float, missing: float = 0.0) -> Any:
        if random.random() < missing:
            return None
        if random.random() < share:
            return random.choice(rare)
        return centre * (1.0 + wide * random.gauss(0, 1))

    for _ in range(count):
        if mood == 0:
            mood = random.randint(5, 60)
            level = random.choice([2.0, 2.0, 2.0, 2.6, 8.0, 1.0, 0.05, -1.0])
            wide = random.choice([0.0, 0.02, 0.02, 0.3])
            repeat = random.random() < 0.1
        mood -= 1
        if random.random() < 0.01:
            events.append("shift")
        step += random.choice([1, 1, 1, 1, 1, 0, 7, 300])
        scale *= random.choice([1.0] * 20 + [2.0, 0.25, 0.25])
        seen = Signal(
            step=step,
            loss=one(level),
            grad_norm=one(abs(level), 0.1),
            lr=one(1e-3, 0.1),
            loss_scale=None if random.random() < 0.2 else scale,
            update_rms=one(abs(level), 0.1),
            weight_norm=one(30.0 * abs(level), 0.1),
            batch=7 if repeat else random.getrandbits(62),
            flags=random.choice([0] * 30 + [int(f) for f in Flag]),
            overflow=random.random() < 0.05,
            loss_limit=None if random.random() < 0.9 else 5.0,
            grad_limit=None if random.random() < 0.9 else 5.0,
        )
        events.append(seen)
    return events
