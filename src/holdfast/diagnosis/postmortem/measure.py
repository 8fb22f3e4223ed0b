"""Numbers of a post-mortem, all of them taken from the table."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from holdfast.diagnosis.diagnose import Verdict, seen
from holdfast.diagnosis.model.answers import number
from holdfast.diagnosis.model.own_journal import MISSING
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.postmortem.parts import shown
from holdfast.diagnosis.tree.window import finite, logged

HEALTHY = 100


class Cost(NamedTuple):
    """What lies inside the windows of all incidents; None where the log does not say."""

    steps: float
    tokens: float | None
    seconds: float | None


def cost(table: Table, verdicts: list[Verdict]) -> Cost:
    inside = np.zeros(len(table), dtype=bool)
    undone = 0
    for verdict in verdicts:
        if verdict.incident is None:
            inside[verdict.row_start : verdict.row_end + 1] = True
        else:
            _, where = seen(table, verdict)
            undone += where.row_end - where.row_start + 1
    steps = float(inside.sum()) * table.step_interval() + undone
    seconds = tokens = None
    if table.has("seconds"):
        picked = table.columns["seconds"][inside & table.present["seconds"]]
        seconds = float(np.nansum(picked)) * table.step_interval()
    if table.has("tokens"):
        count = table.columns["tokens"][inside & table.present["tokens"]]
        count = count[np.isfinite(count)]
        tokens = float(count.max() - count.min()) if len(count) else None
    return Cost(steps, tokens, seconds)


def symptoms(table: Table, verdict: Verdict) -> list[list[str]]:
    """For each signal: its median before, its extremes inside, its median after."""
    table, verdict = seen(table, verdict)
    rows = []
    first, stop = verdict.row_start, verdict.row_end + 1
    for name in ("loss", "grad_norm", "lr", "loss_scale", "weight_norm", "seconds", "memory_allocated"):
        if not table.has(name):
            continue
        before, inside = finite(table, name, first - HEALTHY, first), logged(table, name, first, stop)
        after = finite(table, name, stop, stop + HEALTHY)
        good = inside[np.isfinite(inside)]
        rows.append(
            [
                name,
                shown(float(np.median(before)) if len(before) else None),
                f"{number(float(good.min()))} .. {number(float(good.max()))}" if len(good) else MISSING,
                str(int((~np.isfinite(inside)).sum())),
                shown(float(np.median(after)) if len(after) else None),
            ]
        )
    return rows


def band(table: Table, verdict: Verdict) -> str:
    """Where the loss should be if the remedy works: its course before the incident."""
    table, verdict = seen(table, verdict)
    losses = finite(table, "loss", verdict.row_start - HEALTHY, verdict.row_start)
    if len(losses) < 5:
        return MISSING
    middle = float(np.median(losses))
    reach = 3.0 * max(1.4826 * float(np.median(np.abs(losses - middle))), 1e-3 * abs(middle))
    around = f"median of {len(losses)} records before, 3 sigma to either side"
    return f"{number(middle - reach)} .. {number(middle + reach)} ({around})"


def differences(table: Table, verdict: Verdict, least: float = 0.2) -> list[list[str]]:
    """Every column whose median inside differs from the healthy stretch before, the largest change first."""
    table, verdict = seen(table, verdict)
    found = []
    first, stop = verdict.row_start, verdict.row_end + 1
    for name in table.columns:
        before, inside = finite(table, name, first - HEALTHY, first), finite(table, name, first, stop)
        if len(before) < 5 or not len(inside) or name in ("epoch", "tokens"):
            continue
        was, now = float(np.median(before)), float(np.median(inside))
        change = abs(now - was) / max(abs(was), 1e-12)
        if change >= least:
            found.append((change, [name, number(was), number(now)]))
    return [row for _, row in sorted(found, key=lambda pair: -pair[0])[:12]]


def raw(table: Table, verdict: Verdict, reach: int = 5) -> tuple[list[str], list[list[str]]]:
    """The records around the start of an incident as they are in the log."""
    table, verdict = seen(table, verdict)
    row = verdict.row_start
    names = [n for n in ("loss", "grad_norm", "lr", "loss_scale", "seconds") if table.has(n)]
    rows = []
    for i in range(max(0, row - reach), min(len(table), row + reach + 1)):
        values = [number(float(table.columns[n][i])) if table.present[n][i] else "-" for n in names]
        rows.append([number(float(table.step[i])), *values])
    return ["step", *names], rows
