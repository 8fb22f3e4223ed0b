"""The names of metrics in trackers, by the columns of metrics.jsonl; and the events that a tracker marks."""

from __future__ import annotations

from typing import Any

_NAMES = {
    "loss": "train/loss",
    "loss_smooth": "train/loss_smooth",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "loss_scale": "train/loss_scale",
    "tokens_per_second": "train/tokens_per_sec",
    "step_seconds": "train/step_time_sec",
    "mfu": "train/mfu",
    "weight_norm": "train/weight_norm",
    "update_rms": "train/update_rms",
    "straggler_seconds": "time/straggler_sec",
    "slowest_rank": "time/slowest_rank",
    "memory_allocated": "gpu/allocated_gb",
    "memory_peak": "gpu/peak_gb",
    "memory_reserved": "gpu/reserved_gb",
}
_MAX_TEXT = 1000
"""an alert that is longer reaches neither a chat nor the environment of a command"""
_MARKED_ACTIONS = ("rollback", "skip", "skip_data", "cut_lr", "hold_lr", "stop")
_MARKED_FINDINGS = ("slowdown", "straggler", "memory_leak", "fragmentation", "memory_capacity", "host_growth")


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a row by the names that trackers show."""
    found = {name: row[column] for column, name in _NAMES.items() if column in row}
    phases = row.get("phases")
    if isinstance(phases, dict):
        found |= {f"time/{phase}_sec": seconds for phase, seconds in phases.items()}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def describe_mark(event: dict[str, Any]) -> str | None:
    """Return an event that belongs on the curves as one line of bounded length; None for any other event."""
    text = _describe(event)
    return text if text is None or len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}… ({len(text):,} characters)"


def _describe(event: dict[str, Any]) -> str | None:
    name, step = event.get("event"), event.get("step")
    at = "" if step is None else f"step {step}: "
    if name == "incident_opened":
        return f"{at}incident {event.get('incident')}: {event.get('kind')}"
    if name == "action" and event.get("action") in _MARKED_ACTIONS:
        if event["action"] == "rollback":
            return f"{at}rolled back from step {event.get('from_step')} to {event.get('to_step')}"
        return f"{at}{str(event['action']).replace('_', ' ')}"
    if name == "finding" and event.get("kind") in _MARKED_FINDINGS:
        return f"{at}{event.get('kind')}: {event.get('message')}"
    if name == "cause":
        return f"{at}cause of incident {event.get('incident')}: {event.get('cause')}"
    if name == "resumed":
        return f"resumed at step {event.get('step')}"
    if name == "restart":
        return "restarted"
    if name == "failure":
        return f"{at}failed: {event.get('error')}"
    if ends_badly(event):
        return f"{at}ended: {event.get('error') or event.get('stopped')}"
    return None


def marked_step(event: dict[str, Any], newest: int) -> int:
    """Return the step at which a curve marks an event: that of the event, or the newest one if it has none."""
    step = event.get("step")
    return step if isinstance(step, int) else newest


def ends_badly(event: dict[str, Any]) -> bool:
    """Return whether a process ends with this event, by an error or a stop."""
    return event.get("event") == "run_end" and bool(event.get("error") or event.get("stopped"))


def returned_to(event: dict[str, Any]) -> int | None:
    """Return the step that the run went back to with this event; None if it did not."""
    if event.get("event") == "action" and event.get("action") == "rollback":
        step = event.get("to_step")
    elif event.get("event") == "resumed":
        step = event.get("step")
    else:
        step = 0 if event.get("event") == "started_over" else None
    return step if isinstance(step, int) else None
