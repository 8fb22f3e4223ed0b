"""Finds hangs. Only a message of the log makes an incident: a silent log can mean an evaluation or a pause."""

from __future__ import annotations

import re

import numpy as np

from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Event, Table

COLLECTIVE = re.compile(
    r"watchdog caught collective|collective operation timeout|ProcessGroup\w* .*timed? ?out|NCCL .*(timeout|timed out)"
    r"|Timed out waiting \d+ms for (send|recv)|monitoredBarrier",
    re.IGNORECASE,
)
PARTIAL = re.compile(r"health check failed|liveness (check|probe) failed|sum mismatch|desync", re.IGNORECASE)

_DECISIONS = ("finding", "plan", "action", "outcome")
"""events of a journal: replicas that differ are in them, and are no hang"""


def hang_events(table: Table) -> list[Event]:
    texts = [e for e in table.events if e.kind not in _DECISIONS]
    return [e for e in texts if e.kind == "hang" or COLLECTIVE.search(e.text) or PARTIAL.search(e.text)]


def find(table: Table) -> list[Episode]:
    """Return at most one episode, from the first to the last message about a hang."""
    events = hang_events(table)
    if not events or not len(table):
        return []
    steps = [float(event.step) for event in events if event.step is not None] or [float(table.step[-1])]
    start, end = min(steps), max(steps)
    first, last = (max(0, int(np.searchsorted(table.step, step, "right")) - 1) for step in (start, end))
    evidence = {"events": len(events)}
    return [Episode(kind="hang", start=start, end=end, first=first, last=last, confidence=0.9, evidence=evidence)]
