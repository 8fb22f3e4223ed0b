"""Two curves of the same thing, compared at equal tokens: medians of stretches, and whether their gap is more than noise.

Noise is taken from the differences of neighbouring steps, which no slow trend gets into. The gap of two medians of n steps
each has a standard error of about 1.25 noise / sqrt(n). Curves have parted where the gap is beyond `BEYOND` of those in
three stretches in a row, or where the mean gap from some stretch to the end is; and beyond `LEAST` of the level.
"""

from __future__ import annotations

import itertools
import math
from typing import Literal, NamedTuple

import numpy as np

from holdfast.diagnosis.rundiff.report import Curve
from holdfast.diagnosis.rundiff.side import Array, Side

STRETCHES = 60
BEYOND = 4.0
LEAST = 0.002
_IN_A_ROW = 3
_STEADY = 0.02

Axis = Literal["tokens", "samples", "steps"]


def common_axis(a: Side, b: Side) -> tuple[Axis, str | None]:
    """What both can be laid along, and what to say where it is not tokens."""
    names: tuple[Axis, ...] = ("tokens", "samples")
    for name in names:
        if a.axis(name) is not None and b.axis(name) is not None:
            return name, None if name == "tokens" else "compared at equal samples: the sequence length is not on record"
    lack = [n for n, side in (("A", a), ("B", b)) if side.tokens is None]
    says = "do not say" if len(lack) > 1 else "does not say"
    return "steps", f"compared at equal steps: {' and '.join(lack)} {says} how many tokens a step takes"


class Smooth(NamedTuple):
    """Medians of stretches of the common range."""

    x: Array
    values: Array
    counts: Array


class Pair(NamedTuple):
    """A curve of each, along the common axis, over the range both have."""

    a: Smooth
    b: Smooth
    noise: float


def pair(a: Side, b: Side, name: str, axis: Axis) -> Pair | None:
    """None where one has no such curve, or they have no range in common."""
    both = [_points(side, name, axis) for side in (a, b)]
    if any(len(x) < 2 for x, _ in both):
        return None
    low, high = max(x[0] for x, _ in both), min(x[-1] for x, _ in both)
    if not high > low:
        return None
    count = int(min(STRETCHES, max(4, min(((x >= low) & (x <= high)).sum() for x, _ in both) // 4)))
    edges = np.linspace(low, high, count + 1)
    smooth = [_smooth(x, y, edges) for x, y in both]
    # The LR is set, not measured: what moves in it is the schedule.
    return Pair(smooth[0], smooth[1], 0.0 if name == "lr" else max(_noise(y) for _, y in both))


def joined(smooth: Smooth, count: int) -> list[tuple[float, float]]:
    """The medians with straight lines between them, as so many points."""
    along = np.linspace(smooth.x[0], smooth.x[-1], count)
    return list(zip(along.tolist(), np.interp(along, smooth.x, smooth.values).tolist(), strict=True))


def _points(side: Side, name: str, axis: Axis) -> tuple[Array, Array]:
    y, x = side.column(name), side.axis(axis)
    if y is None or x is None:
        return np.empty(0), np.empty(0)
    there = np.isfinite(y) & np.isfinite(x)
    return x[there], y[there]


def _smooth(x: Array, y: Array, edges: Array) -> Smooth:
    middle = (edges[1:] + edges[:-1]) / 2
    places = np.searchsorted(x, edges, side="left")
    places[-1] = np.searchsorted(x, edges[-1], side="right")
    values, counts = np.full(len(middle), np.nan), np.diff(places).astype(float)
    for i, (start, stop) in enumerate(itertools.pairwise(places)):
        if stop > start:
            values[i] = np.median(y[start:stop])
        else:  # logged more coarsely than the stretches: between its neighbours
            values[i] = np.interp(middle[i], x, y)
    return Smooth(middle, values, np.maximum(counts, 1.0))


def _noise(y: Array) -> float:
    """The standard deviation of one step about its trend."""
    if len(y) < 3:
        return 0.0
    steps = np.diff(y)
    return float(1.4826 * np.median(np.abs(steps - np.median(steps))) / math.sqrt(2))


def compare(a: Side, b: Side, name: str, axis: Axis) -> Curve | None:
    found = pair(a, b, name, axis)
    if found is None:
        return None
    left, right, noise = found
    gap = right.values - left.values
    error = 1.2533 * noise * np.sqrt(1 / left.counts + 1 / right.counts)
    level = np.maximum(np.abs(left.values), 1e-12)
    # A gradient norm or a loss that is mostly noise has stretches beyond any limit: the gap must stay on one side.
    beyond = (np.abs(gap) > BEYOND * error) & (np.abs(gap) > LEAST * level)
    found_at = [i for i in (_stays(beyond, np.sign(gap)), _to_the_end(gap, error, level)) if i is not None]
    first = min(found_at, default=None)
    last = slice(-max(1, len(gap) // 10), None)
    a_end, b_end = float(np.median(left.values[last])), float(np.median(right.values[last]))
    at = None if first is None else float(left.x[first])
    return Curve(
        signal=name,
        points=len(gap),
        a_end=a_end,
        b_end=b_end,
        gap=(b_end - a_end) / max(abs(a_end), 1e-12),
        noise=noise / max(abs(a_end), 1e-12),
        parted=first is not None,
        parts_at_step=None if at is None else step_at(a, axis, at),
        parts_at_tokens=at if axis == "tokens" else None,
        identical_steps=identical(a, b, name),
    )


def _stays(beyond: np.ndarray, side: Array) -> int | None:
    """The first stretch from which on three in a row, or all to the end, are beyond, on one side."""
    for i in np.flatnonzero(beyond):
        row = slice(i, min(len(beyond), i + _IN_A_ROW))
        if beyond[row].all() and len(set(side[row])) == 1 and (i + _IN_A_ROW <= len(beyond) or i > 0):
            return int(i)
    return None


def _to_the_end(gap: Array, error: Array, level: Array) -> int | None:
    """Where a gap begins that is small in every stretch and yet there in all that follow."""
    weight = 1 / np.maximum(error, 1e-12 * level) ** 2
    total = np.cumsum(weight[::-1])[::-1]
    mean = np.cumsum((gap * weight)[::-1])[::-1] / total
    beyond = np.abs(mean) * np.sqrt(total)
    at = int(np.argmax(beyond))
    return at if beyond[at] > BEYOND and abs(mean[at]) > LEAST * level[at] else None


def step_at(side: Side, axis: Axis, x: float) -> float:
    """The step of a run that a place on the axis belongs to."""
    along = side.axis(axis)
    assert along is not None
    return float(round(float(np.interp(x, along, side.step))))


def identical(a: Side, b: Side, name: str) -> int:
    """How many steps from the first on are the same step with the same value, to the last bit."""
    left, right = a.columns.get(name), b.columns.get(name)
    if left is None or right is None:
        return 0
    count = min(len(left), len(right))
    same = (a.step[:count] == b.step[:count]) & (
        (left[:count] == right[:count]) | (np.isnan(left[:count]) & np.isnan(right[:count]))
    )
    return count if same.all() else int(np.argmin(same))


class Schedule(NamedTuple):
    """An LR curve in short."""

    peak: float
    warmup: float
    """steps until the peak is reached, within 1%"""
    final: float
    integral: float
    """LR summed over the steps"""
    shape: str

    def __str__(self) -> str:
        rises = f"warm-up {self.warmup:.0f} steps, " if self.warmup > 1 else ""
        return f"peak {self.peak:.3g}, {rises}{self.shape}, final {self.final:.3g}, summed {self.integral:.4g}"


def schedule(side: Side) -> Schedule | None:
    """The LR over the steps as it was scheduled: what recoveries took off it is put back."""
    lr = side.column("lr")
    if lr is None:
        return None
    keep = np.isfinite(lr)
    step, values = side.step[keep], (lr / cut(side))[keep]
    if len(values) < 2:
        return None
    peak = float(values.max())
    top = int(np.argmax(values >= 0.99 * peak))
    per_step = np.append(np.diff(step), 1.0)
    return Schedule(
        peak, float(step[top]), float(values[-1]), float((values * per_step).sum()), _shape(values[top:], peak)
    )


def cut(side: Side) -> Array:
    """The factor that recoveries had on the LR, at every step: a later cut takes the place of an earlier one."""
    factor = np.ones(len(side.step))
    for recovery in side.recoveries or ():
        if recovery.action == "cut_lr":
            ramp = max(1, recovery.last - recovery.first + 1)
            done = (side.step - recovery.first) / ramp
            now = np.where(done < 1, recovery.factor + (1 - recovery.factor) * done, 1.0)
            factor = np.where(side.step >= recovery.first, now, factor)
    return factor


def _shape(values: Array, peak: float) -> str:
    """The name of the nearest of the usual decays, or "other"."""
    if peak <= 0 or len(values) < 4:
        return "too short to tell"
    share, progress = values / peak, np.linspace(0.0, 1.0, len(values))
    end = float(share[-1])
    if end > 0.98 and share.min() > 0.95:
        return "constant"
    flat = int(np.argmax(share < 0.99)) / len(share)
    known = {
        "cosine decay": end + (1 - end) * 0.5 * (1 + np.cos(np.pi * progress)),
        "linear decay": 1 - (1 - end) * progress,
        "inverse square root": 1 / np.sqrt(1 + progress * (1 / max(end, 1e-3) ** 2 - 1)),
    }
    if flat > 0.2:
        tail = np.clip((progress - flat) / max(1e-9, 1 - flat), 0, 1)
        known["stable, then decay"] = 1 - (1 - end) * tail
        known["stable, then cosine"] = end + (1 - end) * 0.5 * (1 + np.cos(np.pi * tail))
    errors = {name: float(np.mean(np.abs(share - curve))) for name, curve in known.items()}
    best = min(errors, key=errors.__getitem__)
    return best if errors[best] < _STEADY else "another shape"
