"""The losses of a log as the detectors see them: read once, looked at once, for all who ask.

A log of up to a few hundred thousand records goes through the detectors row by row. In a longer one they are shown every
stretch that could hold an incident, with enough before it to learn from; a stretch is left out where no few records in a
row are out together and none alone is a quarter above its neighbourhood. What is slow by nature (divergence, plateau, a
record that stands still) is looked for in medians of a few records.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding
from holdfast.core.detectors import build
from holdfast.core.detectors.baseline import NORMAL_TAIL
from holdfast.core.detectors.expected_shifts import LR_JUMP
from holdfast.core.detectors.scan import LogRows, find_shifts, scan
from holdfast.diagnosis.model.table import Table

Floats = NDArray[np.float64]
LEAST_POINTS = 12
BEFORE = 30
_NEW_START = 60
_WHOLE = 200_000
_LEARN, _AFTERWARDS = 1500, 200
_BLOCK, _FEW = 256, 5
_THINNED = 100_000


class Seen(NamedTuple):
    """A finding, and its place among the records that have a loss."""

    place: int
    finding: Finding


class Losses:
    """The records that have a loss, where the detectors start anew, and what they found."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.rows = np.flatnonzero(table.present["loss"])
        self.step: Floats = table.step[self.rows]
        self.loss: Floats = table.columns["loss"][self.rows]
        self.finite = np.isfinite(self.loss)
        self.negative = bool((self.loss[self.finite] < 0).any())
        """a reward, a bound, a log likelihood of densities: such losses swing, and may rise and mean no harm"""
        self.settings = settings(len(self.loss), table.step_interval())
        self.shifts = self._shifts()
        self.findings: list[Seen] = []
        if len(self.loss) >= LEAST_POINTS:
            whole = len(self.loss) <= _WHOLE
            self.findings = self._scanned(0, len(self.loss)) if whole else [*self._hot(), *self._slow()]

    def _shifts(self) -> list[int]:
        back = np.flatnonzero(np.diff(self.step) < 0) + 1
        return sorted({*back.tolist(), *(find_shifts(LogRows(self.table)) if self._may_shift() else ())})

    def _may_shift(self) -> bool:
        """Whether the learning rate ever jumps, or batch or length ever change."""
        table = self.table
        with np.errstate(all="ignore"):
            lr = table.series("lr").value
            if len(lr) > 1 and bool((lr[1:] > LR_JUMP * lr[:-1]).any()):
                return True
            for name in ("batch_size", "sequence_length"):
                values = table.series(name).value
                if len(values) and bool((values != values[0]).any()):
                    return True
        return False

    def _scanned(self, first: int, stop: int, since: int = 0) -> list[Seen]:
        """What the detectors find between two places, from place `since` on."""
        part = _cut(self.table, self.rows[first:stop])
        declared = [place - first for place in self.shifts if first < place < stop]
        found = scan(part, self.settings, shifts=declared)
        return [Seen(first + place, finding) for place, finding in found if first + place >= since]

    def _hot(self) -> list[Seen]:
        """The detectors over the stretches that could hold an alarm."""
        found: list[Seen] = []
        done = 0
        for first, stop in _stretches(self._out(), len(self.loss)):
            since = max(done, first)
            found += self._scanned(max(0, first - _LEARN), stop, since)
            done = stop
        return found

    def _out(self) -> NDArray[np.intp]:
        """The places whose neighbourhood has something far above it, the first ones, and those after a shift."""
        early = np.arange(min(2 * _BLOCK, len(self.loss)))
        return np.unique(np.concatenate([early, _outliers(self.loss), np.asarray(self.shifts, dtype=np.intp)]))

    def _slow(self) -> list[Seen]:
        joined = -(-len(self.loss) // _THINNED)
        ends = np.minimum(np.arange(joined, len(self.loss) + joined, joined), len(self.loss)) - 1
        part = _cut(self.table, self.rows[ends])
        part.columns["loss"] = _medians(self.loss, joined)
        declared = np.searchsorted(ends, self.shifts).tolist()
        quick = _slow_only(self.settings)
        found = scan(part, quick, shifts=declared, detectors=build(quick))
        return [Seen(int(ends[place]), finding) for place, finding in found]

    def near_shift(self, place: int) -> int | None:
        """The shift a place lies just behind, if any."""
        behind = [s for s in self.shifts if s <= place + 1 and place - s <= _NEW_START]
        return behind[-1] if behind else None

    def since_shift(self, place: int) -> int:
        return max((s for s in self.shifts if s <= place), default=0)

    def before(self, place: int) -> Floats:
        """The finite losses just before a place, since the last shift."""
        part = self.loss[max(self.since_shift(place), place - BEFORE) : place]
        return part[np.isfinite(part)]

    def place_of(self, step: float, before: int) -> int:
        """The place of a step at or before another place; steps rise between two shifts."""
        since = self.since_shift(before)
        return min(before, since + int(np.searchsorted(self.step[since : before + 1], step)))


def settings(points: int, interval: float) -> DetectSection:
    """The detectors as online; a short log cannot spare as many records to learn from."""
    patience = max(200.0, 0.25 * points) * interval
    return DetectSection(warmup_steps=max(8, min(40, points // 8)), plateau_steps=max(1, int(min(patience, 1e9))))


def _slow_only(config: DetectSection) -> DetectSection:
    """Only what is slow by nature."""
    return DetectSection(
        warmup_steps=config.warmup_steps,
        plateau_steps=config.plateau_steps,
        nonfinite=False,
        loss_spike=False,
        grad_spike=False,
        update_spike=False,
    )


def _cut(table: Table, rows: NDArray[np.intp]) -> Table:
    columns = {name: column[rows] for name, column in table.columns.items()}
    present = {name: there[rows] for name, there in table.present.items()}
    return replace(table, step=table.step[rows], columns=columns, present=present)


def _medians(values: Floats, joined: int) -> Floats:
    """The median of every few, those that are not finite left out; NaN where all are."""
    block = np.full(-(-len(values) // joined) * joined, np.nan)
    block[: len(values)] = np.where(np.isfinite(values), values, np.nan)
    rows = block.reshape(-1, joined)
    middles: Floats = np.median(rows, axis=1)
    some = np.flatnonzero(np.isnan(middles) & ~np.isnan(rows).all(axis=1))
    middles[some] = np.nanmedian(rows[some], axis=1)
    return middles


def _outliers(values: Floats) -> NDArray[np.intp]:
    """Places where a few in a row are out together, or one alone that is a quarter above the rest.

    Out is meant in deviations of the block, for a tail like this log's, and above what a few in a row are by chance.
    """
    count = -(-len(values) // _BLOCK)
    padded = np.full(count * _BLOCK, np.nan)
    padded[: len(values)] = np.where(np.isfinite(values), values, np.nan)
    block = padded.reshape(count, _BLOCK)
    block[np.isnan(block).all(axis=1)] = 0.0
    with np.errstate(all="ignore"):
        middle = np.nanmedian(block, axis=1)
        spread = 1.4826 * np.nanmedian(np.abs(block - middle[:, None]), axis=1) + 1e-3 * np.abs(middle) / 4 + 1e-12
        lower, tight = _with_the_one_before(middle), _with_the_one_before(spread)
        far = np.nan_to_num(((block - lower[:, None]) / tight[:, None]).ravel(), nan=0.0)
        tail = max(1.0, float(np.quantile(far, 0.99)) / NORMAL_TAIL)
        few = np.convolve(far.clip(-6.0 * tail, 6.0 * tail), np.ones(_FEW) / _FEW, "same")
        chance = 1.4826 * float(np.median(np.abs(few - np.median(few))))
        alone = (far > 4.0 * tail) & (block > (lower + 0.2 * np.abs(lower))[:, None]).ravel()
        out = alone | (few > max(2.2 * tail, 5.0 * chance))
    return np.flatnonzero(out[: len(values)])


def _with_the_one_before(values: Floats) -> Floats:
    """The lower of each and the one before it: a block that is out as a whole is measured by its neighbour."""
    return np.minimum(values, np.append(values[:1], values[:-1]))


def _stretches(places: NDArray[np.intp], count: int) -> list[tuple[int, int]]:
    """The places with room after each, joined where they touch."""
    if not len(places):
        return []
    groups = np.split(places, np.flatnonzero(np.diff(places) > _LEARN + _AFTERWARDS) + 1)
    return [(int(g[0]), min(count, int(g[-1]) + _AFTERWARDS)) for g in groups]
