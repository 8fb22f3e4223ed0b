"""Healthy runs: loss, gradient norm and learning rate, before an anomaly is added.

The loss is a power law in the sum of the learning rate so far, so that a warm-up bends the first steps as in real runs.
The size of its noise follows the loss and drifts. The noise is an AR(1) process (the state of the model) times a heavy
tail drawn at each step (the batch): exactly Student-t at each step, but an outlier does not affect the next steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
STEPS = 4000


@dataclass(frozen=True)
class Event:
    """Something a detector should find: its first and last step."""

    kind: str
    start: int
    end: int


@dataclass
class Curve:
    """One recorded run. Entry i is step i; if records are means, entry i is record i."""

    kind: str
    seed: int
    loss: Array
    grad_norm: Array
    lr: Array
    events: list[Event] = field(default_factory=list)
    shifts: list[int] = field(default_factory=list)
    """steps before which the user declares an expected shift"""
    interval: int = 1
    """steps per record"""
    overflow: NDArray[np.bool_] | None = None
    more: dict[str, Array] = field(default_factory=dict)
    """further columns of a Signal by name, such as loss_scale"""
    steps: Array | None = None
    """the step numbers of a log, if they are not 0, 1, 2, ..."""
    absent: NDArray[np.bool_] | None = None
    """where a log has no gradient norm, unlike one that is NaN"""

    @property
    def clean(self) -> bool:
        return not self.events

    def __len__(self) -> int:
        return len(self.loss)

    def norms(self) -> list[float | None]:
        """The gradient norms; None where there is none."""
        norms: list[float | None] = self.grad_norm.tolist()
        return norms if self.absent is None else [None if a else n for a, n in zip(self.absent, norms, strict=True)]


@dataclass
class HealthyRun:
    """The parts of a healthy run, kept separate so that a kind can change one of them."""

    rng: np.random.Generator
    trend: Array
    """the loss without noise"""
    sigma: Array
    """standard deviation of the loss's noise"""
    noise: Array
    """the noise itself, in units of sigma"""
    norm: Array
    """the gradient norm"""
    lr: Array

    def __len__(self) -> int:
        return len(self.trend)

    @property
    def loss(self) -> Array:
        return self.trend + self.sigma * self.noise

    def cut(self, steps: int) -> HealthyRun:
        """The first `steps` steps."""
        parts = (part[:steps] for part in (self.trend, self.sigma, self.noise, self.norm, self.lr))
        return HealthyRun(self.rng, *parts)

    def curve(self, kind: str, seed: int, loss: Array | None = None, **more: object) -> Curve:
        return Curve(kind, seed, self.loss if loss is None else loss, self.norm, self.lr, **more)  # type: ignore[arg-type]


def healthy_run(
    rng: np.random.Generator,
    steps: int = STEPS,
    *,
    rho: float | None = None,
    df: float | None = None,
    relative: float | None = None,
) -> HealthyRun:
    """Return a run like that of a language model. Options fix values that are drawn otherwise."""
    warmup = int(rng.integers(100, 401))
    lr = schedule(rng, steps, warmup)
    floor, first = rng.uniform(1.4, 3.2), rng.uniform(7.0, 11.0)
    exponent, begin = rng.uniform(0.35, 0.7), rng.uniform(8.0, 40.0)
    spent = np.cumsum(lr / lr.max())
    trend = floor + (first - floor) * ((spent + begin) / begin) ** -exponent
    relative = float(np.exp(rng.uniform(np.log(0.004), np.log(0.03)))) if relative is None else relative
    sigma = relative * trend * wander(rng, steps, 0.25)
    noise = student(rng, steps, rng.uniform(0.0, 0.6) if rho is None else rho, rng.uniform(4, 30) if df is None else df)
    return HealthyRun(rng, trend, sigma, noise, gradient(rng, trend, noise), lr)


def schedule(rng: np.random.Generator, steps: int, warmup: int) -> Array:
    """Linear warm-up, then cosine, linear or constant; the run may end before the schedule does."""
    at = np.arange(steps)
    peak, horizon = 10 ** rng.uniform(-4.3, -2.5), steps * rng.uniform(1.0, 3.0)
    done = np.clip((at - warmup) / max(1.0, horizon - warmup), 0, 1)
    shape = (0.55 + 0.45 * np.cos(np.pi * done), 1.0 - 0.9 * done, np.ones(steps))[int(rng.integers(3))]
    return np.asarray(peak * np.minimum(1.0, (at + 1) / warmup) * shape)


def student(rng: np.random.Generator, steps: int, rho: float, df: float) -> Array:
    """Unit variance, Student-t with `df` degrees at each step, correlated by `rho` from step to step."""
    drawn = rng.standard_normal(steps + 200)
    kernel = rho ** np.arange(200) if rho > 0 else np.array([1.0])
    state = np.convolve(drawn, kernel)[200 : 200 + steps] * np.sqrt(1 - rho * rho)
    tail = np.sqrt(df / rng.chisquare(df, steps))
    return np.asarray(state * tail / np.sqrt(df / (df - 2.0)))


def wander(rng: np.random.Generator, steps: int, by: float) -> Array:
    """Return a slow positive drift around 1."""
    at = np.arange(steps) / max(1, steps)
    waves = sum(rng.normal() / k * np.sin(2 * np.pi * (k * at + rng.random())) for k in range(1, 5))
    return np.asarray(np.exp(by * waves))


def gradient(rng: np.random.Generator, trend: Array, noise: Array) -> Array:
    """A norm that is high while the loss falls fast, settles, and shares part of the loss's noise."""
    steps = len(trend)
    level = 10 ** rng.uniform(-0.7, 0.5)
    early = 1 + rng.uniform(2, 8) * np.exp(-np.arange(steps) / rng.uniform(30, 150))
    own = rng.uniform(0.06, 0.3) * student(rng, steps, rng.uniform(0, 0.5), rng.uniform(6, 30))
    return np.asarray(level * early * wander(rng, steps, 0.2) * np.exp(own + rng.uniform(0, 0.12) * noise))


def fast_start(rng: np.random.Generator, steps: int = STEPS) -> HealthyRun:
    """A small model: a short warm-up, most of the fall within a hundred steps, a sudden bend, and noise of 3 to 9%."""
    warmup = int(rng.integers(10, 61))
    lr = schedule(rng, steps, warmup)
    floor, first = rng.uniform(1.5, 2.5), rng.uniform(4.5, 7.0)
    spent = np.cumsum(lr / lr.max())
    trend = floor + (first - floor) * (0.8 * np.exp(-spent / rng.uniform(12, 35)) + 0.2 * (1 + spent / 60) ** -0.7)
    sigma = rng.uniform(0.03, 0.09) * trend * wander(rng, steps, 0.15)
    noise = student(rng, steps, rng.uniform(0.0, 0.3), rng.uniform(8, 30))
    return HealthyRun(rng, trend, sigma, noise, gradient(rng, trend, noise), lr)
