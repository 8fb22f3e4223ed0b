"""Loads a run directory for a comparison: run.json, the committed steps of metrics.jsonl, and the journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.base import durable
from holdfast.core.base.errors import LogRefused, RunDirError
from holdfast.core.base.plain import loads
from holdfast.core.record import facts
from holdfast.core.record.events import event_problem
from holdfast.core.record.journal import MAX_BYTES, MAX_LINE_BYTES, with_current_names
from holdfast.core.record.rundir import RunDir
from holdfast.diagnosis.rundiff.checks import check_for_setting
from holdfast.diagnosis.rundiff.compared_run import ComparedRun, Recovery, as_finite, find_nonfinite_end, flatten

_CURVES = ("loss", "grad_norm", "lr")
# Not settings: other places of the record hold these in a better form.
_NOT_SETTINGS = (
    "run",
    "config",
    "facts",
    "data",
    "precision",
    "tokens_per_step",
    "device",
    "seed",
    "dtypes",
    "started",
)
_EVENTS = (b'"facts"', b'"action"', b'"quarantine"', b'"restart"', b'"run_end"', b'"run_begin"')


def is_run(place: Path) -> bool:
    folder = RunDir(place)
    return durable.is_regular(folder.run) or durable.is_regular(folder.journal)


def load(place: Path) -> ComparedRun:
    """Load a run directory. A missing or damaged file becomes a limit."""
    folder = RunDir(place)
    run = ComparedRun(str(place), "holdfast", np.empty(0))
    try:
        about = facts.read_run_json(folder.run) or {}
    except RunDirError as error:
        about = {}
        run.limits.append(str(error).split(";")[0])
    _read_settings(run, about)
    if durable.is_regular(folder.metrics):
        _read_curves(run, folder.path)
    else:
        run.limits.append(f"{folder.metrics.name} is missing or not a regular file: no curves")
    try:
        _read_journal(run, folder.journal, about)
    except OSError as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        run.limits.append(f"{folder.journal.name} {why}: recoveries are not known")
    return run


def _read_settings(run: ComparedRun, about: dict[str, Any]) -> None:
    recorded, config = (_mapping(about.get(name)) for name in ("facts", "config"))
    run.known = {name: value for name, value in recorded.items() if name in facts.KNOWN_FACTS}
    others = {name: value for name, value in recorded.items() if name not in facts.KNOWN_FACTS}
    environment = {name: value for name, value in about.items() if name not in _NOT_SETTINGS}
    for name in ("precision", "seed", "tokens_per_step"):
        if about.get(name) is not None:
            run.known.setdefault(name, about[name])
    if isinstance(about.get("dtypes"), dict):
        environment["dtypes"] = " + ".join(sorted(about["dtypes"]))
    run.settings = {**flatten(environment), **flatten(config), **flatten(others)}
    run.settings.pop("", None)
    run.evals = {name: [(None, value)] for name, value in _numbers(recorded.get("eval")).items()}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _numbers(results: Any) -> dict[str, float]:
    """Return the numbers of a mapping, NaN and Inf included."""
    return {
        name: float(value)
        for name, value in _mapping(results).items()
        if isinstance(value, float) or as_finite(value) is not None
    }


def _read_curves(run: ComparedRun, place: Path) -> None:
    """Read the committed steps without those that were rolled back, as the importer reads them."""
    # A late import: it loads the importer of every format.
    from holdfast.diagnosis.importers.formats import rundir

    try:
        (table,) = rundir.read(place)
    except LogRefused as error:
        run.limits.append(error.reason)
        return
    run.step = table.step
    run.columns = {n: np.where(table.present[n], table.columns[n], np.nan) for n in _CURVES if table.has(n)}
    run.nonfinite_since = find_nonfinite_end(table.series("loss"))
    batch_size = table.columns.get("batch_size")
    if batch_size is not None and bool(np.isfinite(batch_size).all()):
        run.samples = np.cumsum(batch_size)
    run.limits += [limit.text for limit in table.limits if limit.code in ("lines_lost", "torn")]
    if len(run.step) and run.step[0] > 1:
        run.limits.append(f"metrics.jsonl begins at step {run.step[0]:.0f}")


def _read_journal(run: ComparedRun, path: Path, about: dict[str, Any]) -> None:
    evals: dict[str, list[tuple[int | None, float]]] = {}
    recoveries: list[Recovery] = []
    torn = skipped = 0
    for _, line in durable.read_lines(path, MAX_BYTES, MAX_LINE_BYTES):
        if not any(name in line[:60] for name in _EVENTS):
            continue
        try:
            event = loads(line)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            torn += 1
            continue
        event = with_current_names(event)
        if event_problem(event) is not None:
            skipped += 1
            continue
        kind = event["event"]
        if kind == "facts":
            for name, value in _numbers(event["facts"].get("eval")).items():
                evals.setdefault(name, []).append((_as_step(event.get("step")), value))
        elif kind == "restart":
            _read_restart(run, about, event.get("environment"))
        elif kind == "run_end" and event.get("summary") is not None:
            status = event["summary"].get("status")
            run.status = status if isinstance(status, str) else None
        elif (recovery := _recovery(event)) is not None:
            recoveries.append(recovery)
    run.recoveries = recoveries
    run.evals |= evals
    if torn and not any("journal" in limit for limit in run.limits):
        run.limits.append(f"{torn} lines of {path.name} cannot be read")
    if skipped:
        run.limits.append(f"{skipped} lines of {path.name} are no events of this version")
    if run.status is None:
        run.limits.append("the run has not ended, or was killed")


def _read_restart(run: ComparedRun, about: dict[str, Any], environment: Any) -> None:
    """Collect the settings that a restart changed."""
    first = flatten(about.get("config") or {})
    for key, value in flatten(_mapping(_mapping(environment).get("config"))).items():
        if key in first and first[key] != value and check_for_setting(key) not in (None, "housekeeping"):
            run.restarts[key] = value


def _recovery(event: dict[str, Any]) -> Recovery | None:
    step, samples = _as_step(event.get("step")), event.get("samples")
    if event["event"] == "quarantine" and isinstance(samples, list) and samples:
        return Recovery("quarantine", 0, 0, f"{len(samples)} sample ids excluded for good")
    if event["event"] != "action" or step is None:
        return None
    action = str(event.get("action"))
    if action == "rollback":
        back = _as_step(event.get("to_step")) or 0
        return Recovery(action, back + 1, max(step, back + 1), f"rolled back from step {step} to {back}")
    if action == "cut_lr":
        last, factor = step + (_as_step(event.get("ramp_steps")) or 0), as_finite(event.get("factor")) or 1.0
        return Recovery(action, step + 1, last, f"LR x {factor:g} from step {step + 1}, back by {last}", factor)
    if action == "skip_data":
        return Recovery(action, step, step, f"{event.get('batches')} batches skipped at step {step}")
    if action == "tighten_clip":
        last = step + (_as_step(event.get("steps")) or 0)
        return Recovery(action, step + 1, last, f"clip {event.get('max_norm')} from step {step + 1} to {last}")
    return Recovery(action, step, step, f"{action.replace('_', ' ')} at step {step}")


def _as_step(value: Any) -> int | None:
    number = as_finite(value)
    return None if number is None or abs(number) > 2**53 else int(number)
