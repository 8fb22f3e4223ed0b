"""Runs the detectors over the losses of a log, once for all users.

A log of up to 200,000 records goes through the detectors row by row. In a longer log the detectors see only the ranges
that could hold an incident, with enough records before each to learn a baseline. A range is left out if it has neither a
few consecutive outliers nor a single record a quarter above its neighbours. Slow conditions (divergence, plateau, a dead
run) are searched in medians of a few records.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding
from holdfast.core.detectors import build
from holdfast.core.detectors.baseline import NORMAL_TAIL
from holdfast.core.detectors.expected_shifts import LR_JUMP
from holdfast.core.detectors.scan import LogRows, find_shifts, scan
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Table

Floats = NDArray[np.float64]
MIN_RECORDS = 12
RECORDS_BEFORE = 30
_NEAR_SHIFT = 60
_FULL_SCAN = 200_000
_LEARN, _FOLLOW = 1500, 200
_ANEW = 4.0
"""times the usual difference of two records, for the first record of an epoch"""
_BLOCK, _FEW = 256, 5
_THINNED = 100_000


class LocatedFinding(NamedTuple):
    """Holds a finding and its index among the records that have a loss."""

    at: int
    finding: Finding


class Losses:
    """Holds the records that have a loss, the shifts where detectors restart, and the findings."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.rows = np.flatnonzero(table.present["loss"])
        self.is_running_sum = _is_running_sum(table.columns["loss"][self.rows])
        """the log sums the losses up until an epoch ends: only the last record of each sum is judged"""
        if self.is_running_sum:
            self.rows = self.rows[:-1][np.diff(table.columns["loss"][self.rows]) < 0]
        self.step: Floats = table.step[self.rows]
        self.loss: Floats = table.columns["loss"][self.rows]
        self.finite = np.isfinite(self.loss)
        self.has_negative = bool((self.loss[self.finite] < 0).any())
        """such losses (rewards, bounds, log likelihoods) swing, and a rise can be harmless"""
        self.settings = settings(len(self.loss), table.step_interval())
        self.shifts = self._find_shifts()
        self.findings: list[LocatedFinding] = []
        if len(self.loss) >= MIN_RECORDS:
            is_short = len(self.loss) <= _FULL_SCAN
            self.findings = self._scan(0, len(self.loss)) if is_short else [*self._scan_hot(), *self._scan_thinned()]

    def _find_shifts(self) -> list[int]:
        back = np.flatnonzero(np.diff(self.step) < 0) + 1
        return sorted({*back.tolist(), *(find_shifts(LogRows(self.table)) if self._may_shift() else ())})

    def _may_shift(self) -> bool:
        """Return whether the learning rate ever jumps, or batch size or sequence length ever change."""
        with np.errstate(all="ignore"):
            lr = self.table.series("lr").value
            if len(lr) > 1 and bool((lr[1:] > LR_JUMP * lr[:-1]).any()):
                return True
            shapes = [self.table.series(name).value for name in ("batch_size", "sequence_length")]
            return any(bool((values != values[:1]).any()) for values in shapes)

    def _scan(self, first: int, stop: int, since: int = 0) -> list[LocatedFinding]:
        """Run the detectors over a range of indices; return the findings from index `since` on."""
        part = _select_rows(self.table, self.rows[first:stop])
        declared = [shift - first for shift in self.shifts if first < shift < stop]
        findings = scan(part, self.settings, shifts=declared)
        return [LocatedFinding(first + i, finding) for i, finding in findings if first + i >= since]

    def _scan_hot(self) -> list[LocatedFinding]:
        """Run the detectors over the start, the shifts, and every range with outliers."""
        early = np.arange(min(2 * _BLOCK, len(self.loss)))
        hot = np.unique(np.concatenate([early, _outliers(self.loss), np.asarray(self.shifts, dtype=np.intp)]))
        findings: list[LocatedFinding] = []
        done = 0
        for first, stop in _ranges(hot, len(self.loss)):
            findings += self._scan(max(0, first - _LEARN), stop, max(done, first))
            done = stop
        return findings

    def _scan_thinned(self) -> list[LocatedFinding]:
        """Run the slow detectors over medians of a few records."""
        size = -(-len(self.loss) // _THINNED)
        ends = np.minimum(np.arange(size, len(self.loss) + size, size), len(self.loss)) - 1
        part = _select_rows(self.table, self.rows[ends])
        part.columns["loss"] = _medians(self.loss, size)
        declared = np.searchsorted(ends, self.shifts).tolist()
        slow = DetectSection(
            warmup_steps=self.settings.warmup_steps,
            plateau_steps=self.settings.plateau_steps,
            nonfinite=False,
            loss_spike=False,
            grad_spike=False,
            update_spike=False,
        )
        findings = scan(part, slow, shifts=declared, detectors=build(slow))
        return [LocatedFinding(int(ends[i]), finding) for i, finding in findings]

    def is_near_shift(self, index: int) -> bool:
        """Return whether an index is at or shortly after a shift."""
        return any(shift <= index + 1 and index - shift <= _NEAR_SHIFT for shift in self.shifts)

    def is_mean_anew(self, index: int) -> bool:
        """Return whether an epoch begins at an index and the log has means since that: the first is one batch alone."""
        epoch = self.table.columns.get("epoch")
        if epoch is None or not index or index >= len(self.loss) or not self.finite.all():
            return False
        begins = np.append(False, np.diff(epoch[self.rows]) > 0)
        leaps = np.abs(np.diff(self.loss, prepend=self.loss[0]))
        if not begins[index] or begins.sum() < 3 or begins.mean() > 0.2:
            return False
        return bool(np.median(leaps[begins]) > _ANEW * np.median(leaps[~begins]))

    def since_shift(self, index: int) -> int:
        return max((shift for shift in self.shifts if shift <= index), default=0)

    def before(self, index: int) -> Floats:
        """Return the finite losses just before an index, since the last shift."""
        part = self.loss[max(self.since_shift(index), index - RECORDS_BEFORE) : index]
        return part[np.isfinite(part)]

    def episode(self, kind: str, first: int, last: int, confidence: float, **more: Any) -> Episode:
        """Return the episode from one index to another."""
        return Episode.at_rows(self.table, kind, int(self.rows[first]), int(self.rows[last]), confidence, **more)

    def index_of_step(self, step: float, before: int) -> int:
        """Return the index of a step, searched between the last shift and index `before`."""
        since = self.since_shift(before)
        return min(before, since + int(np.searchsorted(self.step[since : before + 1], step)))


def settings(records: int, interval: float) -> DetectSection:
    """Return the online settings, with less warm-up for a short log."""
    plateau = max(200.0, 0.25 * records) * interval
    return DetectSection(warmup_steps=max(8, min(40, records // 8)), plateau_steps=max(1, int(min(plateau, 1e9))))


def _is_running_sum(loss: Floats) -> bool:
    """Return whether the loss only grows, again and again from near 0."""
    if len(loss) < 2 * MIN_RECORDS or not np.isfinite(loss).all() or loss.min() < 0:
        return False
    drops = np.flatnonzero(np.diff(loss) < 0)
    if not 3 <= len(drops) <= 0.2 * len(loss):
        return False
    return bool(np.median(loss[drops + 1]) < 0.5 * np.median(loss[drops]))


def _select_rows(table: Table, rows: NDArray[np.intp]) -> Table:
    columns = {name: column[rows] for name, column in table.columns.items()}
    present = {name: logged[rows] for name, logged in table.present.items()}
    return replace(table, step=table.step[rows], columns=columns, present=present)


def _medians(values: Floats, size: int) -> Floats:
    """Return the median of the finite values of each block; NaN for a block without any."""
    padded = np.full(-(-len(values) // size) * size, np.nan)
    padded[: len(values)] = np.where(np.isfinite(values), values, np.nan)
    blocks = padded.reshape(-1, size)
    medians: Floats = np.median(blocks, axis=1)
    partial = np.flatnonzero(np.isnan(medians) & ~np.isnan(blocks).all(axis=1))
    medians[partial] = np.nanmedian(blocks[partial], axis=1)
    return medians


def _outliers(values: Floats) -> NDArray[np.intp]:
    """Return the indices with several high neighbours, or with one value far above the rest.

    Distances are in deviations of the block. The limit widens for a heavy-tailed log, and for the means of a few
    neighbours it must exceed their usual scatter.
    """
    count = -(-len(values) // _BLOCK)
    padded = np.full(count * _BLOCK, np.nan)
    padded[: len(values)] = np.where(np.isfinite(values), values, np.nan)
    blocks = padded.reshape(count, _BLOCK)
    blocks[np.isnan(blocks).all(axis=1)] = 0.0
    with np.errstate(all="ignore"):
        middle = np.nanmedian(blocks, axis=1)
        spread = 1.4826 * np.nanmedian(np.abs(blocks - middle[:, None]), axis=1) + 1e-3 * np.abs(middle) / 4 + 1e-12
        lower, tight = _min_with_previous(middle), _min_with_previous(spread)
        distance = np.nan_to_num(((blocks - lower[:, None]) / tight[:, None]).ravel(), nan=0.0)
        tail = max(1.0, float(np.quantile(distance, 0.99)) / NORMAL_TAIL)
        means = np.convolve(distance.clip(-6.0 * tail, 6.0 * tail), np.ones(_FEW) / _FEW, "same")
        scatter = 1.4826 * float(np.median(np.abs(means - np.median(means))))
        single = (distance > 4.0 * tail) & (blocks > (lower + 0.2 * np.abs(lower))[:, None]).ravel()
        is_outlier = single | (means > max(2.2 * tail, 5.0 * scatter))
    return np.flatnonzero(is_outlier[: len(values)])


def _min_with_previous(values: Floats) -> Floats:
    """Return the lower of each value and its predecessor: a block that is high as a whole needs another reference."""
    return np.minimum(values, np.append(values[:1], values[:-1]))


def _ranges(indices: NDArray[np.intp], count: int) -> list[tuple[int, int]]:
    """Extend each index by the records to follow, and join ranges that touch."""
    if not len(indices):
        return []
    groups = np.split(indices, np.flatnonzero(np.diff(indices) > _LEARN + _FOLLOW) + 1)
    return [(int(g[0]), min(count, int(g[-1]) + _FOLLOW)) for g in groups]
