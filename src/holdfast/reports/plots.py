"""The curves of a report: every column as a plot, packed for the page within a budget."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from holdfast.diagnosis.model.table import COLUMNS, Series, Table
from holdfast.reports.series import MAX_EXACT, pack_series

MAX_PLOTS, MAX_BYTES = 80, 8 << 20
"""curves of a page, and bytes of them: what comes later is thinned to its extremes"""
LABELS = {"loss": "Loss", "grad_norm": "Gradient norm", "lr": "Learning rate", "loss_scale": "Loss scale",
           "seconds": "Seconds a step", "update_rms": "Update size", "weight_norm": "Weight norm",
           "tokens_per_second": "Throughput, tokens a second", "loss_smooth": "Smoothed loss", "batch_size": "Batch size",
           "memory_host": "Host memory, GB", "mfu": "Model FLOPs utilization", "epoch": "Epoch",
           "step_seconds": "Seconds from step to step", "phases": "Seconds a step, by phase",
           "memory_shm": "Shared memory, GB", "memory_page_cache": "Page cache, GB",
           "straggler_seconds": "Seconds of waiting for the slowest rank",
           "slowest_rank": "Slowest rank"}  # fmt: skip
_MEMORY = ("memory_allocated", "memory_reserved", "memory_peak")


class Plot(msgspec.Struct, kw_only=True):
    """Holds the curves of one picture; `undone`: attempts that were vetoed or rolled back."""

    title: str
    help: str = ""
    curves: list[dict[str, Any]]
    undone: dict[str, Any] | None = None


def build_plots(table: Table) -> list[Plot]:
    """Return every column as a plot. Unknown columns get one of their own; those that share a prefix share one."""
    plots: list[Plot] = []
    used = 0
    for title, names in list(_group(table).items())[:MAX_PLOTS]:
        curves = []
        for name in names:
            series = table.series(name) if name in table.columns else table.evals[name]
            packed, size = _pack(series, MAX_BYTES - used)
            used += size
            curves.append({"name": name, **packed})
        undone = table.evals.get(f"undone_{names[0]}")
        plots.append(
            Plot(
                title=title,
                help=COLUMNS.get(names[0], ""),
                curves=curves,
                undone=None if undone is None else _pack(undone, MAX_BYTES)[0],
            )
        )
    return plots


def without_plot(table: Table) -> list[str]:
    """Return the columns beyond the number of plots that a page has."""
    return [name for names in list(_group(table).values())[MAX_PLOTS:] for name in names]


def _group(table: Table) -> dict[str, list[str]]:
    """Return the columns of each plot by its title, those that people look at first on top."""
    known = [name for name in ("loss", "grad_norm", "lr", "loss_scale") if table.has(name)]
    groups = {LABELS[name]: [name] for name in known}
    memory = [name for name in _MEMORY if table.has(name)]
    groups |= {"Device memory, GB": memory} if memory else {}
    rest = [name for name in table.columns if name not in known and name not in memory and table.has(name)]
    evals = [name for name in table.evals if not name.startswith("undone_")]
    for name in [*sorted(rest, key=lambda name: (name != "seconds", name not in COLUMNS)), *evals]:
        prefix = name.partition(".")[0] if "." in name else ""
        if not is_constant(table.series(name)) or name in evals:
            groups.setdefault(LABELS.get(prefix or name, prefix or name), []).append(name)
    return groups


def is_constant(series: Series) -> bool:
    return len(series.value) == 0 or bool((series.value == series.value[0]).all())


def _pack(series: Series, budget: int) -> tuple[dict[str, Any], int]:
    """Return the packed points and their size. Above the budget, only the extremes of every few points are kept."""
    packed = pack_series(series.step, series.value)
    size = _size(packed)
    if size > budget and len(series.step) > MAX_EXACT // 4:
        packed = pack_series(*thin(series, MAX_EXACT // 4))
        packed["thinned"] = len(series.step)
        size = _size(packed)
    return packed, size


def _size(packed: dict[str, Any]) -> int:
    return sum(len(v) for part in (packed["x"], packed["y"]) for v in part.values() if isinstance(v, str))


def thin(series: Series, count: int) -> Series:
    """Return at most `count` points: the lowest, the highest and the first non-finite of every few consecutive ones."""
    values = series.value
    width = -(-3 * len(values) // count)
    keep = {0, len(values) - 1}
    for start in range(0, len(values), width):
        piece = values[start : start + width]
        finite = np.isfinite(piece)
        if finite.any():
            keep |= {start + int(np.where(finite, piece, np.inf).argmin())}
            keep |= {start + int(np.where(finite, piece, -np.inf).argmax())}
        if not finite.all():
            keep.add(start + int((~finite).argmax()))
    kept = np.array(sorted(keep))
    return Series(series.step[kept], values[kept])
