"""The numbers of a post-mortem, all taken from the table."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from holdfast.diagnosis.diagnose import IncidentVerdict, restored_view
from holdfast.diagnosis.model.answers import fmt
from holdfast.diagnosis.model.run_journal import MISSING
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.model.window import Values, finite, logged
from holdfast.diagnosis.postmortem.parts import fmt_or_missing

HEALTHY_RECORDS = 100


class Cost(NamedTuple):
    """Holds the totals inside all incidents; None for a value that the log lacks."""

    steps: float
    tokens: float | None
    seconds: float | None


def cost(table: Table, verdicts: list[IncidentVerdict]) -> Cost:
    inside = np.zeros(len(table), dtype=bool)
    undone = 0
    for verdict in verdicts:
        if verdict.incident is None:
            inside[verdict.row_start : verdict.row_end + 1] = True
        else:
            _, view = restored_view(table, verdict)
            undone += view.row_end - view.row_start + 1
    seconds = tokens = None
    if table.has("seconds"):
        seconds = float(np.nansum(table.columns["seconds"][inside & table.present["seconds"]])) * table.step_interval()
    if table.has("tokens"):
        counts = table.columns["tokens"][inside & table.present["tokens"]]
        counts = counts[np.isfinite(counts)]
        tokens = float(counts.max() - counts.min()) if len(counts) else None
    return Cost(float(inside.sum()) * table.step_interval() + undone, tokens, seconds)


def _median(values: Values) -> float | None:
    return float(np.median(values)) if len(values) else None


def symptoms(table: Table, verdict: IncidentVerdict) -> list[list[str]]:
    """Return one row per signal: the median before, the range inside, the non-finite count, the median after."""
    table, verdict = restored_view(table, verdict)
    rows = []
    first, stop = verdict.row_start, verdict.row_end + 1
    for name in ("loss", "grad_norm", "lr", "loss_scale", "weight_norm", "seconds", "memory_allocated"):
        if table.has(name):
            before, after = (
                fmt_or_missing(_median(finite(table, name, *healthy)))
                for healthy in ((first - HEALTHY_RECORDS, first), (stop, stop + HEALTHY_RECORDS))
            )
            inside, good = logged(table, name, first, stop), finite(table, name, first, stop)
            extremes = f"{fmt(float(good.min()))} .. {fmt(float(good.max()))}" if len(good) else MISSING
            rows.append([name, before, extremes, str(len(inside) - len(good)), after])
    return rows


def expected_loss(table: Table, verdict: IncidentVerdict) -> str:
    """Return the range that the loss should have if the remedy works: its baseline before the incident."""
    table, verdict = restored_view(table, verdict)
    losses = finite(table, "loss", verdict.row_start - HEALTHY_RECORDS, verdict.row_start)
    if len(losses) < 5:
        return MISSING
    median = float(np.median(losses))
    slack = 3.0 * max(1.4826 * float(np.median(np.abs(losses - median))), 1e-3 * abs(median))
    return f"{fmt(median - slack)} .. {fmt(median + slack)} (median of {len(losses)} records before, +- 3 sigma)"


def differences(table: Table, verdict: IncidentVerdict, min_change: float = 0.2) -> list[list[str]]:
    """Return the columns whose median changes against the healthy records before, largest change first."""
    table, verdict = restored_view(table, verdict)
    changes = []
    first, stop = verdict.row_start, verdict.row_end + 1
    for name in table.columns:
        before, inside = finite(table, name, first - HEALTHY_RECORDS, first), finite(table, name, first, stop)
        if len(before) < 5 or not len(inside) or name in ("epoch", "tokens"):
            continue
        was, now = float(np.median(before)), float(np.median(inside))
        change = abs(now - was) / max(abs(was), 1e-12)
        if change >= min_change:
            changes.append((change, [name, fmt(was), fmt(now)]))
    return [row for _, row in sorted(changes, key=lambda pair: -pair[0])[:12]]


def raw_records(table: Table, verdict: IncidentVerdict, reach: int = 5) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the records around the start of an incident."""
    table, verdict = restored_view(table, verdict)
    row = verdict.row_start
    names = [n for n in ("loss", "grad_norm", "lr", "loss_scale", "seconds") if table.has(n)]
    rows = []
    for i in range(max(0, row - reach), min(len(table), row + reach + 1)):
        values = [fmt(float(table.columns[n][i])) if table.present[n][i] else "-" for n in names]
        rows.append([fmt(float(table.step[i])), *values])
    return ["step", *names], rows
