"""Clean kinds: patterns of real logs that look like trouble but are none. Any alarm on them is false."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.detectors import healthy_run as healthy_runs
from benchmarks.detectors.healthy_run import STEPS, Array, Curve, healthy_run, wander

Maker = Callable[[str, int, np.random.Generator], Curve]


def plain(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    return healthy_run(rng).curve(kind, seed)


def heavy_tails(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """Student-t with 3 degrees: the variance of the variance is infinite."""
    return healthy_run(rng, df=3.0).curve(kind, seed)


def lognormal(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """Multiplicative noise of 5 to 25 percent, as small batches give."""
    c = healthy_run(rng)
    size = rng.uniform(0.05, 0.25)
    return c.curve(kind, seed, c.trend * np.exp(size * c.noise.clip(-5, 5) - size * size / 2))


def skewed(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """Gamma noise: many losses a little under the mean, few far above it."""
    c = healthy_run(rng)
    shape = rng.uniform(1.0, 4.0)
    noise = (rng.gamma(shape, 1.0, len(c)) - shape) / np.sqrt(shape)
    return c.curve(kind, seed, c.trend + 2 * c.sigma * noise)


def ar1_strong(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """Neighbouring losses correlate by 0.9: a streaming data set read in order."""
    return healthy_run(rng, rho=0.9, df=8.0).curve(kind, seed)


def epoch_staircase(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """Fine-tuning over a few epochs: a fall at each border, and a slight rise inside."""
    c = healthy_run(rng, relative=rng.uniform(0.02, 0.08))
    epoch = int(rng.integers(400, 1000))
    number, inside = np.divmod(np.arange(len(c)), epoch)
    base = 1.2 + 0.6 * np.exp(-np.arange(len(c)) / 150)
    trend = base * rng.uniform(0.6, 0.85) ** number * (1 + rng.uniform(0, 0.05) * inside / epoch * (number > 0))
    return c.curve(kind, seed, trend * (1 + c.sigma / c.trend * c.noise))


def quantised_bf16(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """A loss reduced in bf16: at 8 to 16 it moves in sixteenths, lower in less."""
    c = healthy_run(rng)
    loss = c.loss * rng.choice([1.0, 4.0])
    ulp = 2.0 ** (np.floor(np.log2(loss)) - 7)
    return c.curve(kind, seed, np.round(loss / ulp) * ulp)


def quantised_decimals(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """Logged with two decimals, often the same value many times running."""
    c = healthy_run(rng, relative=rng.uniform(0.001, 0.01))
    return c.curve(kind, seed, np.round(c.loss, 2))


def negative_rl(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """A policy-gradient loss: around zero, wandering either way, its noise growing and shrinking."""
    c = healthy_run(rng)
    steps = np.arange(len(c))
    drift = rng.uniform(-0.4, 0.1) * steps / len(c) + 0.05 * np.cumsum(rng.standard_normal(len(c))) / np.sqrt(len(c))
    size = rng.uniform(0.02, 0.2) * wander(rng, len(c), 0.4)
    return c.curve(kind, seed, drift + size * c.noise)


def near_zero(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """Memorisation: the loss decays to about 1e-3, its noise in proportion."""
    c = healthy_run(rng)
    trend = 10 ** rng.uniform(-3.3, -2.3) + rng.uniform(0.5, 2.5) * np.exp(-np.arange(len(c)) / rng.uniform(200, 600))
    return c.curve(kind, seed, trend * np.exp(rng.uniform(0.2, 0.6) * c.noise.clip(-6, 6)))


def mostly_zero(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """A hinge or triplet loss: over half the batches have nothing left to learn from."""
    c = healthy_run(rng)
    scale = 0.05 + np.exp(-np.arange(len(c)) / rng.uniform(150, 400))
    zero = rng.random(len(c)) < np.minimum(rng.uniform(0.55, 0.9), np.arange(len(c)) / 400)
    c.norm = np.where(zero, 0.0, c.norm)
    return c.curve(kind, seed, np.where(zero, 0.0, scale * rng.gamma(2.0, 0.5, len(c))))


def bimodal(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """Mixup, or two data sources: a third of the batches sit at half as much again."""
    c = healthy_run(rng)
    hard = rng.random(len(c)) < rng.uniform(0.15, 0.4)
    c.norm = c.norm * np.where(hard, rng.uniform(1.0, 1.8), 1.0)
    return c.curve(kind, seed, c.loss * np.where(hard, rng.uniform(1.3, 1.6), 1.0))


def rare_source(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """One batch in 30 to 100 comes from a harder source: half as much again, always for one step."""
    c = healthy_run(rng)
    hard = rng.random(len(c)) < rng.uniform(0.01, 0.03)
    hard[1:] &= ~hard[:-1]
    return c.curve(kind, seed, c.loss * np.where(hard, rng.uniform(1.25, 1.5), 1.0))


def periodic_batches(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """Batches grouped by length: a saw-tooth whose relative height grows as the loss falls."""
    c = healthy_run(rng)
    period = int(rng.integers(12, 120))
    tooth = (np.arange(len(c)) % period) / period - 0.5
    return c.curve(kind, seed, c.loss + rng.uniform(0.15, 0.5) * tooth)


def curriculum(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """Data stages: the level jumps up or down, each time declared."""
    c = healthy_run(rng)
    loss, at, shifts = c.loss.copy(), 0, []
    while (at := at + int(rng.integers(500, 1200))) < len(c) - 100:
        shifts.append(at)
        loss[at:] *= rng.uniform(0.75, 1.35)
    return c.curve(kind, seed, loss, shifts=shifts)


def falls_suddenly(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """Undeclared shifts downwards: an easier data source, a skill learned."""
    c = healthy_run(rng)
    loss = c.loss.copy()
    for at in rng.integers(300, len(c) - 100, 3):
        loss[at:] *= rng.uniform(0.8, 0.97)
    return c.curve(kind, seed, loss)


def plateau_then_fall(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """CTC and the like: nothing for a thousand steps, then all of it within a few hundred."""
    c = healthy_run(rng)
    at, width = rng.integers(600, 2500), rng.uniform(20, 200)
    share = 1 / (1 + np.exp((np.arange(len(c)) - at) / width))
    trend = 0.4 + 2.6 * share + 0.3 * np.exp(-np.arange(len(c)) / 60)
    c.norm = c.norm * (1 + 3 * 4 * share * (1 - share))
    return c.curve(kind, seed, trend * (1 + c.sigma / c.trend * c.noise))


def warm_restarts(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """Cosine with restarts: loss and noise rise with the learning rate, which is in the signal."""
    c = healthy_run(rng)
    period = int(rng.integers(500, 1300))
    phase = (np.arange(len(c)) % period) / period
    share = 0.5 * (1 + np.cos(np.pi * phase))
    c.lr = c.lr.max() * (0.02 + 0.98 * share)
    hot = _lagged(share, int(rng.integers(5, 40)))
    return c.curve(kind, seed, c.trend * (1 + rng.uniform(0.04, 0.2) * hot) + c.sigma * c.noise)


def restart_from_init(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """The script was restarted into the same log: loss back at its first value, LR back in warm-up."""
    c = healthy_run(rng)
    at = int(rng.integers(800, 2500))
    again = c.cut(len(c) - at)
    return Curve(
        kind,
        seed,
        np.concatenate([c.loss[:at], again.loss * rng.uniform(0.99, 1.01)]),
        np.concatenate([c.norm[:at], again.norm]),
        np.concatenate([c.lr[:at], again.lr]),
    )


def grad_outliers(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """Single gradient norms of 5 to 20 times their baseline, without any effect on the loss."""
    c = healthy_run(rng)
    hit = rng.random(len(c)) < rng.uniform(0.001, 0.01)
    c.norm = c.norm * np.where(hit, rng.uniform(5, 20, len(c)), 1.0)
    return c.curve(kind, seed)


def averaged(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """Records are means over 10 or 100 steps, as most trainers log them."""
    interval = int(kind.rsplit("_", 1)[1])
    c = healthy_run(rng, STEPS * (5 if interval == 10 else 25), relative=rng.uniform(0.01, 0.06))
    means = {name: part.reshape(-1, interval).mean(1) for name, part in (("loss", c.loss), ("norm", c.norm))}
    return Curve(kind, seed, means["loss"], means["norm"], c.lr[interval - 1 :: interval], interval=interval)


def constant_then_noise(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """Frozen at first (a zero LR, a dead warm-up), then training begins."""
    c = healthy_run(rng)
    at = int(rng.integers(60, 500))
    rest = c.cut(len(c) - at)
    loss = np.concatenate([np.full(at, rest.trend[0]), rest.loss])
    return Curve(kind, seed, loss, np.concatenate([np.full(at, rest.norm[0]), rest.norm]), c.lr)


def tiny_noise(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """A very large batch: noise of a few parts in ten thousand."""
    return healthy_run(rng, relative=10 ** rng.uniform(-4.3, -3.3)).curve(kind, seed)


def contrastive(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """The loss rises slowly for some 200 steps, as the representations spread, and then falls."""
    c = healthy_run(rng)
    steps = np.arange(len(c))
    top = rng.uniform(150, 250)
    rise = rng.uniform(0.05, 0.2) * np.minimum(steps / top, 1.0) * np.exp(-np.maximum(0, steps - top) / 300)
    fall = 1.5 * (1 - np.exp(-np.maximum(0, steps - top) / 900))
    return c.curve(kind, seed, (3.5 + 3.5 * rise - fall) * (1 + c.sigma / c.trend * c.noise))


def noise_burst(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """For a hundred steps the noise is three times its size, around the same mean."""
    c = healthy_run(rng)
    for at in rng.integers(400, len(c) - 200, 2):
        c.noise[at : at + 100] *= 3.0
    return c.curve(kind, seed)


def noise_grows(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """Noise that grows to four times its size over the run."""
    c = healthy_run(rng)
    c.noise = c.noise * np.linspace(1.0, 4.0, len(c))
    return c.curve(kind, seed)


def lr_decay_steps(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """The learning rate falls tenfold twice: the loss drops and its noise shrinks, as image classifiers do."""
    c = healthy_run(rng, relative=rng.uniform(0.03, 0.12))
    for at in (len(c) // 2, len(c) * 3 // 4):
        c.trend[at:] *= rng.uniform(0.7, 0.9)
        c.sigma[at:] *= 0.6
        c.lr[at:] *= 0.1
    return c.curve(kind, seed)


def second_descent(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """Overfit, then memorised: falls in waves, with a broad and shallow rise between that stays under 2%."""
    c = healthy_run(rng, relative=rng.uniform(0.02, 0.06))
    wave = 1 + 0.01 * np.sin(2 * np.pi * np.arange(len(c)) / rng.uniform(800, 2000))
    return c.curve(kind, seed, c.loss * wave)


def fast_start(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """A small model that has learned most of it within a hundred steps: the steepest fall, then none."""
    return healthy_runs.fast_start(rng).curve(kind, seed)


def _lagged(values: Array, steps: int) -> Array:
    """The mean of the last `steps` values."""
    padded = np.concatenate([np.full(steps - 1, values[0]), values])
    return np.asarray(np.convolve(padded, np.ones(steps) / steps, mode="valid"))


MAKERS: dict[str, Maker] = {
    "plain": plain,
    "heavy_tails": heavy_tails,
    "lognormal": lognormal,
    "skewed": skewed,
    "ar1_strong": ar1_strong,
    "epoch_staircase": epoch_staircase,
    "quantised_bf16": quantised_bf16,
    "quantised_decimals": quantised_decimals,
    "negative_rl": negative_rl,
    "near_zero": near_zero,
    "mostly_zero": mostly_zero,
    "bimodal": bimodal,
    "rare_source": rare_source,
    "periodic_batches": periodic_batches,
    "curriculum": curriculum,
    "falls_suddenly": falls_suddenly,
    "plateau_then_fall": plateau_then_fall,
    "warm_restarts": warm_restarts,
    "restart_from_init": restart_from_init,
    "grad_outliers": grad_outliers,
    "averaged_10": averaged,
    "averaged_100": averaged,
    "constant_then_noise": constant_then_noise,
    "tiny_noise": tiny_noise,
    "contrastive": contrastive,
    "noise_burst": noise_burst,
    "noise_grows": noise_grows,
    "lr_decay_steps": lr_decay_steps,
    "second_descent": second_descent,
    "fast_start": fast_start,
}
