"""A rank that hangs. Only what the log says in words makes an incident: silence may be an evaluation, or the weekend."""

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


def reports(table: Table) -> list[Event]:
    """What the log says of hangs."""
    return [e for e in table.events if e.kind == "hang" or COLLECTIVE.search(e.text) or PARTIAL.search(e.text)]


def find(table: Table) -> list[Episode]:
    """One episode for everything the log says of hanging, from the first word on."""
    said = reports(table)
    if not said or not len(table):
        return []
    steps = [event.step for event in said if event.step is not None]
    start, end = (float(min(steps)), float(max(steps))) if steps else (float(table.step[-1]),) * 2
    first, last = (
        max(0, min(len(table) - 1, int(np.searchsorted(table.step, at, "right")) - 1)) for at in (start, end)
    )
    return [
        Episode(
            kind="hang", start=start, end=end, first=first, last=last, confidence=0.9, evidence={"events": len(said)}
        )
    ]
