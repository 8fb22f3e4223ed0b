"""Incidents that Holdfast met while the run went on. The curve of a run directory shows what was kept, so what was
vetoed or undone is put back here, where it happened, for the tree to look at.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from holdfast.core.base.types import Kind
from holdfast.core.record.tally import IncidentLine
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.own_journal import Journal
from holdfast.diagnosis.model.table import Series, Table

MOST = 200
_BEFORE, _AFTER = 150, 60
_CERTAINTY = 0.95
_KINDS = {
    Kind.NONFINITE_LOSS: "nan",
    Kind.NONFINITE_STATE: "nan",
    Kind.NONFINITE_GRAD: "grad_nonfinite",
    Kind.SCALE_COLLAPSE: "scale_collapse",
    Kind.LOSS_SPIKE: "spike",
    Kind.GRAD_SPIKE: "grad_explosion",
    Kind.UPDATE_SPIKE: "grad_explosion",
    Kind.DIVERGENCE: "divergence",
}


class Recorded(NamedTuple):
    """An incident of the journal, with the rows that were vetoed or undone put back among those around them."""

    line: IncidentLine
    table: Table
    episode: Episode
    row: int
    """where the run's own table, which lacks these rows, goes on"""


def find(table: Table, journal: Journal) -> list[Recorded]:
    """Every incident of which something was vetoed or undone; what was only observed is in the curve itself."""
    summary = journal.summary()
    found = (view(table, line, journal) for line in (summary.incidents[:MOST] if summary else []))
    return [recorded for recorded in found if recorded is not None]


def view(table: Table, line: IncidentLine, journal: Journal) -> Recorded | None:
    kind = _KINDS.get(line.kind)  # type: ignore[call-overload]
    undone = {name: _within(table.evals.get(f"undone_{name}"), line, journal) for name in ("loss", "grad_norm")}
    steps = max((series.step for series in undone.values()), key=len)
    if kind is None or not len(steps):
        return None
    if kind == "spike" and line.state == "closed":
        kind = "spike_recovered"
    row = int(np.searchsorted(table.step, float(line.onset)))
    head = slice(max(0, row - _BEFORE), row)
    rest = int(np.searchsorted(table.step, float(steps.max()), "right"))
    tail = slice(rest, rest + _AFTER)
    made = Table(
        table.path,
        table.format,
        np.concatenate([table.step[head], steps, table.step[tail]]),
        events=table.events,
        limits=[limit for limit in table.limits if limit.code not in ("rolled_back", "not_committed")],
        facts=table.facts,
    )
    for name in table.columns.keys() | undone.keys():
        values, there = _inserted(undone.get(name), steps)
        old = table.columns.get(name, np.full(len(table), np.nan))
        logged = table.present.get(name, np.zeros(len(table), dtype=bool))
        made.columns[name] = np.concatenate([old[head], values, old[tail]])
        made.present[name] = np.concatenate([logged[head], there, logged[tail]])
    first = len(table.step[head])
    last = first + len(steps) - 1
    episode = Episode(
        kind=kind,
        start=float(line.onset),
        end=float(max(line.step, steps.max())),
        first=first,
        last=last,
        confidence=_CERTAINTY,
    )
    return Recorded(line, made, episode, min(row, max(0, len(table) - 1)))


def _within(series: Series | None, line: IncidentLine, journal: Journal) -> Series:
    """What was vetoed or undone between the onset of an incident and the last thing done about it."""
    if series is None:
        return Series(np.empty(0), np.empty(0))
    last = max([line.step, *journal.steps_of(line.number)])
    inside = (series.step >= line.onset) & (series.step <= last)
    return Series(series.step[inside], series.value[inside])


def _inserted(series: Series | None, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if series is None or len(series.step) != len(steps):
        return np.full(len(steps), np.nan), np.zeros(len(steps), dtype=bool)
    return series.value, np.ones(len(steps), dtype=bool)
