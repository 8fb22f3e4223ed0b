"""Finds the incidents in the journal of a run directory.

The curve of a run directory holds only committed rows. This module puts the vetoed or undone rows of an incident back, so
that the tree can judge them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from holdfast.core.base.types import Kind
from holdfast.core.record.tally import IncidentSummary
from holdfast.diagnosis.model.episode import CURVE_KINDS, Episode
from holdfast.diagnosis.model.run_journal import RunJournal
from holdfast.diagnosis.model.table import Series, Table

MAX_INCIDENTS = 200
_ROWS_BEFORE, _ROWS_AFTER = 150, 60
_EARLY_STEPS = 20
"""the curve may date the beginning this much earlier than the journal, or by the length of the incident"""
_KINDS = {
    Kind.NONFINITE_LOSS: "nan",
    Kind.NONFINITE_STATE: "nonfinite_state",
    Kind.STATE_JUMP: "state_jump",
    Kind.STATISTICS_JUMP: "state_jump",
    Kind.NONFINITE_GRAD: "grad_nonfinite",
    Kind.SCALE_COLLAPSE: "scale_collapse",
    Kind.LOSS_SPIKE: "spike",
    Kind.GRAD_SPIKE: "grad_explosion",
    Kind.UPDATE_SPIKE: "grad_explosion",
    Kind.DIVERGENCE: "divergence",
}


class JournalIncident(NamedTuple):
    """Holds an incident of the journal, with a table that has its vetoed or undone rows."""

    line: IncidentSummary
    table: Table
    episode: Episode
    row: int
    """row of the run's own table, which lacks these rows, at which they belong"""


def find(table: Table, journal: RunJournal) -> list[JournalIncident]:
    """Return every incident with a cause, or with a vetoed or undone row. The curve shows those only observed."""
    incidents = (restore(table, line, journal) for line in journal.incidents[:MAX_INCIDENTS])
    return [incident for incident in incidents if incident is not None]


def without_known_causes(detected: list[Episode], journal: RunJournal) -> list[Episode]:
    """Return the episodes of the curve but those that are part of an incident, or of a note, with a recorded cause."""
    known = [(line.onset, journal.last_step(line)) for line in journal.incidents if line.cause is not None]
    known += [(note.onset, note.step) for note in journal.noted_causes]
    return [
        episode
        for episode in detected
        if episode.kind not in CURVE_KINDS
        or not any(first - max(_EARLY_STEPS, last - first) <= episode.start <= last for first, last in known)
    ]


def restore(table: Table, line: IncidentSummary, journal: RunJournal) -> JournalIncident | None:
    """Insert the vetoed or undone rows of an incident; return None if it has no kind of ours, or neither row nor cause."""
    kind = _KINDS.get(line.kind)  # type: ignore[call-overload]
    undone = {name: _undone(table.evals.get(f"undone_{name}"), line, journal) for name in ("loss", "grad_norm")}
    steps = max((series.step for series in undone.values()), key=len)
    if kind is None or not (len(steps) or (line.cause is not None and len(table))):
        return None
    if kind == "spike" and line.state == "closed" and line.cause != "objective":
        kind = "spike_recovered"
    row = min(int(np.searchsorted(table.step, float(line.onset))), len(table) if len(steps) else len(table) - 1)
    head = slice(max(0, row - _ROWS_BEFORE), row)
    resumes = int(np.searchsorted(table.step, float(steps.max()), "right")) if len(steps) else row
    tail = slice(resumes, resumes + _ROWS_AFTER)
    restored = Table(
        table.path,
        table.format,
        np.concatenate([table.step[head], steps, table.step[tail]]),
        events=table.events,
        limits=[limit for limit in table.limits if limit.code not in ("rolled_back", "not_committed")],
        facts=table.facts,
    )
    for name in table.columns.keys() | undone.keys():
        values, logged = _inserted(undone.get(name), steps)
        old = table.columns.get(name, np.full(len(table), np.nan))
        old_logged = table.present.get(name, np.zeros(len(table), dtype=bool))
        restored.columns[name] = np.concatenate([old[head], values, old[tail]])
        restored.present[name] = np.concatenate([old_logged[head], logged, old_logged[tail]])
    first = len(table.step[head])
    episode = Episode(
        kind=kind,
        start=float(line.onset),
        end=float(max([line.step, *steps])),
        first=first,
        last=first + max(1, len(steps)) - 1,
        confidence=0.95,
    )
    return JournalIncident(line, restored, episode, min(row, max(0, len(table) - 1)))


def _undone(series: Series | None, line: IncidentSummary, journal: RunJournal) -> Series:
    """Return the vetoed or undone values between the onset of an incident and its last action."""
    if series is None:
        return Series(np.empty(0), np.empty(0))
    inside = np.flatnonzero((series.step >= line.onset) & (series.step <= journal.last_step(line)))
    again = np.flatnonzero(np.diff(series.step[inside]) < 0)  # an experiment runs these steps another time
    inside = inside[: again[0] + 1] if len(again) else inside
    return Series(series.step[inside], series.value[inside])


def _inserted(series: Series | None, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return values and presence for the inserted rows; no value if the series does not cover all of them."""
    if series is None or len(series.step) != len(steps):
        return np.full(len(steps), np.nan), np.zeros(len(steps), dtype=bool)
    return series.value, np.ones(len(steps), dtype=bool)
