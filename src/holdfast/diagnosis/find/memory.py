"""Memory that creeps: leak, fragmentation, or simply too little of it.

Allocated rising from one end of the run to the other is a leak. Allocated flat while reserved grows away from it is
fragmentation. Neither is capacity. One step up, after which it stays level, is none of these.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.diagnosis.model.answers import Thresholds
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Event, Table
from holdfast.diagnosis.model.trend import trend

ALLOCATED = ("memory_allocated", "memory_peak")
_REPORT = re.compile(
    r"out of memory|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY|oom-kill|HIP out of memory", re.IGNORECASE
)
_PARTS = 5


class Climb(NamedTuple):
    """How a series of memory figures went, warm-up left out. `share` is the rise relative to where it began."""

    was: float
    now: float
    share: float
    z: float
    rises: bool


def reports(table: Table) -> list[Event]:
    """What the log says of failed allocations, in words."""
    return [event for event in table.events if event.kind == "oom" or _REPORT.search(event.text)]


def climb(values: NDArray[np.float64], t: Thresholds, relative_to: float | None = None) -> Climb | None:
    """None where there are too few values. It rises if every fifth of the run lies above the one before."""
    if len(values) < t["records"]:
        return None
    values = values[len(values) // 10 :]
    found = trend(values)
    assert found is not None
    levels = [float(np.median(part)) for part in np.array_split(values, _PARTS)]
    rise = levels[-1] - levels[0]
    share = rise / max(relative_to if relative_to is not None else abs(levels[0]), 1e-12)
    steps = np.diff(levels)
    steady = bool((steps > 0.05 * rise).all()) and float(steps.max()) < 0.7 * rise
    return Climb(levels[0], levels[-1], share, found.z, rise > 0 and share > t["share"] and found.z > t["z"] and steady)


def gap(table: Table, t: Thresholds) -> Climb | None:
    """Reserved minus allocated, its growth measured against what is allocated."""
    if not (table.has("memory_allocated") and table.has("memory_reserved")):
        return None
    both = table.present["memory_allocated"] & table.present["memory_reserved"]
    allocated = table.columns["memory_allocated"][both]
    apart = table.columns["memory_reserved"][both] - allocated
    good = np.isfinite(apart)
    if not good.any():
        return None
    return climb(apart[good], t, float(np.median(allocated[good])))


def find(table: Table, leak: Thresholds, fragmentation: Thresholds) -> list[Episode]:
    """At most one episode: running out of memory, else a leak, else fragmentation."""
    if not len(table):
        return []
    name = next((n for n in ALLOCATED if table.has(n)), None)
    allocated = climb(_finite(table, name), leak) if name else None
    # Peak figures only ever rise unless they are reset: alone they are weaker evidence.
    certainty = 0.85 if name == "memory_allocated" else 0.6
    apart = gap(table, fragmentation)
    said = reports(table)
    first = len(table) // 10
    if said:
        at = said[0].step if said[0].step is not None else float(table.step[-1])
        row = min(len(table) - 1, max(0, int(np.searchsorted(table.step, at, "right")) - 1))
        creeps = (allocated and allocated.rises) or (apart and apart.rises)
        return [_episode(table, "oom", first if creeps else row, row, 0.95)]
    if allocated is not None and allocated.rises:
        return [_episode(table, "memory_leak", first, len(table) - 1, certainty)]
    if apart is not None and apart.rises:
        return [_episode(table, "fragmentation", first, len(table) - 1, 0.75)]
    return []


def _finite(table: Table, name: str) -> NDArray[np.float64]:
    values = table.series(name).value
    return values[np.isfinite(values)]


def _episode(table: Table, kind: str, first: int, last: int, confidence: float) -> Episode:
    return Episode(
        kind=kind,
        start=float(table.step[first]),
        end=float(table.step[last]),
        first=first,
        last=last,
        confidence=confidence,
    )
