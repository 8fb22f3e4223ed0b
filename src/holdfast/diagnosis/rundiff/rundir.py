"""A run directory, read in one pass: run.json, the committed steps of metrics.jsonl, what the journal says was done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.base.errors import LogRefused, RunDirError
from holdfast.core.record import facts as said
from holdfast.core.record.facts import KNOWN_FACTS
from holdfast.core.record.journal import with_current_names
from holdfast.core.record.rundir import RunDir
from holdfast.diagnosis.rundiff.checks import claims
from holdfast.diagnosis.rundiff.side import Recovery, Side, flatten, number

_READ = ("loss", "grad_norm", "lr")
_LOST = ("lines_lost", "torn")
# Said elsewhere in a better form: the facts have the data and the weights, the LR curve has the LR.
_LEFT_OUT = ("run", "config", "facts", "data", "precision", "tokens_per_step", "device", "seed", "dtypes", "started")
_EVENTS = (b'"facts"', b'"action"', b'"quarantine"', b'"restart"', b'"run_end"', b'"run_begin"')


def is_run(place: Path) -> bool:
    folder = RunDir(place)
    return folder.run.is_file() or folder.journal.is_file()


def load(place: Path) -> Side:
    folder = RunDir(place)
    side = Side(str(place), "holdfast", np.empty(0))
    try:
        about = said.read_run_json(folder.run) or {}
    except RunDirError as error:
        about = {}
        side.limits.append(str(error).split(";")[0])
    _about(side, about)
    if folder.metrics.is_file():
        _curves(side, folder.path)
    else:
        side.limits.append(f"{folder.metrics.name} is not there: no curves")
    if folder.journal.is_file():
        _journal(side, folder.journal, about)
    else:
        side.limits.append(f"{folder.journal.name} is not there: what was done to the run is not known")
    return side


# ---- run.json


def _about(side: Side, about: dict[str, Any]) -> None:
    recorded = about.get("facts") if isinstance(about.get("facts"), dict) else {}
    assert isinstance(recorded, dict)
    side.known = {name: value for name, value in recorded.items() if name in KNOWN_FACTS}
    rest = {name: value for name, value in recorded.items() if name not in KNOWN_FACTS}
    config = about.get("config") if isinstance(about.get("config"), dict) else {}
    seen = {name: value for name, value in about.items() if name not in _LEFT_OUT}
    for name in ("precision", "seed", "tokens_per_step"):
        if about.get(name) is not None:
            side.known.setdefault(name, about[name])
    if isinstance(about.get("dtypes"), dict):
        seen["dtypes"] = " + ".join(sorted(about["dtypes"]))
    side.settings = {**flatten(seen), **flatten(config), **(flatten(rest) if rest else {})}
    side.settings.pop("", None)
    for name, value in recorded.get("eval", {}).items() if isinstance(recorded.get("eval"), dict) else ():
        if isinstance(value, float) or number(value) is not None:
            side.evals[name] = [(None, float(value))]


# ---- metrics.jsonl


def _curves(side: Side, place: Path) -> None:
    """The committed steps, without those that were rolled back: as the importer of run directories reads them."""
    # Late: the importers bring in every format there is.
    from holdfast.diagnosis.importers.formats import rundir

    try:
        (table,) = rundir.read(place)
    except LogRefused as error:
        side.limits.append(error.reason)
        return
    side.step = table.step
    side.columns = {
        name: np.where(table.present[name], table.columns[name], np.nan) for name in _READ if table.has(name)
    }
    taken = table.columns.get("batch_size")
    if taken is not None and bool(np.isfinite(taken).all()):
        side.samples = np.cumsum(taken)
    side.limits += [limit.text for limit in table.limits if limit.code in _LOST]
    if len(side.step) and side.step[0] > 1:
        side.limits.append(f"metrics.jsonl begins at step {side.step[0]:.0f}")


# ---- journal.jsonl


def _journal(side: Side, path: Path, about: dict[str, Any]) -> None:
    over_time: dict[str, list[tuple[int | None, float]]] = {}
    side.recoveries, torn = [], 0
    with path.open("rb") as file:
        for line in file:
            if not any(name in line[:60] for name in _EVENTS):
                continue
            try:
                event = json.loads(line)
                kind = event["event"]
            except (ValueError, KeyError, TypeError, RecursionError):
                torn += 1
                continue
            if kind == "facts":
                _evals(over_time, event)
            elif kind == "restart":
                _restarted(side, about, with_current_names(event).get("environment"))
            elif kind == "run_end" and isinstance(event.get("summary"), dict):
                side.status = event["summary"].get("status")
            elif (recovery := _recovery(event)) is not None:
                side.recoveries.append(recovery)
    for name, values in over_time.items():
        side.evals[name] = values
    if torn and not any("journal" in limit for limit in side.limits):
        side.limits.append(f"{torn} lines of {path.name} cannot be read")
    if side.status is None:
        side.limits.append("the run has not ended, or was killed")


def _evals(found: dict[str, list[tuple[int | None, float]]], event: dict[str, Any]) -> None:
    results = event.get("facts", {}).get("eval") if isinstance(event.get("facts"), dict) else None
    for name, value in results.items() if isinstance(results, dict) else ():
        if isinstance(value, float) or number(value) is not None:
            found.setdefault(name, []).append((_whole(event.get("step")), float(value)))


def _restarted(side: Side, about: dict[str, Any], environment: Any) -> None:
    """Settings that a later life was started with and the first was not."""
    if not isinstance(environment, dict) or not isinstance(environment.get("config"), dict):
        return
    first = flatten(about.get("config") or {})
    for key, value in flatten(environment["config"]).items():
        if key in first and first[key] != value and claims(key) not in (None, "housekeeping"):
            side.restarts[key] = value


def _recovery(event: dict[str, Any]) -> Recovery | None:
    step, samples = _whole(event.get("step")), event.get("samples")
    if event["event"] == "quarantine" and isinstance(samples, list) and samples:
        return Recovery("quarantine", 0, 0, f"{len(samples)} sample ids never drawn again")
    if event["event"] != "action" or step is None:
        return None
    action = str(event.get("action"))
    if action == "rollback":
        back = _whole(event.get("to_step")) or 0
        return Recovery(action, back + 1, max(step, back + 1), f"rolled back from step {step} to {back}")
    if action == "cut_lr":
        last, factor = step + (_whole(event.get("ramp_steps")) or 0), number(event.get("factor")) or 1.0
        return Recovery(action, step + 1, last, f"LR x {factor:g} from step {step + 1}, back by {last}", factor)
    if action == "skip_data":
        return Recovery(action, step, step, f"{event.get('batches')} batches left out at step {step}")
    if action == "tighten_clip":
        last = step + (_whole(event.get("steps")) or 0)
        return Recovery(action, step + 1, last, f"clip {event.get('max_norm')} from step {step + 1} to {last}")
    return Recovery(action, step, step, f"{action.replace('_', ' ')} at step {step}")


def _whole(value: Any) -> int | None:
    found = number(value)
    return None if found is None or abs(found) > 2**53 else int(found)
