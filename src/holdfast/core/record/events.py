"""The events of a journal and the types of their fields, in one table. What is not so is skipped when a journal is read.

A journal may be edited, or written by another version. Everything that reads it gets only events that are in this table, so
nothing else checks types. Fields that are not listed may hold anything: they are shown, and nothing depends on them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.core.base.types import Span

_Number = int | float
_Spans = list[Span]
_Mapping = dict[str, Any]


class _ExcludedWindow(msgspec.Struct):
    epoch: int
    first: int
    batches: int


_COMMON: dict[str, Any] = {
    "step": int, "attempt": int, "incident": int, "branch": int, "lineage": _Mapping, "policy": _Mapping,
    "interventions_kept": int, "from_step": int, "to_step": int,
}  # fmt: skip
"""fields that any event may have"""

_EVENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "run_begin": ({}, {"environment": _Mapping}),
    "restart": ({}, {"environment": _Mapping}),
    "failure": ({"step": int, "error": str}, {"rank": int}),
    "run_end": ({}, {"summary": _Mapping, "error": str}),
    "finding": ({}, {"kind": str, "severity": str, "onset": int, "message": str, "detector": str, "evidence": _Mapping}),
    "incident_opened": ({"incident": int, "kind": str, "step": int, "onset": int}, {}),
    "incident_closed": ({"incident": int}, {}),
    "experiment": ({}, {"rung": str, "result": str, "text": str}),
    "replay": (
        {"result": str},
        {
            "cause": str, "text": str, "rank": int, "module": str, "op": str, "file": str, "line": int, "fix": str,
            "path": str, "host": str, "device": str, "samples": list[int],
        },
    ),
    "cause": ({"cause": str}, {"text": str, "data": _Spans, "samples": list[int]}),
    "plan": ({}, {"actions": list[_Mapping], "reason": str, "by": str, "experiment": str}),
    "action": (
        {"action": str},
        {
            "reason": str, "data": _Spans, "samples": list[int], "batches": int, "skip_window": _ExcludedWindow,
            "interventions": list[Any], "ramp_steps": int, "steps": int, "factor": _Number, "part_of_rollback": bool,
            "shape": str, "parts": int, "trial": bool,
        },
    ),
    "outcome": ({"status": str}, {"seconds_lost": _Number}),
    "quarantine": ({}, {"spans": _Spans, "samples": list[int], "batches": int}),
    "released": ({}, {"spans": _Spans}),
    "checkpoint": ({"status": str, "name": str, "step": int}, {"why": str, "handover": bool}),
    "resumed": ({}, {"checkpoint": str, "passed_over": list[Any]}),
    "facts": ({"facts": _Mapping}, {}),
    "health": ({"host": str, "device": str}, {"rank": int, "text": str, "checks": list[str]}),
    "excluded": ({"host": str, "device": str}, {"namings": list[_Mapping]}),
    **dict.fromkeys(
        ("outage", "started_over", "shift", "note", "abandoned", "remainder", "stop_requested", "progress", "ack", "torn",
         "snapshot_saved", "restart_time"), ({}, {})
    ),
}  # fmt: skip
"""event -> the fields that it must have, and those that it may have; null counts as absent for the latter"""


def _struct(name: str, required: dict[str, Any], others: dict[str, Any]) -> type[msgspec.Struct]:
    optional = [(key, kind | None, None) for key, kind in {**_COMMON, **others}.items() if key not in required]
    return msgspec.defstruct(name, [*required.items(), *optional])


_TYPES = {name: _struct(name, *fields) for name, fields in _EVENTS.items()}


def event_problem(event: dict[str, Any]) -> str | None:
    """Return why a line of the journal is no event that this version knows; None if it is one."""
    name = event.get("event")
    if not isinstance(name, str) or name not in _TYPES:
        return f"{name!r:.40} is no event of this version"
    try:
        msgspec.convert(event, _TYPES[name])
    except (msgspec.ValidationError, UnicodeEncodeError, RecursionError) as error:
        return f"{name}: {str(error)[:120]}"
    return None
