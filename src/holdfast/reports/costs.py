"""Where the time of a run went, from its journal and its step times."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from holdfast.diagnosis.model.run_journal import RunJournal
from holdfast.diagnosis.model.table import Table


class RunCosts(NamedTuple):
    """Holds the wall time of a run in seconds, its parts, and the share of it that trained steps which were kept."""

    wall: float | None
    goodput: float | None
    parts: dict[str, float]
    """lost to what: seconds by name, the largest first; `kept steps` is the useful part"""


def measure_costs(table: Table | None, journal: RunJournal) -> RunCosts:
    """Return the costs. A value that the run does not record is None: without a journal there is no wall time."""
    times = [float(time) for e in journal.events if isinstance(time := e.get("time"), int | float)]
    wall = times[-1] - times[0] if len(times) > 1 else None
    kept = None
    if table is not None and table.has("seconds"):
        seconds = table.series("seconds").value
        with np.errstate(over="ignore"):
            kept = float(seconds[np.isfinite(seconds)].sum())
        kept = kept if np.isfinite(kept) else None
    if wall is None or kept is None or wall <= 0:
        return RunCosts(wall, None, {} if kept is None else {"kept steps": kept})
    wall = max(wall, kept)  # the last steps of a killed process are later than its last event
    lost = {
        "steps undone, repeated or skipped": journal.summary.seconds_lost if journal.summary else 0.0,
        "waiting for checkpoints": _total(journal, "checkpoint", "stall_seconds"),
        "between processes": _time_between_processes(journal),
        "start of a resumed process": _total(journal, "restart_time", "total_seconds"),
    }
    rest = max(0.0, wall - kept - sum(lost.values()))
    named = {"kept steps": kept, **lost, "everything else: start, evaluation, own code": rest}
    parts = {name: value for name, value in named.items() if value > 0}
    return RunCosts(wall, kept / wall, dict(sorted(parts.items(), key=lambda part: -part[1])))


def _total(journal: RunJournal, event: str, field: str) -> float:
    return sum(v for e in journal.select(event) if isinstance(v := e.get(field), int | float) and v > 0)


def _time_between_processes(journal: RunJournal) -> float:
    """Return the seconds from the end of each process to the start of the next, if the first recorded its end."""
    return sum(
        max(0.0, _time(after) - _time(before))
        for before, after in pairwise(journal.events)
        if before.get("event") == "run_end" and after.get("event") == "restart"
    )


def _time(event: dict[str, Any]) -> float:
    time = event.get("time")
    return float(time) if isinstance(time, int | float) else 0.0
