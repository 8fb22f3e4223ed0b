"""The journal of a run directory, as the diagnosis needs it: findings, actions, and their cost."""

from __future__ import annotations

import functools
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.core.base.errors import RunDirError
from holdfast.core.checkpoints.bundles import read_answer
from holdfast.core.record.journal import read
from holdfast.core.record.quarantine import Quarantine
from holdfast.core.record.tally import IncidentSummary, Summary, Tally

MISSING = "not recorded"
_CERTIFIED = ("start", "stop", "signal")
"""reasons of a save whose checkpoint is good as soon as it is written"""


class ListedCheckpoint(NamedTuple):
    """Holds a checkpoint of the journal or of the disk. `health`: good, candidate, bad, quarantined, refused or failed."""

    name: str
    step: int
    health: str
    why: str
    on_disk: bool


class RunJournal:
    """Holds the events of a run directory. `exists` is False for the log of another tool."""

    def __init__(self, events: list[dict[str, Any]], torn_lines: int, file: Path | None) -> None:
        self.events, self.torn_lines, self.exists, self._file = events, torn_lines, file is not None, file

    def select(self, *names: str) -> list[dict[str, Any]]:
        """Return the events with one of these names, in their order."""
        return [event for event in self.events if event.get("event") in names]

    def actions(self, *names: str) -> list[dict[str, Any]]:
        return [event for event in self.select("action") if event.get("action") in names]

    @functools.cached_property
    def _tally(self) -> Tally:
        tally = Tally()
        for event in self.events:
            tally.feed(event)
        return tally

    @functools.cached_property
    def summary(self) -> Summary | None:
        """The summary of the run; None without events."""
        if not self.events:
            return None
        ends = [event["step"] for event in self.select("run_end", "progress") if isinstance(event.get("step"), int)]
        return self._tally.summary(ends[-1] if ends else 0)

    @property
    def incidents(self) -> list[IncidentSummary]:
        return self.summary.incidents if self.summary else []

    def steps_undone(self) -> int | None:
        """Count the steps that rollbacks undid; None without a journal."""
        if not self.exists:
            return None
        spans = [(event.get("from_step"), event.get("to_step")) for event in self.actions("rollback")]
        return sum(start - end for start, end in spans if isinstance(start, int) and isinstance(end, int))

    @functools.cached_property
    def _last_steps(self) -> dict[int, int]:
        last: dict[int, int] = {}
        for event in self.select("action", "outcome", "experiment", "cause"):
            step, incident = event.get("step"), event.get("incident")
            if isinstance(step, int) and isinstance(incident, int):
                last[incident] = max(step, last.get(incident, step))
        return last

    def last_step(self, line: IncidentSummary) -> int:
        """Return the last step of an incident with an action, an outcome, an experiment or a cause."""
        return max(line.step, self._last_steps.get(line.number, line.step))

    def checkpoints(self) -> list[ListedCheckpoint]:
        """Return every checkpoint with its last health before it was deleted. `on_disk`: no deletion is on record."""
        found: dict[str, ListedCheckpoint] = {}
        for event in self.select("checkpoint"):
            status, old = event["status"], found.get(event["name"])
            saved = "good" if event.get("reason") in _CERTIFIED else "candidate"
            health = {"saved": saved, "unmarked": "candidate", "pruned": old.health if old else "pruned"}
            why = event.get("why") or (old.why if old else "")
            found[event["name"]] = ListedCheckpoint(
                event["name"], event["step"], health.get(status, status), str(why), status != "pruned"
            )
        return list(found.values())

    def experiments(self, incident: int) -> list[dict[str, Any]]:
        """Return the experiments of an incident, each with its result: if another has begun after it, it came back."""
        experiments: list[dict[str, Any]] = []
        for event in self.select("experiment"):
            if event.get("incident") != incident:
                continue
            if experiments and experiments[-1].get("result") == "begun":
                last = experiments.pop()
                event = {**event, "rung": event.get("rung") or last.get("rung")}
                if event["rung"] != last.get("rung"):
                    experiments.append({**last, "result": "came_back", "text": ""})
            experiments.append(event)
        return experiments

    def earlier_causes(self, line: IncidentSummary) -> list[dict[str, Any]]:
        """Return the other causes that an incident had before its last one, such as that of a fault before it."""
        events = [event for event in self.select("cause") if event.get("incident") == line.number]
        return [event for event in events if event.get("cause") != line.cause]

    def findings(self, first: int, last: int, kind: str | None = None) -> list[dict[str, Any]]:
        """Return the findings of steps `first` to `last`, of one kind or of all."""
        found = [event for event in self._findings if first <= event["step"] <= last]
        return [event for event in found if kind is None or event.get("kind") == kind]

    @functools.cached_property
    def _findings(self) -> list[dict[str, Any]]:
        return [event for event in self.select("finding") if isinstance(event.get("step"), int)]

    @property
    def replays(self) -> dict[int, dict[str, Any]]:
        """The newest verdict of a replay by incident: of `holdfast replay`, else of the run itself."""
        verdicts = {e["incident"]: e for e in self.select("replay") if e.get("result") == "verdict" and "incident" in e}
        incidents = sorted({e["incident"] for e in self.select("incident_opened")} | verdicts.keys())
        for number in incidents:
            answer = None if self._file is None else read_answer(self._file.parent, number)
            if answer is not None:
                verdicts[number] = answer
        return verdicts

    @property
    def noted_causes(self) -> list[IncidentSummary]:
        """The notes with a cause; they are no incidents."""
        return list(self._tally.notes.values())

    def describe_exclusion(self, line: IncidentSummary) -> str:
        """Say whether the data at fault is left out, as quarantine.json has it."""
        try:
            file = None if self._file is None else self._file.with_name("quarantine.json")
            return f"it is {Quarantine(file).describe(line.data, line.samples)}"
        except RunDirError:
            return "whether it is left out is not known, because quarantine.json is damaged"

    def batches_skipped(self) -> int:
        counts = [event.get("batches") for event in self.actions("skip", "skip_data")]
        return sum(count for count in counts if isinstance(count, int))

    def finding_lines(self) -> list[str]:
        """Describe each new finding of the online detectors, with its delay after the onset."""
        lines = []
        for finding in self.select("finding"):
            step, onset = finding.get("step"), finding.get("onset")
            if finding.get("new", True):
                delay = f"{step - onset} steps" if isinstance(step, int) and isinstance(onset, int) else MISSING
                message = f"{finding.get('detector')}: {finding.get('message')}"
                lines.append(f"online, step {step}: {message} (delay after onset: {delay})")
        return lines

    def action_lines(self) -> list[str]:
        """Describe each action in order. Repeated skips for one incident share one extra line."""
        lines: list[str] = []
        skips: dict[Any, list[Any]] = {}
        for action in self.select("action"):
            if action.get("action") == "skip":
                steps = skips.setdefault(action.get("incident"), [])
                steps.append(action.get("step"))
                if len(steps) > 1:
                    continue
            place = "" if action.get("action") == "split" else f"incident {action.get('incident', MISSING)}: "
            lines.append(place + _describe_action(action))
        for incident, steps in skips.items():
            if len(steps) > 1:
                lines.append(
                    f"incident {incident}: {len(steps)} updates skipped in all, steps {steps[0]} to {steps[-1]}"
                )
        return lines

    def config_changes(self) -> list[str]:
        """Describe the settings that changed between the processes of the run."""
        environments = [event.get("environment") for event in self.select("run_begin", "restart")]
        flat = [_flatten(environment) for environment in environments if isinstance(environment, dict)]
        changes = []
        for restart, (old, new) in enumerate(pairwise(flat), 1):
            for key in sorted(old.keys() | new.keys()):
                if key not in ("started", "argv", "masked") and old.get(key) != new.get(key):
                    changes.append(f"restart {restart}: {key} {old.get(key, MISSING)} -> {new.get(key, MISSING)}")
        return changes


def read_run_journal(path: str) -> RunJournal:
    """Read the journal of a run directory. Read it again only if the file has changed."""
    file = Path(path) if Path(path).name == "journal.jsonl" else Path(path) / "journal.jsonl"
    try:
        state = file.stat()
    except (OSError, ValueError):
        return RunJournal([], 0, None)
    return _read(file, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=4)
def _read(file: Path, modified: int, size: int) -> RunJournal:
    try:
        record = read(file)
    except OSError:
        return RunJournal([], 0, None)
    return RunJournal(record.events, len(record.torn), file)


def fmt_recorded(value: Any) -> str:
    """Format a number of the journal; return MISSING for anything else."""
    return f"{value:.4g}" if isinstance(value, int | float) else MISSING


def _describe_action(action: dict[str, Any]) -> str:
    name, step = action.get("action"), action.get("step", MISSING)
    if name == "rollback":
        text = f"rolled back from step {action.get('from_step', MISSING)} to {action.get('to_step', MISSING)}"
    elif name == "skip_data":
        text = f"skipped {action.get('batches', MISSING)} batches of data from step {step} on"
    elif name == "cut_lr":
        text = (
            f"cut the learning rate from {fmt_recorded(action.get('lr_from'))} to {fmt_recorded(action.get('lr_to'))}"
        )
        text += f", restored over {action.get('ramp_steps', MISSING)} steps"
    elif name == "split":
        text = f"served micro-batches of shape {action.get('shape', MISSING)} in {action.get('parts', MISSING)} parts"
        text += f" from step {step} on"
    elif name == "skip":
        text = f"skipped the update of step {step}"
    else:
        text = f"{name} at step {step}"
    return f"{text} ({action.get('reason', 'reason not recorded')})"


def _flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flatten(inner, f"{prefix}{key}.") if isinstance(inner, dict) else {f"{prefix}{key}": inner}
    return flat
