"""One table for people, one dictionary for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from benchmarks.detectors.bars import SPIKES
from benchmarks.detectors.contenders import OURS, Contender
from benchmarks.detectors.curves import ANOMALY, CLEAN
from benchmarks.detectors.scoring import Rate, Recall, Score

Extra = Mapping[str, Mapping[str, str]]
"""further rows: title -> detector -> cell"""


def table(scores: Mapping[Contender, Score], extra: Extra, title: str) -> Table:
    """Detectors across, what was measured down. A cell of a class: recall, median / 95th percentile of the latency."""
    out = Table(title=title, title_justify="left", pad_edge=False, padding=(0, 1, 0, 0))
    out.add_column("")
    columns = _columns(scores)
    for name, _, _ in columns:
        out.add_column(name, justify="right", overflow="fold")
    if any(score.verdicts for score in scores.values()):
        for row in _generated(columns):
            out.add_row(*row)
    for name, cells in extra.items():
        out.add_row(name, *(cells.get(column, cells.get(score.name, "")) for column, score, _ in columns))
    return out


Columns = list[tuple[str, Score, bool | None]]


def _columns(scores: Mapping[Contender, Score]) -> Columns:
    """Return the columns. This project has two: all alarms, and the costly ones alone."""
    columns: Columns = []
    for contender, score in scores.items():
        columns.append((contender.name, score, None))
        if contender.name == OURS:
            columns.append((f"{OURS} costly", score, True))
    return columns


def _generated(columns: Columns) -> list[list[str]]:
    rows = [
        ["alarms are"] + [_sort(score, costly) for _, score, costly in columns],
        ["false costly/10k"] + [_rate(score.false(True)) for _, score, _ in columns],
        ["  95%"] + [_interval(score.false(True)) for _, score, _ in columns],
        ["false cheap/10k"] + ["" if costly else _rate(score.false(False)) for _, score, costly in columns],
        ["spikes (5 classes)"] + [_recall(score.recall(SPIKES, bool(costly))) for _, score, costly in columns],
    ]
    for kind in ANOMALY:
        rows.append([f"  {kind}"] + [_recall(score.recall([kind], bool(costly))) for _, score, costly in columns])
    rows.append(["wasted steps, spikes"] + [_number(score.wasted(SPIKES)) for _, score, _ in columns])
    return rows


def false_by_kind(score: Score) -> Table:
    """Where the false alarms come from; kinds without any are left out."""
    out = Table(title="false alarms by clean kind", title_justify="left", pad_edge=False)
    for name in ("kind", "costly", "cheap", "steps"):
        out.add_column(name, justify="left" if name == "kind" else "right")
    for kind, (costly, cheap) in sorted(score.by_kind().items(), key=lambda item: item[1], reverse=True):
        if costly or cheap:
            out.add_row(kind, str(costly), str(cheap), str(score.false(kind=kind).steps))
    return out


def as_data(scores: Mapping[Contender, Score]) -> list[dict[str, Any]]:
    """The same numbers for a file. NaN, where there is nothing to say, is null."""
    return [_entry(contender, score) for contender, score in scores.items()]


def _entry(contender: Contender, score: Score) -> dict[str, Any]:
    return {
        "detector": contender.name,
        "threshold": contender.threshold,
        "false": {sort: _rate_data(score.false(costly)) for sort, costly in (("costly", True), ("cheap", False))},
        "false_by_kind": {kind: score.by_kind()[kind] for kind in CLEAN if kind in score.by_kind()},
        "recall": {
            kind: {
                sort: _recall_data(score.recall([kind], costly)) for sort, costly in (("any", False), ("costly", True))
            }
            for kind in ANOMALY
        },
        "spikes": _recall_data(score.recall(SPIKES)),
        "wasted_steps": _clean(score.wasted(SPIKES)),
    }


def _rate_data(rate: Rate) -> dict[str, Any]:
    return {"count": rate.count, "steps": rate.steps, "per_10k": _clean(rate.value), "interval": rate.interval}


def _recall_data(recall: Recall) -> dict[str, Any]:
    return {
        "events": recall.events,
        "share": _clean(recall.share),
        "interval": recall.interval,
        "median": _clean(recall.median),
        "p95": _clean(recall.p95),
    }


def _clean(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _sort(score: Score, costly: bool | None) -> str:
    if score.name == OURS:
        return "costly" if costly else "both"
    return "costly" if score.costly_alarms else "cheap"


def _rate(rate: Rate) -> str:
    return f"{rate.value:.2f}" if rate.steps else ""


def _interval(rate: Rate) -> str:
    return f"{rate.interval[0]:.2f}-{rate.interval[1]:.2f}" if rate.steps else ""


def _recall(recall: Recall) -> str:
    if not recall.events:
        return ""
    if not recall.latencies:
        return "0"
    share = f"{recall.share:.3f}".rstrip("0").rstrip(".")
    return f"{share} {recall.median:.0f}/{recall.p95:.0f}"


def _number(value: float) -> str:
    return f"{value:.0f}" if math.isfinite(value) else ""
