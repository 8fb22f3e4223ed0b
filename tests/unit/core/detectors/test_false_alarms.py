"""The whole online set on healthy runs: nothing costly, and little that is cheap."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from feeding import ar1, signal

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Severity
from holdfast.core.detectors import build

LOGNORMAL = (math.exp(0.125), math.sqrt((math.exp(0.25) - 1) * math.exp(0.25)))
NOISE: dict[str, Callable[[int, int], np.ndarray]] = {
    "gaussian": lambda n, seed: np.random.default_rng(seed).normal(size=n),
    "alike": lambda n, seed: ar1(n, seed, 0.8),
    "gamma": lambda n, seed: (np.random.default_rng(seed).gamma(2.0, 1.0, n) - 2.0) / math.sqrt(2.0),
    "lognormal": lambda n, seed: (np.random.default_rng(seed).lognormal(0.0, 0.5, n) - LOGNORMAL[0]) / LOGNORMAL[1],
}


@pytest.mark.parametrize(("noise", "skips"), [("gaussian", 0), ("alike", 0), ("gamma", 2), ("lognormal", 5)])
def test_healthy_noise_never_rolls_back_and_rarely_skips(noise, skips):
    """12,000 healthy steps each, of a falling loss with 5% noise and a norm with 20%. The last noise has a long tail, and
    that is what is skipped."""
    count = 3000
    course = 2 + 8 * np.exp(-np.arange(count) / 200) + np.exp(-np.arange(count) / 2000)
    said: Counter[Severity] = Counter()
    for seed in range(4):
        losses = course * (1 + 0.05 * NOISE[noise](count, seed))
        norms = 0.3 * np.exp(0.2 * NOISE[noise](count, seed + 100))
        detectors = build(DetectSection())
        for step in range(count):
            seen = signal(step + 1, float(losses[step]), float(norms[step]), lr=1e-3, batch=step)
            said.update(f.severity for d in detectors if (f := d.observe(seen)) is not None)
    assert said[Severity.ROLLBACK] == 0
    assert said[Severity.SKIP] <= skips
