"""Finds memory incidents: a leak, fragmentation, or too little memory.

A leak is allocated memory that rises over the whole run. Fragmentation is allocated memory that stays level while
reserved memory grows. Running out of memory with neither is a matter of capacity. A single step up is no incident.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.core.detectors.out_of_memory import OutOfMemory, parse
from holdfast.diagnosis.model import window
from holdfast.diagnosis.model.answers import Thresholds
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Event, Table
from holdfast.diagnosis.model.trend import fit_trend

ALLOCATED = ("memory_allocated", "memory_peak")
_PARTS = 5


class MemoryTrend(NamedTuple):
    """Holds the trend of a memory column without its warm-up. `share` is the rise relative to the first level."""

    was: float
    now: float
    share: float
    z: float
    rises: bool


def oom_events(table: Table) -> list[Event]:
    return [event for event in table.events if event.kind == "oom" or parse(event.text)]


def failed_allocations(table: Table) -> list[OutOfMemory]:
    """Return what the out-of-memory messages of the log say, in their order."""
    parsed = (parse(event.text) for event in oom_events(table))
    return [failed for failed in parsed if failed is not None]


def measure_trend(values: NDArray[np.float64], t: Thresholds, relative_to: float | None = None) -> MemoryTrend | None:
    """Measure the rise; return None for too few values. It rises if each fifth of the run is above the one before."""
    if len(values) < t["records"]:
        return None
    values = values[len(values) // 10 :]
    trend = fit_trend(values)
    assert trend is not None
    levels = [float(np.median(part)) for part in np.array_split(values, _PARTS)]
    rise = levels[-1] - levels[0]
    share = rise / max(relative_to if relative_to is not None else abs(levels[0]), 1e-12)
    steps = np.diff(levels)
    is_steady = bool((steps > 0.05 * rise).all()) and float(steps.max()) < 0.7 * rise
    rises = rise > 0 and share > t["share"] and trend.z > t["z"] and is_steady
    return MemoryTrend(levels[0], levels[-1], share, trend.z, rises)


def measure_reserved_gap(table: Table, t: Thresholds) -> MemoryTrend | None:
    """Measure the trend of reserved minus allocated memory, relative to the allocated memory."""
    if not (table.has("memory_allocated") and table.has("memory_reserved")):
        return None
    both = table.present["memory_allocated"] & table.present["memory_reserved"]
    allocated = table.columns["memory_allocated"][both]
    gap = table.columns["memory_reserved"][both] - allocated
    finite = np.isfinite(gap)
    return measure_trend(gap[finite], t, float(np.median(allocated[finite]))) if finite.any() else None


def find(table: Table, leak: Thresholds, fragmentation: Thresholds) -> list[Episode]:
    """Return at most one episode: out of memory, else a leak, else fragmentation."""
    if not len(table):
        return []
    name = next((n for n in ALLOCATED if table.has(n)), None)
    allocated = measure_trend(window.finite(table, name), leak) if name else None
    gap = measure_reserved_gap(table, fragmentation)
    leaks, fragments = allocated is not None and allocated.rises, gap is not None and gap.rises
    first, last = len(table) // 10, len(table) - 1
    if events := oom_events(table):
        step = events[0].step if events[0].step is not None else float(table.step[-1])
        row = max(0, int(np.searchsorted(table.step, step, "right")) - 1)
        return [Episode.at_rows(table, "oom", first if leaks or fragments else row, row, 0.95)]
    if leaks:
        # A peak column never falls unless it is reset, so alone it is weaker evidence.
        return [Episode.at_rows(table, "memory_leak", first, last, 0.85 if name == "memory_allocated" else 0.6)]
    return [Episode.at_rows(table, "fragmentation", first, last, 0.75)] if fragments else []
