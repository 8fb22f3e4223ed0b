"""Finds incidents in a few records, such as lines pasted into an issue. Statistics need more records than that.

A leap of the loss counts if a second signal agrees: the gradient norm is tenfold, the loss scale is quartered, the loss
stays up or climbs further, or it is above the logarithm of the vocabulary. A steady climb counts too.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from holdfast.diagnosis.find.excursions import nonfinite_episodes
from holdfast.diagnosis.find.losses import Floats, Losses
from holdfast.diagnosis.model import window
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Table

Indices = NDArray[np.intp]
MIN_RECORDS, MAX_RECORDS = 3, 24
_LEAP, _LEAP_NOISE = 1.4, 5.0
_GRADIENT_RATIO, _SCALE_RATIO = 10.0, 0.25
_CLIMB_RECORDS = 4


def find(losses: Losses) -> list[Episode]:
    """Return non-finite losses, and the first leap or climb of the others."""
    episodes = nonfinite_episodes(losses)
    finite = np.flatnonzero(losses.finite)
    loss = losses.loss[finite]
    if len(loss) < MIN_RECORDS or (loss <= 0).any() or losses.shifts:
        return episodes
    for at in range(1, len(loss)):
        level, noise = _baseline(loss[:at])
        if at == 1 and (loss[1] < 2.0 * level or len(loss) < 10):
            continue  # the first update may overshoot
        if loss[at] < _LEAP * level or loss[at] - level < _LEAP_NOISE * noise or loss[at] < 1.2 * loss[:at].max():
            continue
        signals = _second_signals(losses.table, losses.rows[finite], loss, at, level)
        if signals:
            return [*episodes, _episode(losses, finite, loss, at, level, signals)]
    if climb := _climb(loss):
        episodes.append(_episode(losses, finite, loss, climb, float(loss[climb - 1]), ["the loss climbs to the end"]))
    return episodes


def _baseline(before: Floats) -> tuple[float, float]:
    """Return level and noise of the records before. A loss that still falls has the last records as its level."""
    level = float(np.median(before[-5:]))
    if len(before) < 3:
        return max(level, float(before[-1])), 0.0
    return level, 1.4826 * float(np.median(np.abs(np.diff(before)))) / math.sqrt(2.0)


def _second_signals(table: Table, rows: Indices, loss: Floats, at: int, level: float) -> list[str]:
    row = int(rows[at])
    first, stop = int(rows[max(0, at - 2)]), int(rows[min(len(rows) - 1, at + 1)]) + 1
    signals = []
    usual, near = window.finite(table, "grad_norm", 0, first), window.finite(table, "grad_norm", first, stop)
    if at == 1:
        usual = window.finite(table, "grad_norm", stop)
    if len(usual) and len(near) and float(near.max()) >= _GRADIENT_RATIO * float(np.median(usual)) > 0:
        signals.append(f"the gradient norm goes from {np.median(usual):.3g} to {near.max():.3g}")
    scale = window.finite(table, "loss_scale", max(0, row - 2), row + 3)
    if len(scale) > 1 and scale[-1] <= _SCALE_RATIO * scale[0]:
        signals.append(f"the loss scale falls from {scale[0]:g} to {scale[-1]:g}")
    after = loss[at:]
    if len(after) >= 3 and float(after.min()) >= 1.3 * level:
        signals.append(f"the loss stays up for {len(after)} records")
    elif len(after) >= 2 and bool((np.diff(after[:3]) > 0).all()) and after[1] > 1.2 * after[0]:
        signals.append("the loss climbs further")
    size = window.find_fact(table, "vocab_size", "vocabulary", "n_vocab")
    if isinstance(size, int | float) and size > 1 and loss[at] > math.log(size) > level:
        signals.append(f"the loss is above ln({size:g}), that of a guess")
    return signals


def _climb(loss: Floats) -> int:
    """Return the index at which a climb to the end of the fragment begins; 0 without one."""
    best = int(np.argmin(loss))
    rest = loss[best:]
    if len(rest) <= _CLIMB_RECORDS or best < 2 or loss[-1] < _LEAP * loss[best]:
        return 0
    return best + 1 if bool((np.diff(rest) > 0).all()) else 0


def _episode(losses: Losses, finite: Indices, loss: Floats, at: int, level: float, signals: list[str]) -> Episode:
    low = np.flatnonzero(loss[at + 1 :] <= 1.15 * level) + 1
    last = at + int(low[0]) - 1 if len(low) else len(loss) - 1
    kind = "spike_recovered" if len(low) else "divergence" if len(loss) - at >= 3 else "spike"
    peak = float(loss[at : last + 1].max())
    evidence = {"level": level, "peak": peak, "ratio": peak / level, "rows": last - at + 1, "signals": signals}
    return losses.episode(kind, int(finite[at]), int(finite[last]), 0.7, evidence=evidence)
