"""False rollbacks on healthy losses whose neighbours correlate: the weakest spot of the loss detectors, by itself.

    python -m benchmarks.detectors.correlated

A level of 2.5 with AR(1) noise of 2%, no trend, from the first step on: spikes in 200 runs of 300 steps for each
correlation, divergence in 10 runs of 3,000.
"""

from __future__ import annotations

import numpy as np

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Severity, Signal
from holdfast.core.detectors.base import Detector
from holdfast.core.detectors.divergence import Divergence
from holdfast.core.detectors.loss_spike import LossSpike


def losses(rho: float, seed: int, steps: int) -> list[float]:
    drawn = np.random.default_rng(seed).standard_normal(steps)
    state, found = 0.0, []
    for value in drawn.tolist():
        state = rho * state + (1.0 - rho * rho) ** 0.5 * value
        found.append(2.5 + 0.05 * state)
    return found


def rollbacks(detector: Detector, values: list[float]) -> int:
    findings = [detector.observe(Signal(step=step, loss=loss)) for step, loss in enumerate(values, 1)]
    return sum(f is not None and f.severity is Severity.ROLLBACK for f in findings)


def main() -> None:
    for rho in (0.0, 0.5, 0.8, 0.9):
        count = sum(rollbacks(LossSpike(DetectSection()), losses(rho, seed, 300)) for seed in range(200))
        print(f"loss_spike, correlation {rho}: {count} false rollbacks in 200 runs of 300 steps")
    for rho in (0.8, 0.9, 0.95):
        count = sum(rollbacks(Divergence(DetectSection()), losses(rho, seed, 3000)) for seed in range(10))
        print(f"divergence, correlation {rho}: {count} false rollbacks in 10 runs of 3,000 steps")


if __name__ == "__main__":
    main()
