"""Finds steps that become slower and stay slow, and a rank that is slower than the rest.

Warm-up, compilation, pauses for evaluations or checkpoints, and a speed that varies anyway are no incidents. So this module
compares medians of long ranges, and the ranges must hardly overlap.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.diagnosis.model import window
from holdfast.diagnosis.model.answers import Thresholds
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.model.trend import block_medians

_RANK = re.compile(r"rank[_/ .-]?(\d+).*(?:seconds|time)|(?:seconds|time).*rank[_/ .-]?(\d+)", re.IGNORECASE)
_MAX_BLOCKS = 2000
_SMALLEST = 1e-12


class StepTimes(NamedTuple):
    """Holds seconds per step, or per token, and their rows."""

    name: str
    rows: NDArray[np.int64]
    values: NDArray[np.float64]


class SlowRank(NamedTuple):
    rank: int
    ratio: float


def step_times(table: Table) -> StepTimes | None:
    """Return the logged step times, or else the inverse of the throughput."""
    for column, name in (("seconds", "the step time"), ("tokens_per_second", "the time per token")):
        if table.has(column):
            values = table.columns[column]
            rows = np.flatnonzero(table.present[column] & np.isfinite(values) & (values > _SMALLEST))
            if len(rows):
                return StepTimes(name, rows, values[rows] if column == "seconds" else 1.0 / values[rows])
    return None


def find(table: Table, drop: Thresholds, straggler: Thresholds) -> list[Episode]:
    times = step_times(table)
    episodes = _find_drop(table, times, drop) if times is not None else []
    slow = find_slow_rank(table, straggler)
    if slow is not None:
        evidence = {"rank": slow.rank, "ratio": slow.ratio}
        episodes.append(Episode.at_rows(table, "straggler", 0, len(table) - 1, 0.8, evidence=evidence))
    return episodes


def _find_drop(table: Table, times: StepTimes, t: Thresholds) -> list[Episode]:
    """Return the first range that is slower by `ratio` than the records before it, for at least `stays` records."""
    stays, records = int(t["stays"]), int(t["records"])
    start = max(20, len(times.values) // 20)
    values = times.values[start:]
    if len(values) < records + stays:
        return []
    block = max(-(-len(values) // _MAX_BLOCKS), min(10, stays // 5))
    medians = block_medians(values, -(-len(values) // block))
    back, ahead = max(3, records // block), max(3, stays // block)
    for at in range(back, len(medians) - ahead + 1):
        before, after = medians[max(0, at - 4 * back) : at], medians[at : at + ahead]
        was, now = float(np.median(before)), float(np.median(after))
        if now < t["ratio"] * was or np.quantile(after, 0.1) < 1.25 * np.quantile(before, 0.9):
            continue
        rest = medians[at:]
        fast_again = np.flatnonzero(rest < was + 0.35 * (now - was))
        length = int(fast_again[0]) if len(fast_again) else len(rest)
        if length < ahead:
            continue
        first = int(times.rows[start + at * block])
        last = int(times.rows[min(len(times.rows) - 1, start + (at + length) * block - 1)])
        now = float(np.median(rest[:length]))
        confidence = 0.85 if length * block >= 2 * stays else 0.7
        evidence = {"before": was, "after": now, "ratio": now / was}
        return [Episode.at_rows(table, "throughput_drop", first, last, confidence, evidence=evidence)]
    return []


def rank_columns(table: Table) -> dict[int, str]:
    """Return the columns that hold the step times of single ranks."""
    matches = {name: _RANK.search(name) for name in table.columns}
    return {int(match[1] or match[2]): name for name, match in matches.items() if match and table.has(name)}


def find_slow_rank(table: Table, t: Thresholds) -> SlowRank | None:
    """Return the slowest rank if its median step time is at least `ratio` times the median of the others."""
    medians = {}
    for rank, name in rank_columns(table).items():
        values = window.finite(table, name)
        if len(values) >= t["records"]:
            medians[rank] = float(np.median(values))
    if len(medians) < 2:
        return None
    slowest = max(medians, key=lambda rank: medians[rank])
    others = float(np.median([value for rank, value in medians.items() if rank != slowest]))
    ratio = medians[slowest] / max(others, 1e-30)
    return SlowRank(slowest, ratio) if ratio >= t["ratio"] else None
