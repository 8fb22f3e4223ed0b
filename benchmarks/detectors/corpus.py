"""Labelled real logs, read with this project's own importers. They stay where they are: nothing of them is kept here.

A run counts once, however many files it left. False alarms are counted only on the runs drawn at random. All quiet runs are
shown as well, and are biased. Labels and events under 0.6 confidence are left out. An
event is found by an alarm within 2% of the run or 3 log intervals of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.detectors.alarms import Alarm
from benchmarks.detectors.contenders import Contender
from benchmarks.detectors.healthy_run import Curve
from benchmarks.detectors.intervals import wilson

CONFIDENT = 0.6
SOUGHT = {"spike", "spike_recovered", "nan", "divergence", "silent_divergence", "grad_explosion", "grad_nonfinite"}
QUIET = {"healthy", "noisy", "plateau"}
Rows = dict[str, dict[str, str]]


class Sought(NamedTuple):
    """An event of a log, in its own steps."""

    kind: str
    start: float
    end: float


class Case(NamedTuple):
    """One labelled run."""

    file: str
    curve: Curve
    quiet: bool
    random: bool
    events: tuple[Sought, ...]


def folder() -> Path | None:
    """Return the folder of the corpus, HOLDFAST_CORPUS or next to the checkout; None if there is none."""
    named = os.environ.get("HOLDFAST_CORPUS")
    place = Path(named) if named else Path(__file__).resolve().parents[3] / "shared" / "corpus"
    return place if (place / "LABELS.jsonl").is_file() else None


def rows(contenders: Iterable[Contender]) -> tuple[Rows, dict[str, Any]]:
    """Return rows of the table and their data, or one row with the reason why there are none."""
    place = folder()
    if place is None:
        return _message("corpus: not found; set HOLDFAST_CORPUS")
    try:
        from holdfast.diagnosis.importers import read
    except ImportError:
        return _message("corpus: this version has no importers to read it with")
    cases, unread = load(place, read)
    table: Rows = {}
    data: dict[str, Any] = {"cases": len(cases), "unread": unread, "detectors": {}}
    for contender in contenders:
        result = _score(contender, cases)
        data["detectors"][contender.name] = result
        for title, cell in _cells(result).items():
            table.setdefault(title, {})[contender.name] = cell
    return table, data


def load(place: Path, read: Callable[[Path], Any]) -> tuple[list[Case], list[str]]:
    """Return every readable labelled run once, and the unreadable files with the reason."""
    index = {entry["file"]: entry for entry in lines(place / "INDEX.jsonl")}
    seen: set[str] = set()
    cases, unread = [], []
    for label in lines(place / "LABELS.jsonl"):
        entry = index.get(label["file"], {})
        group = entry.get("run_group") or label["file"]
        if label["label_confidence"] < CONFIDENT or group in seen:
            continue
        try:
            case = _case(place, label, entry, read)
        except Exception as error:  # one log that breaks its importer is a finding, not the end of the benchmark
            unread.append(f"{label['file']}: {type(error).__name__}: {error}")
            continue
        if case is None:
            unread.append(f"{label['file']}: no loss in it")
            continue
        seen.add(group)
        cases.append(case)
    return cases, unread


def _case(place: Path, label: dict[str, Any], entry: dict[str, Any], read: Callable[[Path], Any]) -> Case | None:
    tables = [t for t in read(place / label["file"]) if t.has("loss")]
    if not tables:
        return None
    curve = as_curve(max(tables, key=lambda t: int(t.present["loss"].sum())), label["file"])
    events = tuple(
        Sought(e["kind"], float(e["start_step"]), float(e["end_step"]))
        for e in label["events"]
        if e["kind"] in SOUGHT and e["confidence"] >= CONFIDENT
    )
    random = any(str(s).startswith("random") for s in entry.get("selection", ()))
    return Case(label["file"], curve, label["label"] in QUIET and not events, random, events)


def as_curve(table: Any, name: str) -> Curve:
    """Return the rows of a table that have a loss. Missing values stay missing, NaN stays NaN."""
    there = table.present["loss"]
    column = {n: table.columns[n][there] for n in table.columns}
    n = int(there.sum())
    norm = column.get("grad_norm", np.full(n, np.nan))
    absent = ~table.present["grad_norm"][there] if "grad_norm" in table.columns else np.ones(n, bool)
    lr = column.get("lr", np.full(n, np.nan))
    return Curve(name, 0, column["loss"], norm, lr, steps=table.step[there], absent=absent)


def found(case: Case, alarms: list[Alarm]) -> list[bool]:
    """Return for each event whether an alarm is near it."""
    steps = case.curve.steps
    if steps is None or not len(steps):
        return [False] * len(case.events)
    apart = np.diff(steps)
    interval = float(np.median(apart[apart > 0])) if (apart > 0).any() else 1.0
    near = max(0.02 * float(steps.max() - steps.min()), 3 * interval)
    at = [float(steps[a.step]) for a in alarms]
    return [any(e.start - near <= step <= e.end + near for step in at) for e in case.events]


def _score(contender: Contender, cases: list[Case]) -> dict[str, Any]:
    detector = contender.build()
    hits: list[bool] = []
    missed: list[str] = []
    false: dict[str, list[tuple[bool, bool]]] = {"random": [], "all": []}
    loud: list[str] = []
    for case in cases:
        alarms = detector.run(case.curve)
        if case.events:
            here = found(case, alarms)
            hits += here
            pairs = zip(case.events, here, strict=True)
            missed += [f"{case.file} {e.kind} {e.start:g}-{e.end:g}" for e, hit in pairs if not hit]
        elif case.quiet:
            pair = any(a.costly for a in alarms), bool(alarms)
            false["all"].append(pair)
            if case.random:
                false["random"].append(pair)
            if pair[0]:
                loud.append(case.file)
    return {
        "events": len(hits),
        "found": sum(hits),
        "missed": missed,
        "false": {name: _count(pairs) for name, pairs in false.items()},
        "loud": loud,
    }


def _count(pairs: list[tuple[bool, bool]]) -> dict[str, int]:
    return {"runs": len(pairs), "costly": sum(c for c, _ in pairs), "any": sum(a for _, a in pairs)}


def _cells(result: dict[str, Any]) -> dict[str, str]:
    low, high = wilson(result["found"], result["events"])
    share = result["found"] / result["events"] if result["events"] else 0.0
    random, every = result["false"]["random"], result["false"]["all"]
    return {
        f"corpus: recall of {result['events']} events": f"{share:.2f} ({low:.2f}-{high:.2f})",
        f"corpus: false, {random['runs']} random runs, costly/any": f"{random['costly']}/{random['any']}",
        f"corpus: false, {every['runs']} quiet runs, costly/any": f"{every['costly']}/{every['any']}",
    }


def _message(text: str) -> tuple[Rows, dict[str, Any]]:
    return {text: {}}, {"message": text}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
