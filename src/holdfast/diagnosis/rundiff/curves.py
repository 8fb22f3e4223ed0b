"""Compares two curves at equal tokens: medians of segments, and whether their gap exceeds the noise.

The noise comes from differences of neighbouring steps, which a slow trend does not affect. The gap of two medians of n
steps each has a standard error of about 1.25 noise / sqrt(n). Two curves part if the gap exceeds `MIN_SIGMAS` standard
errors in three consecutive segments, or in the mean of all segments to the end. It must also exceed `MIN_GAP` of the level.
"""

from __future__ import annotations

import itertools
import math
from typing import Literal, NamedTuple

import numpy as np

from holdfast.diagnosis.rundiff.compared_run import Array, ComparedRun
from holdfast.diagnosis.rundiff.report import CurveComparison

MAX_SEGMENTS = 60
MIN_SIGMAS = 4.0
MIN_GAP = 0.002
_CONSECUTIVE = 3
_SHAPE_ERROR = 0.02

Axis = Literal["tokens", "samples", "steps"]


def common_axis(a: ComparedRun, b: ComparedRun) -> tuple[Axis, str | None]:
    """Return the axis that both runs have, and a note unless it is tokens."""
    names: tuple[Axis, ...] = ("tokens", "samples")
    for name in names:
        if a.axis(name) is not None and b.axis(name) is not None:
            return name, None if name == "tokens" else "compared at equal samples: the sequence length is not recorded"
    lacking = " and ".join(name for name, run in (("A", a), ("B", b)) if run.tokens is None)
    return "steps", f"compared at equal steps: no tokens per step recorded for {lacking}"


class SmoothedCurve(NamedTuple):
    """Holds medians of segments of the common range."""

    x: Array
    values: Array
    counts: Array


class CurvePair(NamedTuple):
    """Holds both curves along the common axis, over the range that both have."""

    a: SmoothedCurve
    b: SmoothedCurve
    noise: float


def smooth_pair(a: ComparedRun, b: ComparedRun, name: str, axis: Axis) -> CurvePair | None:
    """Smooth both curves; return None if one is missing or they have no common range."""
    both = [_points(run, name, axis) for run in (a, b)]
    if any(len(x) < 2 for x, _ in both):
        return None
    low, high = max(x[0] for x, _ in both), min(x[-1] for x, _ in both)
    if not high > low:
        return None
    count = int(min(MAX_SEGMENTS, max(4, min(((x >= low) & (x <= high)).sum() for x, _ in both) // 4)))
    edges = np.linspace(low, high, count + 1)
    smooth = [_smooth(x, y, edges) for x, y in both]
    # The LR is set, not measured: its changes are the schedule, not noise.
    return CurvePair(smooth[0], smooth[1], 0.0 if name == "lr" else max(_noise(y) for _, y in both))


def interpolate(curve: SmoothedCurve, count: int) -> list[tuple[float, float]]:
    """Interpolate the medians linearly; return `count` points."""
    x = np.linspace(curve.x[0], curve.x[-1], count)
    return list(zip(x.tolist(), np.interp(x, curve.x, curve.values).tolist(), strict=True))


def _points(run: ComparedRun, name: str, axis: Axis) -> tuple[Array, Array]:
    y, x = run.column(name), run.axis(axis)
    if y is None or x is None:
        return np.empty(0), np.empty(0)
    finite = np.isfinite(y) & np.isfinite(x)
    return x[finite], y[finite]


def _smooth(x: Array, y: Array, edges: Array) -> SmoothedCurve:
    middle = (edges[1:] + edges[:-1]) / 2
    indices = np.searchsorted(x, edges, side="left")
    indices[-1] = np.searchsorted(x, edges[-1], side="right")
    values = np.interp(middle, x, y)  # for segments without a record
    for i, (start, stop) in enumerate(itertools.pairwise(indices)):
        if stop > start:
            values[i] = np.median(y[start:stop])
    return SmoothedCurve(middle, values, np.maximum(np.diff(indices).astype(float), 1.0))


def _noise(y: Array) -> float:
    """Return the standard deviation of one step around its trend."""
    if len(y) < 3:
        return 0.0
    steps = np.diff(y)
    return float(1.4826 * np.median(np.abs(steps - np.median(steps))) / math.sqrt(2))


def compare(a: ComparedRun, b: ComparedRun, name: str, axis: Axis) -> CurveComparison | None:
    """Compare one signal; return None if the runs have no common range of it."""
    pair = smooth_pair(a, b, name, axis)
    if pair is None:
        return None
    left, right, noise = pair
    gap = right.values - left.values
    error = 1.2533 * noise * np.sqrt(1 / left.counts + 1 / right.counts)
    level = np.maximum(np.abs(left.values), 1e-12)
    is_beyond = (np.abs(gap) > MIN_SIGMAS * error) & (np.abs(gap) > MIN_GAP * level)
    starts = [_consecutive_start(is_beyond, np.sign(gap)), _persistent_start(gap, error, level)]
    first = min((start for start in starts if start is not None), default=None)
    tail = slice(-max(1, len(gap) // 10), None)
    a_end, b_end = float(np.median(left.values[tail])), float(np.median(right.values[tail]))
    at = None if first is None else float(left.x[first])
    return CurveComparison(
        signal=name,
        points=len(gap),
        a_end=a_end,
        b_end=b_end,
        gap=(b_end - a_end) / max(abs(a_end), 1e-12),
        noise=noise / max(abs(a_end), 1e-12),
        parted=first is not None,
        parts_at_step=None if at is None else step_at(a, axis, at),
        parts_at_tokens=at if axis == "tokens" else None,
        identical_steps=count_identical(a, b, name),
    )


def _consecutive_start(is_beyond: np.ndarray, sign: Array) -> int | None:
    """Return the first of three consecutive segments beyond the limit on one side, or of fewer up to the end.

    A signal that is mostly noise has single segments beyond any limit, so the gap must keep its sign.
    """
    for i in np.flatnonzero(is_beyond):
        row = slice(i, min(len(is_beyond), i + _CONSECUTIVE))
        if is_beyond[row].all() and len(set(sign[row])) == 1 and (i + _CONSECUTIVE <= len(is_beyond) or i > 0):
            return int(i)
    return None


def _persistent_start(gap: Array, error: Array, level: Array) -> int | None:
    """Return the first segment of a gap that is small in each segment but present in all that follow."""
    weight = 1 / np.maximum(error, 1e-12 * level) ** 2
    total = np.cumsum(weight[::-1])[::-1]
    mean = np.cumsum((gap * weight)[::-1])[::-1] / total
    sigmas = np.abs(mean) * np.sqrt(total)
    at = int(np.argmax(sigmas))
    return at if sigmas[at] > MIN_SIGMAS and abs(mean[at]) > MIN_GAP * level[at] else None


def step_at(run: ComparedRun, axis: Axis, x: float) -> float:
    """Return the step of a run at a position on the axis."""
    positions = run.axis(axis)
    assert positions is not None
    return float(round(float(np.interp(x, positions, run.step))))


def count_identical(a: ComparedRun, b: ComparedRun, name: str) -> int:
    """Count the first steps with the same number and a bit-identical value."""
    left, right = a.columns.get(name), b.columns.get(name)
    if left is None or right is None:
        return 0
    count = min(len(left), len(right))
    left, right = left[:count], right[:count]
    same = (a.step[:count] == b.step[:count]) & ((left == right) | (np.isnan(left) & np.isnan(right)))
    return count if same.all() else int(np.argmin(same))


class LrSchedule(NamedTuple):
    """Holds the key numbers of an LR curve."""

    peak: float
    warmup: float
    """steps until the LR is within 1% of the peak"""
    final: float
    integral: float
    """sum of the LR over the steps"""
    shape: str

    def __str__(self) -> str:
        warmup = f"warm-up {self.warmup:.0f} steps, " if self.warmup > 1 else ""
        return f"peak {self.peak:.3g}, {warmup}{self.shape}, final {self.final:.3g}, sum {self.integral:.4g}"


def lr_schedule(run: ComparedRun) -> LrSchedule | None:
    """Return the scheduled LR, without the cuts by recoveries; None without an LR."""
    lr = run.column("lr")
    if lr is None:
        return None
    finite = np.isfinite(lr)
    step, values = run.step[finite], (lr / recovery_factor(run))[finite]
    if len(values) < 2:
        return None
    peak = float(values.max())
    top = int(np.argmax(values >= 0.99 * peak))
    integral = float((values * np.append(np.diff(step), 1.0)).sum())
    return LrSchedule(peak, float(step[top]), float(values[-1]), integral, _shape(values[top:], peak))


def recovery_factor(run: ComparedRun) -> Array:
    """Return the factor of recoveries on the LR at every step. A later cut replaces an earlier one."""
    factor = np.ones(len(run.step))
    for recovery in run.recoveries or ():
        if recovery.action == "cut_lr":
            progress = (run.step - recovery.first) / max(1, recovery.last - recovery.first + 1)
            ramp = np.where(progress < 1, recovery.factor + (1 - recovery.factor) * progress, 1.0)
            factor = np.where(run.step >= recovery.first, ramp, factor)
    return factor


def _shape(values: Array, peak: float) -> str:
    """Return the name of the closest usual decay, or "another shape"."""
    if peak <= 0 or len(values) < 4:
        return "too short to name"
    share, progress = values / peak, np.linspace(0.0, 1.0, len(values))
    end = float(share[-1])
    if end > 0.98 and share.min() > 0.95:
        return "constant"
    flat = int(np.argmax(share < 0.99)) / len(share)
    shapes = {
        "cosine decay": end + (1 - end) * 0.5 * (1 + np.cos(np.pi * progress)),
        "linear decay": 1 - (1 - end) * progress,
        "inverse square root": 1 / np.sqrt(1 + progress * (1 / max(end, 1e-3) ** 2 - 1)),
    }
    if flat > 0.2:
        tail = np.clip((progress - flat) / max(1e-9, 1 - flat), 0, 1)
        shapes["stable, then decay"] = 1 - (1 - end) * tail
        shapes["stable, then cosine"] = end + (1 - end) * 0.5 * (1 + np.cos(np.pi * tail))
    errors = {name: float(np.mean(np.abs(share - shape))) for name, shape in shapes.items()}
    best = min(errors, key=errors.__getitem__)
    return best if errors[best] < _SHAPE_ERROR else "another shape"
