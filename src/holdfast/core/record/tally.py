"""The summary of a run, computed from its events: its status, what was done, and what it cost."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class IncidentSummary(msgspec.Struct, kw_only=True):
    """One incident in short."""

    number: int
    kind: str
    step: int
    onset: int
    actions: list[str] = []
    state: Literal["open", "closed", "stopped"] = "open"


class Summary(msgspec.Struct, kw_only=True):
    """What happened in a run, over all its processes."""

    status: Literal["clean", "recovered", "observed", "stopped", "off"] = "clean"
    committed: int = 0
    skipped: int = 0
    replayed: int = 0
    rollbacks: int = 0
    overflowed: int = 0
    batches_skipped: int = 0
    samples_quarantined: int = 0
    lr_cuts: int = 0
    restarts: int = 0
    seconds_lost: float = 0.0
    incidents: list[IncidentSummary] = []
    stopped: str | None = None

    def __str__(self) -> str:
        head = f"{self.status}: {self.committed} steps committed"
        counts = [
            f"{value} {name}"
            for name, value in (
                ("skipped", self.skipped),
                ("replayed", self.replayed),
                ("rolled back", self.rollbacks),
                ("overflowed (loss scale)", self.overflowed),
            )
            if value
        ]
        lines = [", ".join([head, *counts])]
        if self.batches_skipped or self.samples_quarantined:
            lines.append(f"data left out: {self.batches_skipped} batches, {self.samples_quarantined} sample ids")
        if self.seconds_lost:
            lines.append(f"time lost: {self.seconds_lost:.1f} s")
        for incident in self.incidents:
            done = ", ".join(incident.actions) or "recorded only"
            lines.append(
                f"incident {incident.number}: {incident.kind} at step {incident.step}: {done}; {incident.state}"
            )
        if self.stopped:
            lines.append(f"stopped: {self.stopped}")
        return "\n".join(lines)


_COUNTED = {"skipped": "skipped", "replayed": "replayed", "rolled_back": "rollbacks", "overflowed": "overflowed"}
"""status of an attempt -> field of the summary"""


class Tally:
    """Computes the summary from every journal event, given to `feed` in order."""

    def __init__(self) -> None:
        self._summary = Summary()
        self._incidents: dict[int, IncidentSummary] = {}
        self._acted = False

    def feed(self, event: dict[str, Any]) -> None:
        handler = getattr(self, f"_on_{event.get('event')}", None)
        if handler is not None:
            handler(event)

    def _on_restart(self, event: dict[str, Any]) -> None:
        self._summary.restarts += 1
        self._summary.stopped = None  # a stop that still held would have refused this process

    def _on_incident_opened(self, event: dict[str, Any]) -> None:
        self._incidents[event["incident"]] = IncidentSummary(
            number=event["incident"], kind=event["kind"], step=event["step"], onset=event["onset"]
        )

    def _on_incident_closed(self, event: dict[str, Any]) -> None:
        if event["incident"] in self._incidents:
            self._incidents[event["incident"]].state = "closed"

    def _on_action(self, event: dict[str, Any]) -> None:
        self._acted = True
        name = event["action"]
        line = self._incidents.get(event.get("incident") or 0)
        if line is not None:
            line.actions.append(name)
        if name == "cut_lr":
            self._summary.lr_cuts += 1
        elif name == "stop":
            self._summary.stopped = event["reason"]
            if line is not None:
                line.state = "stopped"

    def _on_outcome(self, event: dict[str, Any]) -> None:
        summary, name = self._summary, _COUNTED.get(event["status"])
        if name is not None:
            setattr(summary, name, getattr(summary, name) + 1)
        summary.seconds_lost += event.get("seconds_lost") or 0.0

    def _on_quarantine(self, event: dict[str, Any]) -> None:
        self._summary.batches_skipped += event.get("batches") or 0
        self._summary.samples_quarantined += len(event.get("samples") or ())

    def _on_ack(self, event: dict[str, Any]) -> None:
        self._summary.stopped = None
        for line in self._incidents.values():
            if line.state == "open":
                line.state = "closed"

    def summary(self, committed: int) -> Summary:
        """Return the summary so far; `committed` is the number of committed steps."""
        incidents = [self._incidents[n] for n in sorted(self._incidents)]
        status: Literal["clean", "recovered", "observed", "stopped", "off"] = "clean"
        if self._summary.stopped:
            status = "stopped"
        elif self._acted:
            status = "recovered"
        elif incidents:
            status = "observed"
        return msgspec.structs.replace(self._summary, status=status, committed=committed, incidents=incidents)
