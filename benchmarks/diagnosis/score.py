"""Scores the diagnoses of real logs against their labels.

    python -m benchmarks.diagnosis.score [--json FILE] [--all]

Reads and diagnoses each file like `holdfast diagnose`. Labels and events with a confidence under 0.6 are ignored. An event
is met by an incident of the same kind that overlaps it or begins near it: within 2% of the run or 3 log intervals.
A healthy or noisy run without a labelled event must have no incident; all files of a run count once. A trap looks like
an instability and must not be an incident.
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

EQUIVALENT_KINDS = {
    "nan": {"nan"},
    "spike": {"spike", "spike_recovered"},
    "spike_recovered": {"spike", "spike_recovered"},
    "divergence": {"divergence", "silent_divergence"},
    "silent_divergence": {"divergence", "silent_divergence"},
    "grad_explosion": {"grad_explosion", "grad_nonfinite"},
    "grad_nonfinite": {"grad_explosion", "grad_nonfinite"},
    "dead_run": {"dead_run"},
}
"""kind in a label -> kinds of a verdict that mean the same"""
QUIET_LABELS = {"healthy", "noisy"}
MIN_SHARES = {"events": 0.85, "quiet": 0.95}


class ScoredLog(NamedTuple):
    """One labelled file and its diagnosis."""

    file: str
    label: dict[str, Any]
    group: str
    report: DiagnosisReport
    interval: float
    length: float


def diagnose_corpus(corpus: Path) -> list[ScoredLog]:
    """Diagnose every file with a confident label. Prints the files that are refused."""
    index = {entry["file"]: entry for entry in lines(corpus / "INDEX.jsonl")}
    logs = []
    for label in lines(corpus / "LABELS.jsonl"):
        if label["label_confidence"] < CONFIDENT:
            continue
        try:
            tables = read(corpus / label["file"])
        except LogRefused as refused:
            print(f"refused: {refused}")
            continue
        group = index[label["file"]].get("run_group") or label["file"]
        table = max(tables, key=lambda t: len(t.series("loss").step))
        length = float(table.step.max() - table.step.min()) if len(table) else 0.0
        report = diagnose(table)
        report.verdicts = [verdict for run in tables for verdict in diagnose(run).verdicts]
        logs.append(ScoredLog(label["file"], label, group, report, table.step_interval(), length))
    return logs


def confident_events(log: ScoredLog) -> list[dict[str, Any]]:
    return [e for e in log.label["events"] if e["kind"] in EQUIVALENT_KINDS and e["confidence"] >= CONFIDENT]


def is_met(log: ScoredLog, event: dict[str, Any]) -> bool:
    tolerance = max(0.02 * log.length, 3 * log.interval)
    for verdict in log.report.verdicts:
        if verdict.kind not in EQUIVALENT_KINDS[event["kind"]]:
            continue
        overlaps = verdict.step_start <= event["end_step"] and event["start_step"] <= verdict.step_end
        if overlaps or abs(verdict.step_start - event["start_step"]) <= tolerance:
            return True
    return False


def score(logs: list[ScoredLog]) -> dict[str, Any]:
    events = [(log, event) for log in logs for event in confident_events(log)]
    met = [is_met(log, event) for log, event in events]
    quiet: dict[str, list[ScoredLog]] = {}
    for log in logs:
        if log.label["label"] in QUIET_LABELS and not confident_events(log):
            quiet.setdefault(log.group, []).append(log)
    loud = {group for group, members in quiet.items() if any(log.report.verdicts for log in members)}
    kinds = Counter(event["kind"] for _, event in events)
    kinds_met = Counter(event["kind"] for (_, event), ok in zip(events, met, strict=True) if ok)
    return {
        "events": len(events),
        "met": sum(met),
        "share": sum(met) / len(events) if events else 0.0,
        "by_kind": {kind: [kinds_met[kind], count] for kind, count in sorted(kinds.items())},
        "missed": [{"file": log.file, **event} for (log, event), ok in zip(events, met, strict=True) if not ok],
        "quiet": len(quiet),
        "quiet_without_incident": len(quiet) - len(loud),
        "quiet_share": 1 - len(loud) / len(quiet) if quiet else 0.0,
        "loud": {
            group: [f"{v.kind} {v.step_start:g}-{v.step_end:g}" for log in quiet[group] for v in log.report.verdicts]
            for group in sorted(loud)
        },
        "traps": {
            log.file: {"trap": log.label["trap"], "avoided": not log.report.verdicts or bool(confident_events(log))}
            for log in logs
            if log.label.get("trap")
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Score diagnoses against the labels of real logs.")
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--all", action="store_true", help="print every verdict of every file")
    options = parser.parse_args()
    corpus = folder()
    if corpus is None:
        print("corpus not found; set HOLDFAST_CORPUS")
        return 1
    logs = diagnose_corpus(corpus)
    if options.all:
        for log in logs:
            verdicts = [f"{v.kind} {v.step_start:g}-{v.step_end:g} ({v.leaf})" for v in log.report.verdicts]
            print(f"{log.file}: {log.label['label']}: {verdicts}")
    result = score(logs)
    print(f"events met: {result['met']} of {result['events']} = {result['share']:.3f}")
    for kind, (ok, count) in result["by_kind"].items():
        print(f"  {kind:<18} {ok} of {count}")
    print(f"quiet runs without an incident: {result['quiet_without_incident']} of {result['quiet']}")
    print(f"traps avoided: {sum(t['avoided'] for t in result['traps'].values())} of {len(result['traps'])}")
    for miss in result["missed"]:
        print(f"missed: {miss['file']} {miss['kind']} {miss['start_step']}-{miss['end_step']} ({miss['confidence']})")
    for group, verdicts in result["loud"].items():
        print(f"false alarm: {group}: {verdicts[:6]}")
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["share"] >= MIN_SHARES["events"] and result["quiet_share"] >= MIN_SHARES["quiet"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
