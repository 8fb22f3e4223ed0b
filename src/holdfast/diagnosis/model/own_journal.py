"""What Holdfast's own journal says of a run: what it found, what it did, and what that cost."""

from __future__ import annotations

import contextlib
import functools
from itertools import pairwise
from pathlib import Path
from typing import Any

from holdfast.core.record.journal import read
from holdfast.core.record.tally import Summary, Tally

MISSING = "not on record"


def open_journal(path: str) -> Journal:
    """The journal of a run directory; read once for as long as the file stays the same."""
    file = Path(path) if Path(path).name == "journal.jsonl" else Path(path) / "journal.jsonl"
    try:
        state = file.stat()
    except (OSError, ValueError):
        return Journal([], 0, there=False)
    return _read(file, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=4)
def _read(file: Path, changed: int, size: int) -> Journal:
    try:
        record = read(file)
    except OSError:
        return Journal([], 0, there=False)
    return Journal(record.events, len(record.torn), there=True)


class Journal:
    """The events of a run directory, or none for a log of another tool."""

    def __init__(self, events: list[dict[str, Any]], torn: int, there: bool) -> None:
        self.events, self.torn, self.there = events, torn, there
        self._summary: Summary | None = None

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("event") in kinds]

    def summary(self) -> Summary | None:
        if not self.events or self._summary is not None:
            return self._summary
        tally = Tally()
        for event in self.events:
            # An event of another version, or one that was mended by hand, counts for nothing.
            with contextlib.suppress(KeyError, TypeError, AttributeError):
                tally.feed(event)
        ends = [event["step"] for event in self.of("run_end", "progress") if isinstance(event.get("step"), int)]
        self._summary = tally.summary(ends[-1] if ends else 0)
        return self._summary

    def steps_undone(self) -> int | None:
        """Steps that rollbacks took back."""
        if not self.there:
            return None
        back = [(a.get("from_step"), a.get("to_step")) for a in self.of("action") if a.get("action") == "rollback"]
        return sum(start - to for start, to in back if isinstance(start, int) and isinstance(to, int))

    def steps_of(self, incident: int) -> list[int]:
        """Steps at which something was done about an incident."""
        done = [e.get("step") for e in self.of("action", "outcome") if e.get("incident") == incident]
        return [step for step in done if isinstance(step, int)]

    def findings(self) -> list[str]:
        """What the detectors said while the run went on, and how long after its onset."""
        lines = []
        for finding in self.of("finding"):
            step, onset = finding.get("step"), finding.get("onset")
            if finding.get("new", True):
                late = f"{step - onset} steps" if isinstance(step, int) and isinstance(onset, int) else MISSING
                lines.append(
                    f"online, step {step}: {finding.get('detector')}: {finding.get('message')} (after its onset: {late})"
                )
        return lines

    def batches_left_out(self) -> int:
        skips = [a.get("batches") for a in self.of("action") if a.get("action") in ("skip", "skip_data")]
        return sum(count for count in skips if isinstance(count, int))

    def actions(self) -> list[str]:
        """What was done, in words, in order; repeated skips of one incident are one line."""
        lines: list[str] = []
        skips: dict[Any, list[Any]] = {}
        for action in self.of("action"):
            name = action.get("action")
            if name == "skip":
                seen = skips.setdefault(action.get("incident"), [])
                seen.append(action.get("step"))
                if len(seen) > 1:
                    continue
            lines.append(f"incident {action.get('incident', MISSING)}: {_action(action)}")
        for incident, steps in skips.items():
            if len(steps) > 1:
                lines.append(
                    f"incident {incident}: {len(steps)} attempts not applied in all, steps {steps[0]} to {steps[-1]}"
                )
        return lines

    def config_changes(self) -> list[str]:
        """Settings that differ between the lives of the run."""
        lives = [e.get("environment") for e in self.of("run_begin", "restart")]
        whole = [_flat(life) for life in lives if isinstance(life, dict)]
        changed = []
        for number, (old, new) in enumerate(pairwise(whole), 1):
            for key in sorted(old.keys() | new.keys()):
                if key not in ("started", "argv") and old.get(key) != new.get(key):
                    changed.append(f"restart {number}: {key} {old.get(key, MISSING)} -> {new.get(key, MISSING)}")
        return changed


def spoken(value: Any) -> str:
    """A number of the journal as a person would write it."""
    return f"{value:.4g}" if isinstance(value, int | float) else MISSING


def _action(action: dict[str, Any]) -> str:
    name, step = action.get("action"), action.get("step", MISSING)
    if name == "rollback":
        text = f"rolled back from step {action.get('from_step', MISSING)} to {action.get('to_step', MISSING)}"
    elif name == "skip_data":
        text = f"{action.get('batches', MISSING)} batches of data left out from step {step} on"
    elif name == "cut_lr":
        text = f"learning rate cut from {spoken(action.get('lr_from'))} to {spoken(action.get('lr_to'))}"
        text += f", back over {action.get('ramp_steps', MISSING)} steps"
    elif name == "skip":
        text = f"update of step {step} not applied"
    else:
        text = f"{name} at step {step}"
    return f"{text} ({action.get('reason', 'reason not on record')})"


def _flat(value: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= _flat(inner, f"{before}{key}.") if isinstance(inner, dict) else {f"{before}{key}": inner}
    return found
