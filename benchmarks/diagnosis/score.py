"""Diagnoses of the labelled real logs against their labels.

    python -m benchmarks.diagnosis.score [--json FILE] [--all]

Each file is read and diagnosed as `holdfast diagnose` would. Labels and events under 0.6 confidence are left out. An event
is met by an incident of the same sort that overlaps it, or begins within 2% of the run or 3 log intervals of its start.
A run that is healthy or noisy, with no event of its own, should have no incident at all; one run counts once, however
many files it left. What a label marks as a trap must not be an incident.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.detectors.corpus import CONFIDENT, folder, lines
from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis.diagnose import DiagnosisReport, diagnose
from holdfast.diagnosis.importers import read
from holdfast.diagnosis.model.table import Table

SORTS = {
    "nan": {"nan"},
    "spike": {"spike", "spike_recovered"},
    "spike_recovered": {"spike", "spike_recovered"},
    "divergence": {"divergence", "silent_divergence"},
    "silent_divergence": {"divergence", "silent_divergence"},
    "grad_explosion": {"grad_explosion", "grad_nonfinite"},
    "grad_nonfinite": {"grad_explosion", "grad_nonfinite"},
}
"""kinds a label uses, and the kinds of a verdict that say the same"""
QUIET = {"healthy", "noisy"}
LEAST = {"events": 0.85, "quiet": 0.95}


class Case(NamedTuple):
    """One labelled file and what was said of it."""

    file: str
    label: dict[str, Any]
    group: str
    report: DiagnosisReport
    interval: float
    length: float


def cases(place: Path) -> list[Case]:
    index = {entry["file"]: entry for entry in lines(place / "INDEX.jsonl")}
    found = []
    for label in lines(place / "LABELS.jsonl"):
        if label["label_confidence"] < CONFIDENT:
            continue
        try:
            table = longest(read(place / label["file"]))
        except LogRefused as refused:
            print(f"refused: {refused}")
            continue
        group = index[label["file"]].get("run_group") or label["file"]
        length = float(table.step.max() - table.step.min()) if len(table) else 0.0
        found.append(Case(label["file"], label, group, diagnose(table), table.step_interval(), length))
    return found


def longest(tables: list[Table]) -> Table:
    return max(tables, key=lambda t: len(t.series("loss").step))


def events(case: Case) -> list[dict[str, Any]]:
    return [e for e in case.label["events"] if e["kind"] in SORTS and e["confidence"] >= CONFIDENT]


def met(case: Case, event: dict[str, Any]) -> bool:
    near = max(0.02 * case.length, 3 * case.interval)
    for verdict in case.report.verdicts:
        if verdict.kind not in SORTS[event["kind"]]:
            continue
        overlaps = verdict.step_start <= event["end_step"] and event["start_step"] <= verdict.step_end
        if overlaps or abs(verdict.step_start - event["start_step"]) <= near:
            return True
    return False


def score(found: list[Case]) -> dict[str, Any]:
    sought = [(case, event) for case in found for event in events(case)]
    hit = [met(case, event) for case, event in sought]
    quiet: dict[str, list[Case]] = {}
    for case in found:
        if case.label["label"] in QUIET and not events(case):
            quiet.setdefault(case.group, []).append(case)
    loud = {group for group, members in quiet.items() if any(case.report.verdicts for case in members)}
    traps = [case for case in found if case.label.get("trap")]
    kinds = Counter(event["kind"] for _, event in sought)
    kinds_met = Counter(event["kind"] for (_, event), ok in zip(sought, hit, strict=True) if ok)
    return {
        "events": len(sought),
        "met": sum(hit),
        "share": sum(hit) / len(sought) if sought else 0.0,
        "by_kind": {kind: [kinds_met[kind], count] for kind, count in sorted(kinds.items())},
        "missed": [{"file": case.file, **event} for (case, event), ok in zip(sought, hit, strict=True) if not ok],
        "quiet": len(quiet),
        "quiet_without_incident": len(quiet) - len(loud),
        "quiet_share": 1 - len(loud) / len(quiet) if quiet else 0.0,
        "loud": {
            group: [f"{v.kind} {v.step_start:g}-{v.step_end:g}" for case in quiet[group] for v in case.report.verdicts]
            for group in sorted(loud)
        },
        "traps": {
            case.file: {"trap": case.label["trap"], "avoided": not case.report.verdicts or bool(events(case))}
            for case in traps
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Score diagnoses against the labels of real logs.")
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--all", action="store_true", help="print every verdict of every file")
    options = parser.parse_args()
    place = folder()
    if place is None:
        print("corpus not found; set HOLDFAST_CORPUS")
        return 1
    found = cases(place)
    if options.all:
        for case in found:
            said = [f"{v.kind} {v.step_start:g}-{v.step_end:g} ({v.leaf})" for v in case.report.verdicts]
            print(f"{case.file}: {case.label['label']}: {said}")
    result = score(found)
    print(f"events met: {result['met']} of {result['events']} = {result['share']:.3f}")
    for kind, (ok, count) in result["by_kind"].items():
        print(f"  {kind:<18} {ok} of {count}")
    print(f"quiet runs without an incident: {result['quiet_without_incident']} of {result['quiet']}")
    print(f"traps avoided: {sum(t['avoided'] for t in result['traps'].values())} of {len(result['traps'])}")
    for miss in result["missed"]:
        print(f"missed: {miss['file']} {miss['kind']} {miss['start_step']}-{miss['end_step']} ({miss['confidence']})")
    for group, said in result["loud"].items():
        print(f"loud: {group}: {said[:6]}")
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["share"] >= LEAST["events"] and result["quiet_share"] >= LEAST["quiet"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
