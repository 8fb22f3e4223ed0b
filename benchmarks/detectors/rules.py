"""Published rules, written from their sources and named after them, defects included.

Each has one kind of alarm. Where what its authors do on it is to skip or clip one step, it counts as cheap; where it is
to stop, restart, roll back or call a person, as costly. What a rule does with NaN is what its source does.
"""

from __future__ import annotations

import math
from collections import deque

from benchmarks.detectors.alarms import Rule
from benchmarks.detectors.window import Window


class Sigma(Rule):
    """loss > mean + k deviations of the last n. The stability tree: k = 3, n = 100; NaN or Inf is its first question.

    A NaN stays in the window, and every comparison is False for n steps; the spike itself enters the window too.
    """

    acts = "a person looks"

    def __init__(self, threshold: float = 3.0, window: int = 100) -> None:
        self.name = f"{threshold:g}-sigma/{window}"
        self.sweep = (2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0) if window == 100 else (4.0, 5.0, 7.0, 10.0, 15.0)
        self._k, self._n = threshold, window

    def reset(self) -> None:
        self._window = Window(self._n)

    def observe(self, step: int, loss: float, grad_norm: float | None) -> bool:
        window = self._window
        # "for t > 100"; the longer window is let off with the same, to its advantage
        alarm = not math.isfinite(loss) or (
            len(window) >= 100 and loss > window.mean() + self._k * window.deviation(unbiased=False)
        )
        window.push(loss)
        return alarm


class CurryTrain(Rule):
    """loss > 5 x the minimum of the last 1000, held for 100 steps (LossSpikeWatchdog, defaults).

    As written: nothing before 1,000 steps; `_spike_start or step` forgets a start at step 0; no latch, so it fires on
    every step from the hundredth on; NaN compares False, and as the oldest value it makes the minimum itself NaN.
    """

    name = "curry-train"
    acts = "roll back ~100 steps before the start, skip 200 batches"
    sweep = (1.2, 1.5, 2.0, 3.0, 5.0)

    def __init__(self, threshold: float = 5.0, sustain: int = 100, history: int = 1000) -> None:
        self._ratio, self._sustain, self._history = threshold, sustain, history

    def reset(self) -> None:
        self._recent: deque[float] = deque(maxlen=self._history)
        self._lows: deque[tuple[int, float]] = deque()
        self._count = 0
        self._start: int | None = None

    def observe(self, step: int, loss: float, grad_norm: float | None) -> bool:
        self._recent.append(loss)
        self._count += 1
        lows = self._lows
        if loss == loss:  # min() never prefers a NaN that comes later
            while lows and lows[-1][1] >= loss:
                lows.pop()
            lows.append((self._count, loss))
        while lows and lows[0][0] <= self._count - self._history:
            lows.popleft()
        if len(self._recent) < self._history:
            return False
        oldest = self._recent[0]
        low = oldest if oldest != oldest or not lows else lows[0][1]
        if loss > self._ratio * low:
            self._start = self._start or step
            return step - self._start >= self._sustain
        self._start = None
        return False


class Lightning(Rule):
    """Lightning Fabric's SpikeDetection: |loss - mean of 10| >= 2 x mean, and worse than the last (rtol 2, warm-up 1).

    A spike is not taken into the mean, nor is it the last value; NaN and Inf are spikes (`finite_only`). It looks at
    the distance from the mean, so that a loss far below a negative mean would do as well.
    """

    name = "Lightning SpikeDetection"
    acts = "raises; batches to skip are written to a file"
    sweep = (0.1, 0.2, 0.3, 0.5, 1.0, 2.0)

    def __init__(self, threshold: float = 2.0, window: int = 10, warmup: int = 1) -> None:
        self._rtol, self._n, self._warmup = threshold, window, warmup

    def reset(self) -> None:
        self._mean = Window(self._n)
        self._last = 0.0
        self._seen = 0

    def observe(self, step: int, loss: float, grad_norm: float | None) -> bool:
        alarm = self._seen >= self._warmup and self._spike(loss)
        self._seen += 1
        if not alarm:
            self._mean.push(loss)
            self._last = loss
        return alarm

    def _spike(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        if loss - self._last <= 0:
            return False
        mean = self._mean.mean()
        return abs(loss - mean) >= abs(self._rtol * mean)


class KillLossSpike(Rule):
    """llm-foundry's KillLossSpike: loss >= 2 x the mean of max(100, 5% of the run), five times running.

    Or half of that window above the maximum of the first window (at most 10), after two windows. NaN is never an outlier,
    ends a streak, and makes the mean NaN for a whole window.
    """

    name = "llm-foundry KillLossSpike"
    acts = "logs, or kills the run"
    sweep = (1.05, 1.1, 1.25, 1.5, 2.0, 3.0)

    def __init__(self, threshold: float = 2.0, patience: int = 4, run_length: int = 4000, cap: float = 10.0) -> None:
        self._times, self._patience, self._cap = threshold, patience, cap
        self._n = max(100, round(0.05 * run_length))

    def reset(self) -> None:
        self._window = Window(self._n)
        self._streak = self._seen = self._above = 0
        self._high: float | None = None

    def observe(self, step: int, loss: float, grad_norm: float | None) -> bool:
        window, alarm = self._window, False
        if window.full:
            if self._high is None:
                self._high = min(max(window.values), self._cap)
                self._above = sum(v > self._high for v in window.values)
            alarm = self._outlier(loss, window.mean()) or (self._seen >= 2 * self._n and self._above >= self._n / 2)
            self._above -= window.values[0] > self._high
        window.push(loss)
        if self._high is not None:
            self._above += loss > self._high
        self._seen += 1
        return alarm

    def _outlier(self, loss: float, mean: float) -> bool:
        if loss >= mean * self._times:
            self._streak += 1
            return self._streak > self._patience
        self._streak = 0
        return False


class SkipStep(Rule):
    """OLMo-core's SkipStepOptimizer: loss (or gradient norm) > mean + 6 deviations of the last 128, from 64 on.

    What it skips stays in the window. NaN is not <= anything: the step is skipped, and so is each of the next 128, whose
    window holds it.
    """

    acts = "skips the step"
    costly = False
    sweep = (3.0, 4.0, 6.0, 8.0, 12.0, 20.0)

    def __init__(self, threshold: float = 6.0, window: int = 128, norms: bool = True) -> None:
        self.name = "OLMo-core SkipStep, loss or norm" if norms else "OLMo-core SkipStep, loss"
        self._sigma, self._n, self._norms = threshold, window, norms

    def reset(self) -> None:
        self._loss, self._norm = Window(self._n), Window(self._n)

    def observe(self, step: int, loss: float, grad_norm: float | None) -> bool:
        enough = len(self._loss) + 1 >= self._n // 2
        alarm = enough and not (
            self._within(self._loss, loss) and (not self._norms or self._within(self._norm, grad_norm))
        )
        self._loss.push(loss)
        if grad_norm is not None:
            self._norm.push(grad_norm)
        return alarm

    def _within(self, window: Window, value: float | None) -> bool:
        return value is None or value - window.mean() <= self._sigma * window.deviation(unbiased=True)


class Megatron(Rule):
    """Megatron's rerun state machine: |loss| >= 10 x the largest of the first 100, which is then frozen.

    NaN and Inf are a check of their own, and fatal.
    """

    name = "Megatron rerun"
    acts = "runs the step again, then exits with 16 or 17"
    sweep = (1.0, 1.1, 1.5, 2.0, 5.0, 10.0)

    def __init__(self, threshold: float = 10.0, samples: int = 100) -> None:
        self._times, self._samples = threshold, samples

    def reset(self) -> None:
        self._count, self._largest = 0, 0.0

    def observe(self, step: int, loss: float, grad_norm: float | None) -> bool:
        value = abs(loss)
        if not math.isfinite(value):
            return True
        if self._count < self._samples:
            self._count += 1
            self._largest = max(self._largest, value)
            return False
        return value >= self._largest * self._times


class ZClip(Rule):
    """ZClip: gradient norm with z > 2.5 against moving averages (0.97) of mean and variance, begun from 25 steps.

    What is clipped enters at its clipped size, mean + (2.5 deviations) / (z / 2.5). A NaN norm makes both averages NaN,
    and it never clips again.
    """

    name = "ZClip"
    acts = "clips the step"
    costly = False
    sweep = (2.5, 4.0, 6.0, 10.0, 20.0, 50.0)

    def __init__(self, threshold: float = 2.5, alpha: float = 0.97, warmup: int = 25, eps: float = 1e-6) -> None:
        self._z, self._alpha, self._warmup, self._eps = threshold, alpha, warmup, eps

    def reset(self) -> None:
        self._first: list[float] = []
        self._mean = self._var = 0.0

    def observe(self, step: int, loss: float, grad_norm: float | None) -> bool:
        if grad_norm is None:
            return False
        first = self._first
        if len(first) < self._warmup:
            first.append(grad_norm)
            if len(first) == self._warmup:
                self._mean = sum(first) / self._warmup
                self._var = sum((x - self._mean) ** 2 for x in first) / self._warmup
            return False
        deviation = math.sqrt(self._var)
        z = (grad_norm - self._mean) / (deviation + self._eps)
        alarm = z > self._z
        taken = self._mean + self._z * deviation / (z / self._z) if alarm else grad_norm
        self._mean = self._alpha * self._mean + (1 - self._alpha) * taken
        self._var = self._alpha * self._var + (1 - self._alpha) * (taken - self._mean) ** 2
        return alarm


def seven_sigma(threshold: float = 7.0) -> Sigma:
    """The first rule with a longer memory and a wider margin."""
    return Sigma(threshold, 1000)


def skip_step_loss(threshold: float = 6.0) -> SkipStep:
    return SkipStep(threshold, norms=False)


RULES = {
    "3-sigma/100": Sigma,
    "7-sigma/1000": seven_sigma,
    "curry-train": CurryTrain,
    "lightning": Lightning,
    "llm-foundry": KillLossSpike,
    "olmo-loss": skip_step_loss,
    "olmo": SkipStep,
    "megatron": Megatron,
    "zclip": ZClip,
}
"""name on the command line -> maker, which takes a threshold and has the published one as its default"""
