"""The incident folder: one record per incident, rewritten whole as the incident goes on."""

from __future__ import annotations

import json
from typing import Any

from holdfast.core.base.types import Finding, Plan, Signal
from holdfast.core.record.rundir import RunDir, to_json, write_atomically


class IncidentFiles:
    """Keeps incidents/NNNN/incident.json up to date: evidence before, findings, plans, what became of them."""

    _LIMIT = 500

    def __init__(self, rundir: RunDir | None) -> None:
        self._rundir = rundir
        self._open: dict[str, Any] | None = None

    def open(self, number: int, kind: str, step: int, onset: int, before: list[Signal]) -> None:
        self._open = {
            "incident": number,
            "kind": kind,
            "step": step,
            "onset": onset,
            "state": "open",
            "signals_before": list(before),
            "events": [],
        }

    def reopen(self, number: int, kind: str, step: int, onset: int) -> None:
        """The run was started again inside an incident: its record goes on, or begins anew where it cannot be read."""
        self.open(number, kind, step, onset, [])
        if self._rundir is None or self._open is None:
            return
        try:
            record = json.loads((self._rundir.incident(number) / "incident.json").read_text(encoding="utf-8"))
            if isinstance(record, dict) and isinstance(record.get("events"), list):
                self._open |= {**record, "incident": number, "state": "open"}
        except (OSError, ValueError, RecursionError):
            pass

    def add_findings(self, findings: tuple[Finding, ...], signal: Signal, plan: Plan) -> None:
        self._add({"findings": list(findings), "signal": signal, "plan": plan})

    def add_outcome(self, **outcome: Any) -> None:
        self._add({"outcome": outcome})

    def close(self, state: str) -> None:
        if self._open is not None:
            self._open["state"] = state
            self._save()
            self._open = None

    def _add(self, entry: dict[str, Any]) -> None:
        if self._open is None:
            return
        events: list[Any] = self._open["events"]
        if len(events) < self._LIMIT:
            events.append(entry)
            self._save()
        else:
            left_out = self._open["events_left_out"] = self._open.get("events_left_out", 0) + 1
            if left_out & (left_out - 1) == 0:  # at powers of two: the file is large, and this may go on for ever
                self._save()

    def _save(self) -> None:
        if self._rundir is not None and self._open is not None:
            folder = self._rundir.incident(self._open["incident"])
            write_atomically(folder / "incident.json", to_json(self._open))
