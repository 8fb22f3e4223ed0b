"""The marks on the time line of a run: what was done at which step."""

from __future__ import annotations

from typing import Any, NamedTuple

from holdfast.core.base.clean import clean
from holdfast.diagnosis.model.run_journal import ListedCheckpoint, RunJournal
from holdfast.diagnosis.model.table import Table

_MAX_MARKS = 20_000
_ACTIONS = {"rollback": "rollback", "skip": "data", "skip_data": "data", "cut_lr": "lr", "hold_lr": "lr",
            "tighten_clip": "lr", "stop": "stop", "replay": "replay"}  # fmt: skip
_EVENTS = {"restart": "restart", "resumed": "restart", "failure": "failure", "shift": "shift", "experiment": "experiment",
           "incident_opened": "incident", "outage": "failure", "stop_requested": "stop"}  # fmt: skip
_OF_LOGS = {"restart": "restart", "checkpoint": "checkpoint", "overflow": "overflow", "skipped": "data", "hang": "failure",
            "error": "failure", "oom": "failure", "stop": "stop"}  # fmt: skip


class Mark(NamedTuple):
    """Holds one mark. `to` is the step that a rollback or a restart returned to."""

    kind: str
    step: int
    text: str
    to: int | None = None


def journal_marks(journal: RunJournal) -> list[Mark]:
    """Return the marks of a journal. An event without a step, such as a restart, is at the last step before it."""
    marks: list[Mark] = []
    last = 0
    for event in journal.events:
        step = event.get("step")
        last = step if isinstance(step, int) else last
        mark = _mark(event, last)
        if mark is None or len(marks) >= _MAX_MARKS:
            continue
        if event["event"] == "resumed" and marks and marks[-1].text.startswith("restart:"):
            mark = Mark("restart", marks.pop().step, mark.text, mark.step)  # the two are one restart
        marks.append(mark)
    return marks


def checkpoint_marks(checkpoints: list[ListedCheckpoint]) -> list[Mark]:
    kinds = {"good": "good", "candidate": "checkpoint", "pruned": "checkpoint"}
    return [
        Mark(kinds.get(c.health, "bad"), c.step, _text(f"{c.name}: {c.health} {c.why}"))
        for c in checkpoints[-_MAX_MARKS:]
    ]


def hang_marks(hangs: list[dict[str, Any]]) -> list[Mark]:
    steps = [(verdict.get("step"), verdict.get("summary")) for verdict in hangs]
    return [
        Mark("failure", step, _text(f"hang: {text}")) for step, text in steps if type(step) is int and 0 <= step < 2**53
    ]


def _mark(event: dict[str, Any], last: int) -> Mark | None:
    name, step = event["event"], event.get("step", last)
    if name == "action":
        kind, to = _ACTIONS.get(event["action"], "action"), event.get("to_step")
        return Mark(kind, step, _text(f"{event['action']}: {event.get('reason') or ''}"), to)
    if name == "experiment" and event.get("result") == "begun":
        return None  # its action has a mark, and its result gets one
    if name not in _EVENTS or (name == "resumed" and event.get("step") is None):
        return None
    about = [event.get(key) for key in ("kind", "rung", "result", "error", "text", "reason", "why", "checkpoint")]
    return Mark(_EVENTS[name], step, _text(f"{name.replace('_', ' ')}: {', '.join(str(a) for a in about if a)}"))


def table_marks(table: Table) -> list[Mark]:
    """Return the marks of the log of another tool."""
    events = [e for e in table.events if e.step is not None and e.kind in _OF_LOGS]
    return [Mark(_OF_LOGS[e.kind], e.step or 0, _text(e.text)) for e in events[:_MAX_MARKS]]


def _text(text: str) -> str:
    return clean(text)[:300]
