"""The incident folders: one JSON file per incident, rewritten as the incident continues."""

from __future__ import annotations

import json
from typing import Any

from holdfast.core.base import durable
from holdfast.core.base.types import Finding, Plan, Signal
from holdfast.core.record.outage import DiskOutage, WaitingFiles
from holdfast.core.record.rundir import RunDir, to_json

_MAX_BYTES = 16 << 20


class IncidentFiles:
    """Keeps incidents/NNNN/incident.json up to date: the signals before it, findings, plans and outcomes."""

    _MAX_EVENTS = 500

    def __init__(self, rundir: RunDir | None, files: WaitingFiles | None = None) -> None:
        self._rundir = rundir
        self._files = WaitingFiles(rundir.path, DiskOutage()) if files is None and rundir is not None else files
        self._incident: dict[str, Any] | None = None

    def open(self, number: int, kind: str, step: int, onset: int, before: list[Signal]) -> None:
        self._incident = {
            "incident": number,
            "kind": kind,
            "step": step,
            "onset": onset,
            "state": "open",
            "signals_before": list(before),
            "events": [],
        }

    def reopen(self, number: int, kind: str, step: int, onset: int) -> None:
        """Continue the file of an incident that an earlier process opened; start over if it cannot be read."""
        self.open(number, kind, step, onset, [])
        if self._rundir is None or self._incident is None:
            return
        try:
            folder = self._rundir.incident(number)
            durable.refuse_links(self._rundir.path, folder)
            record = json.loads(durable.read_file(folder / "incident.json", _MAX_BYTES))
            if isinstance(record, dict) and isinstance(record.get("events"), list):
                self._incident |= {**record, "incident": number, "state": "open"}
        except (OSError, ValueError, RecursionError):
            pass

    def add_findings(self, findings: tuple[Finding, ...], signal: Signal, plan: Plan) -> None:
        self._add({"findings": list(findings), "signal": signal, "plan": plan})

    def add_outcome(self, **outcome: Any) -> None:
        self._add({"outcome": outcome})

    def add_event(self, event: str, fields: dict[str, Any]) -> None:
        """Add an experiment or a replay, or set the cause, as the journal has it. A later cause replaces an earlier one."""
        if event in ("experiment", "replay"):
            self._add({event: fields})
        elif self._incident is not None:
            self._incident["cause"] = fields
            self._save()

    def close(self, state: str) -> None:
        if self._incident is not None:
            self._incident["state"] = state
            self._save()
            self._incident = None

    def _add(self, entry: dict[str, Any]) -> None:
        if self._incident is None:
            return
        events: list[Any] = self._incident["events"]
        if len(events) < self._MAX_EVENTS:
            events.append(entry)
            self._save()
        else:
            dropped = self._incident["events_left_out"] = self._incident.get("events_left_out", 0) + 1
            if dropped & (dropped - 1) == 0:  # only at powers of two: the file is large, and there may be many more
                self._save()

    def _save(self) -> None:
        if self._rundir is not None and self._files is not None and self._incident is not None:
            folder = self._rundir.incident(self._incident["incident"])
            self._files.write(folder / "incident.json", to_json(self._incident))
