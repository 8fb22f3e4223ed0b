"""Anomaly kinds: a healthy course, and one thing that happens to it (several for a burst).

Sizes are in deviations of the loss's own noise and have a floor in percent, so that each is visible in a plot of the
curve; none is drawn so large that any rule finds it, except where the kind says so. A curve ends some 300 steps after
its event.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.detectors import clean
from benchmarks.detectors.healthy_run import STEPS, Curve, Event, HealthyRun, fast_start, healthy_run

Maker = Callable[[str, int, np.random.Generator], Curve]
TAIL = 300
ROOM = 1400
"""steps that an event and its decay may need after its onset"""
HARD = (
    "lognormal",
    "skewed",
    "epoch_staircase",
    "negative_rl",
    "near_zero",
    "bimodal",
    "rare_source",
    "periodic_batches",
    "quantised_decimals",
    "curriculum",
    "noise_grows",
    "averaged_10",
)
"""clean kinds on which the hard anomalies happen: no false alarms there must not mean no alarms at all"""


def onset(rng: np.random.Generator) -> int:
    """Half of the events come early, half after rules that need a thousand steps of history have theirs."""
    return int(rng.integers(300, 1050) if rng.random() < 0.5 else rng.integers(1050, STEPS - ROOM))


def spike_small(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """6 to 10 deviations and at least 3%, for 5 to 40 steps."""
    c, at, steps = healthy_run(rng), onset(rng), int(rng.integers(5, 41))
    _spike(c, at, steps, max(rng.uniform(6, 10) * c.sigma[at], rng.uniform(0.03, 0.05) * c.trend[at]))
    return _finish(c, kind, seed, at, at + steps)


def spike_large(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """To 1.5 to 10 times the loss, for 5 to 150 steps."""
    c, at, steps = healthy_run(rng), onset(rng), int(rng.integers(5, 151))
    _spike(c, at, steps, _large(rng) * c.trend[at])
    return _finish(c, kind, seed, at, at + steps)


def spike_early(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """Large, but at steps 50 to 80, while the loss falls fastest and the baseline is new."""
    c, at, steps = healthy_run(rng), int(rng.integers(50, 81)), int(rng.integers(5, 41))
    _spike(c, at, steps, max(rng.uniform(8, 14) * c.sigma[at], rng.uniform(0.1, 0.5) * c.trend[at]))
    return _finish(c, kind, seed, at, at + steps)


def spike_steep(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """On the steep part of the trend, where a rise may still be under the loss of a hundred steps ago."""
    c, at, steps = healthy_run(rng), int(rng.integers(80, 301)), int(rng.integers(8, 41))
    _spike(c, at, steps, max(rng.uniform(7, 12) * c.sigma[at], rng.uniform(0.06, 0.25) * c.trend[at]))
    return _finish(c, kind, seed, at, at + steps)


def spike_burst(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """3 to 6 spikes, 30 to 100 steps apart: the first must not blind the detector to the others."""
    c, at, events = healthy_run(rng), onset(rng), []
    for _ in range(int(rng.integers(3, 7))):
        steps = int(rng.integers(5, 21))
        _spike(c, at, steps, max(rng.uniform(7, 12) * c.sigma[at], rng.uniform(0.05, 0.6) * c.trend[at]))
        events.append(Event(kind, at, at + steps))
        at += int(rng.integers(30, 101))
    return c.cut(events[-1].end + TAIL).curve(kind, seed, events=events)


def spike_persistent(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """A jump of at least 8 deviations and 10% that recovers only in part, over hundreds of steps."""
    c, at = healthy_run(rng), onset(rng)
    after = np.arange(len(c) - at)
    height = max(rng.uniform(8, 14) * c.sigma[at], rng.uniform(0.1, 0.8) * c.trend[at])
    stays = rng.uniform(0.5, 1.0)
    c.trend[at:] += (
        height * np.minimum(1, (after + 1) / rng.integers(1, 4)) * (stays + (1 - stays) * np.exp(-after / 60))
    )
    _react(c, at, 40, rng.uniform(1, 4))
    return _finish(c, kind, seed, at, at + 200)


def spike_single(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """One step, one bad batch: worth a skip and nothing more."""
    c, at = healthy_run(rng), onset(rng)
    c.trend[at] += max(rng.uniform(12, 20) * c.sigma[at], rng.uniform(0.3, 2.0) * c.trend[at])
    c.norm[at] *= rng.uniform(2, 20)
    return _finish(c, kind, seed, at, at)


def grad_lead(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """As seen at 100 B parameters: the norm multiplies over some five steps, and then the loss follows."""
    c, at = healthy_run(rng), onset(rng)
    lead, steps = int(rng.integers(4, 7)), int(rng.integers(15, 80))
    c.norm[at : at + lead] *= rng.uniform(2.5, 4.0) ** np.arange(1, lead + 1)
    c.norm[at + lead : at + lead + steps] *= 1 + 30 * np.exp(-np.arange(steps) / (steps / 3))
    _spike(c, at + lead - 1, steps, rng.uniform(0.2, 1.5) * c.trend[at], react=False)
    return _finish(c, kind, seed, at, at + lead + steps)


def grad_explosion(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """The norm is a hundred times its baseline and stays there; the loss follows over some hundred steps."""
    c, at, steps = healthy_run(rng), onset(rng), int(rng.integers(100, 300))
    after = np.arange(len(c) - at)
    c.norm[at:] *= (10 ** rng.uniform(1.7, 2.5)) ** np.minimum(1.0, (after + 1) / 3)
    c.trend[at:] *= 1 + rng.uniform(0.3, 1.5) * (1 - np.exp(-after / rng.uniform(50, 150)))
    return _finish(c, kind, seed, at, at + steps)


def divergence_fast(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """The loss rises to over 1.5 times its value within 20 to 80 steps, and stays there."""
    c, at, steps = healthy_run(rng), onset(rng), int(rng.integers(20, 81))
    ramp = np.clip((np.arange(len(c) - at) + 1) / steps, 0, 1) ** rng.uniform(0.8, 1.6)
    c.trend[at:] *= 1 + rng.uniform(0.6, 3.0) * ramp
    c.norm[at:] *= 1 + rng.uniform(0, 4) * ramp
    return _finish(c, kind, seed, at, at + steps)


def divergence_slow(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """5 to 30% over 300 to 1,000 steps: no single step is out of place."""
    c, at, steps = healthy_run(rng), onset(rng), int(rng.integers(300, 1001))
    # Under a noise of its own size it would not be seen in a plot either.
    height = max(rng.uniform(0.05, 0.30), 4.0 * float(c.sigma[at] / c.trend[at]))
    # The run no longer falls: what the course would have gained is lost as well.
    flat = np.maximum(c.trend[at:], c.trend[at])
    c.trend[at:] = flat * (1 + height * np.clip((np.arange(len(c) - at) + 1) / steps, 0, 1) ** rng.uniform(1.0, 1.5))
    c.norm[at:] *= 1 + rng.uniform(0, 1.5) * np.clip(np.arange(len(c) - at) / steps, 0, 1)
    return _finish(c, kind, seed, at, at + steps)


def divergence_oscillating(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """Swings that grow: a learning rate past the edge of stability."""
    c, at, steps = healthy_run(rng), onset(rng), int(rng.integers(60, 200))
    after = np.arange(len(c) - at)
    grown = np.clip((after + 1) / steps, 0, 1) ** 1.5
    swing = 0.5 * (1 - np.cos(2 * np.pi * after / rng.uniform(6, 30)))
    c.trend[at:] *= 1 + rng.uniform(0.4, 1.5) * grown * (0.3 + swing)
    c.norm[at:] *= 1 + rng.uniform(1, 5) * grown * swing
    return _finish(c, kind, seed, at, at + steps)


def collapse_to_uniform(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """The model forgets everything: from 2.2 to ln(50257) within a few steps, almost without noise."""
    c, at = healthy_run(rng), onset(rng)
    after = np.arange(len(c) - at)
    share = np.exp(-(after + 1) / rng.uniform(1, 15))
    c.trend[at:] = 10.82 - (10.82 - c.trend[at:]) * share
    c.sigma[at:] = c.sigma[at:] * share + 0.002
    c.norm[at:] *= np.where(after < 5, rng.uniform(3, 10), 0.1)
    return _finish(c, kind, seed, at, at + 100)


def nan(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """NaN or Inf in the loss: once, or from there on."""
    c, at = healthy_run(rng), onset(rng)
    steps = int(rng.choice([1, 3, TAIL]))
    c.trend[at : at + steps] = rng.choice([np.nan, np.inf])
    c.norm[at : at + steps] = np.nan
    return _finish(c, kind, seed, at, at + steps - 1)


def nan_grad(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """A finite loss over a gradient that is not; without a scaler, that update would be applied."""
    c, at = healthy_run(rng), onset(rng)
    steps = int(rng.choice([1, 3]))
    c.norm[at : at + steps] = rng.choice([np.nan, np.inf])
    return _finish(c, kind, seed, at, at + steps - 1)


def fp16_overflow(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """A loss scaler that halves and halves: forward overflow, not a scaler finding its level."""
    c, at, steps = healthy_run(rng), onset(rng), int(rng.integers(40, 80))
    curve = _finish(c, kind, seed, at, at + steps)
    curve.overflow = np.zeros(len(curve), bool)
    curve.overflow[at : at + steps] = True
    for single in rng.integers(10, at - 20, 4):  # a healthy scaler overflows once in a while
        curve.overflow[single] = True
    curve.grad_norm[curve.overflow] = np.inf
    halvings = np.cumsum(np.where(np.arange(len(curve)) >= at, curve.overflow, 0))
    curve.more["loss_scale"] = 65536.0 * 0.5**halvings
    return curve


def level_shift_up(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """An undeclared shift upwards that may be new data: reported separately, since no rule can tell."""
    c, at = healthy_run(rng), onset(rng)
    c.trend[at:] += max(rng.uniform(4, 8) * c.sigma[at], rng.uniform(0.03, 0.1) * c.trend[at])
    return _finish(c, kind, seed, at, at + 200)


def hard_spike(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """A spike of 5 to 40 steps, well outside the recent noise, on a clean kind that is hard by itself."""
    curve, at, steps = *_trap(seed, rng), int(rng.integers(5, 41))
    recent = curve.loss[at - 200 : at]
    height = (np.max(recent) - np.median(recent)) * rng.uniform(2.0, 6.0)
    curve.loss[at : at + steps] += height * np.exp(-1.5 * np.arange(steps) / steps)
    curve.events.append(Event(kind, at, at + steps))
    return _ending(curve, kind, at + steps)


def hard_divergence(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """On a hard clean kind, a rise to three times the recent noise over 50 to 300 steps; it stays there."""
    curve, at, steps = *_trap(seed, rng), int(rng.integers(50, 301))
    recent = curve.loss[at - 200 : at]
    height = (np.max(recent) - np.median(recent)) * rng.uniform(3.0, 8.0)
    curve.loss[at:] += height * np.clip((np.arange(len(curve) - at) + 1) / steps, 0, 1)
    curve.events.append(Event(kind, at, at + steps))
    return _ending(curve, kind, at + steps)


def spike_fast_start(kind: str, seed: int, rng: np.random.Generator) -> Curve:
    """Soon after the bend of a fast start: to 1.6 to 3 times the loss for 10 to 40 steps."""
    c, at, steps = fast_start(rng), int(rng.integers(90, 400)), int(rng.integers(10, 41))
    _spike(c, at, steps, max(10 * c.sigma[at], rng.uniform(0.6, 2.0) * c.trend[at]))
    return _finish(c, kind, seed, at, at + steps)


def _trap(seed: int, rng: np.random.Generator) -> tuple[Curve, int]:
    """Return a clean curve of another kind, and the step of its anomaly."""
    kind = HARD[seed % len(HARD)]
    curve = clean.MAKERS[kind](kind, seed, rng)
    at = onset(rng)
    while any(at - 250 < shift < at + 350 for shift in curve.shifts):
        at += 50
    return curve, min(at, len(curve) - 700)


def _ending(curve: Curve, kind: str, end: int) -> Curve:
    stop = min(len(curve), end + TAIL)
    curve.kind = kind
    curve.loss, curve.grad_norm, curve.lr = curve.loss[:stop], curve.grad_norm[:stop], curve.lr[:stop]
    return curve


def _large(rng: np.random.Generator) -> float:
    return float(np.exp(rng.uniform(np.log(0.5), np.log(9.0))))


def _spike(c: HealthyRun, at: int, steps: int, height: float, *, react: bool = True) -> None:
    """Up within 1 to 3 steps, held for a third, then down; 7 in 10 show in the gradient norm, up to 2 steps before.

    The decay goes on past the event's end, under what anybody would call part of it.
    """
    rng = c.rng
    rise, held = int(rng.integers(1, 4)) if steps > 8 else 1, max(1, steps // 3)
    at_step = np.arange(min(2 * steps, len(c) - at))
    shape = np.minimum(1.0, (at_step + 1) / rise) * np.exp(-2.0 * np.maximum(0, at_step - held) / max(1, steps - held))
    c.trend[at : at + len(shape)] += height * shape
    if react and rng.random() < 0.7:
        _react(c, at - int(rng.integers(0, 3)), steps, rng.uniform(0.5, 6))


def _react(c: HealthyRun, at: int, steps: int, times: float) -> None:
    c.norm[at : at + steps] *= 1 + times * np.exp(-np.arange(steps) / (1 + steps / 3))


def _finish(c: HealthyRun, kind: str, seed: int, start: int, end: int) -> Curve:
    return c.cut(min(len(c), end + TAIL)).curve(kind, seed, events=[Event(kind, start, end)])


MAKERS: dict[str, Maker] = {
    maker.__name__: maker
    for maker in (
        spike_small,
        spike_large,
        spike_early,
        spike_steep,
        spike_burst,
        spike_persistent,
        spike_single,
        grad_lead,
        grad_explosion,
        divergence_fast,
        divergence_slow,
        divergence_oscillating,
        collapse_to_uniform,
        nan,
        nan_grad,
        fp16_overflow,
        level_shift_up,
        hard_spike,
        spike_fast_start,
        hard_divergence,
    )
}
