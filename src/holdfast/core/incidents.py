"""The incident folder: one record per incident, rewritten whole as the incident goes on."""

from __future__ import annotations

from typing import Any

from holdfast.core.rundir import RunDir, to_json, write_atomically
from holdfast.core.types import Finding, Plan, Signal


class IncidentFiles:
    """Keeps incidents/NNNN/incident.json up to date: evidence before, findings, plans, what became of them."""

    _LIMIT = 500

    def __init__(self, rundir: RunDir | None) -> None:
        self._rundir = rundir
        self._open: dict[str, Any] | None = None

    def opened(self, number: int, kind: str, step: int, onset: int, before: list[Signal]) -> None:
        self._open = {
            "incident": number,
            "kind": kind,
            "step": step,
            "onset": onset,
            "state": "open",
            "signals_before": list(before),
            "events": [],
        }

    def found(self, findings: tuple[Finding, ...], signal: Signal, plan: Plan) -> None:
        self._add({"findings": list(findings), "signal": signal, "plan": plan})

    def became(self, **outcome: Any) -> None:
        self._add({"outcome": outcome})

    def closed(self, state: str) -> None:
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
        else:
            self._open["events_left_out"] = self._open.get("events_left_out", 0) + 1
        self._save()

    def _save(self) -> None:
        if self._rundir is not None and self._open is not None:
            folder = self._rundir.incident(self._open["incident"])
            write_atomically(folder / "incident.json", to_json(self._open))
