"""Steps that become slower and stay so; a rank that is slower than the rest.

Warm-up and compilation at the start, pauses for evaluation and checkpoints, and a speed that swings anyway are none of
these: medians of long stretches are compared, and the stretches must hardly overlap.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.diagnosis.model.answers import Thresholds
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.model.trend import blocks

_RANK = re.compile(r"rank[_/ .-]?(\d+).*(?:seconds|time)|(?:seconds|time).*rank[_/ .-]?(\d+)", re.IGNORECASE)
_MOST_BLOCKS = 2000
_LEAST = 1e-12


class Times(NamedTuple):
    """Seconds a step, or a token, and the rows they belong to."""

    name: str
    rows: NDArray[np.int64]
    values: NDArray[np.float64]


class SlowRank(NamedTuple):
    rank: int
    ratio: float


def step_seconds(table: Table) -> Times | None:
    """Step times as logged, or else the inverse of the throughput."""
    for name in ("seconds", "tokens_per_second"):
        if table.has(name):
            values = table.columns[name]
            rows = np.flatnonzero(table.present[name] & np.isfinite(values) & (values > _LEAST))
            if len(rows):
                picked = values[rows]
                return Times(
                    "the step time" if name == "seconds" else "the time a token takes",
                    rows,
                    picked if name == "seconds" else 1.0 / picked,
                )
    return None


def find(table: Table, drop: Thresholds, straggler: Thresholds) -> list[Episode]:
    found = []
    times = step_seconds(table)
    if times is not None:
        found += _drops(table, times, drop)
    slow = slow_rank(table, straggler)
    if slow is not None:
        found.append(
            Episode(
                kind="straggler",
                start=float(table.step[0]),
                end=float(table.step[-1]),
                first=0,
                last=len(table) - 1,
                confidence=0.8,
                evidence={"rank": slow.rank, "ratio": slow.ratio},
            )
        )
    return found


def _drops(table: Table, times: Times, t: Thresholds) -> list[Episode]:
    """The first stretch that is slower by `ratio` than everything since the warm-up, for at least `stays` records."""
    stays, records = int(t["stays"]), int(t["records"])
    start = max(20, len(times.values) // 20)
    values = times.values[start:]
    if len(values) < records + stays:
        return []
    size = -(-len(values) // _MOST_BLOCKS)
    block = max(size, min(10, stays // 5))
    medians = blocks(values, -(-len(values) // block))
    back, ahead = max(3, records // block), max(3, stays // block)
    for at in range(back, len(medians) - ahead + 1):
        before, after = medians[max(0, at - 4 * back) : at], medians[at : at + ahead]
        was, now = float(np.median(before)), float(np.median(after))
        if now < t["ratio"] * was or np.quantile(after, 0.1) < 1.25 * np.quantile(before, 0.9):
            continue
        rest = medians[at:]
        over = np.flatnonzero(rest < was + 0.35 * (now - was))
        length = int(over[0]) if len(over) else len(rest)
        if length < ahead:
            continue
        first = int(times.rows[start + at * block])
        last = int(times.rows[min(len(times.rows) - 1, start + (at + length) * block - 1)])
        now = float(np.median(rest[:length]))
        return [
            Episode(
                kind="throughput_drop",
                start=float(table.step[first]),
                end=float(table.step[last]),
                first=first,
                last=last,
                confidence=0.85 if length * block >= 2 * stays else 0.7,
                evidence={"before": was, "after": now, "ratio": now / was},
            )
        ]
    return []


def rank_seconds(table: Table) -> dict[int, str]:
    """The columns that hold the step times of single ranks."""
    found = {name: _RANK.search(name) for name in table.columns}
    return {int(match[1] or match[2]): name for name, match in found.items() if match and table.has(name)}


def slow_rank(table: Table, t: Thresholds) -> SlowRank | None:
    """The rank whose median step time is `ratio` times the others' or more."""
    medians = {}
    for rank, name in rank_seconds(table).items():
        values = table.series(name).value
        values = values[np.isfinite(values)]
        if len(values) >= t["records"]:
            medians[rank] = float(np.median(values))
    if len(medians) < 2:
        return None
    slowest = max(medians, key=lambda rank: medians[rank])
    others = float(np.median([value for rank, value in medians.items() if rank != slowest]))
    ratio = medians[slowest] / max(others, 1e-30)
    return SlowRank(slowest, ratio) if ratio >= t["ratio"] else None
