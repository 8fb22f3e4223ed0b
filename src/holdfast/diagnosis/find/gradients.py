"""Where the gradient leaves its course: not finite under a finite loss, or up by orders of magnitude."""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Table

_GAP = 25
_HIGH, _HUGE = 30.0, 1000.0
_ENOUGH = 3
_BEFORE = 200
_LEAST_POINTS = 20


def find(table: Table) -> list[Episode]:
    if not table.has("grad_norm"):
        return []
    there = np.flatnonzero(table.present["grad_norm"])
    norm = table.columns["grad_norm"][there]
    return [*_nonfinite(table, there, norm), *_explosions(table, there, norm)]


def _nonfinite(table: Table, rows: np.ndarray, norm: np.ndarray) -> list[Episode]:
    """Under a dynamic loss scale a few are the scaler finding its level."""
    loss = table.columns.get("loss")
    with_loss = np.isfinite(loss[rows]) & table.present["loss"][rows] if loss is not None else np.ones(len(rows), bool)
    bad = np.flatnonzero(~np.isfinite(norm) & with_loss)
    scaled = table.has("loss_scale") or any(e.kind in ("overflow", "skipped") for e in table.events)
    return [
        _episode(table, rows, "grad_nonfinite", group, 0.9, {"rows": len(group)})
        for group in _groups(bad)
        if len(group) >= (32 if scaled else 1) and not _leads_to_nan(table, rows, group)
    ]


def _leads_to_nan(table: Table, rows: np.ndarray, group: np.ndarray) -> bool:
    """The gradient of the step before the loss is NaN belongs to that NaN."""
    after = rows[group[-1]] + 1
    there = "loss" in table.columns and after < len(table) and bool(table.present["loss"][after])
    return len(group) == 1 and there and not np.isfinite(table.columns["loss"][after])


def _explosions(table: Table, rows: np.ndarray, norm: np.ndarray) -> list[Episode]:
    """Several norms 30 times what is usual, or one a thousand times."""
    usable = np.isfinite(norm) & (norm > 0)
    if usable.sum() < _LEAST_POINTS:
        return []
    places, log = np.flatnonzero(usable), np.log(norm[usable])
    usual = _usual(log)
    over = np.exp(np.minimum(log - usual, 700.0))
    found = []
    for group in _groups(np.flatnonzero(over >= _HIGH)):
        most = float(over[group].max())
        if len(group) < _ENOUGH and most < _HUGE:
            continue
        numbers = {"ratio": most, "usual": float(np.exp(usual[group[0]])), "rows": len(group)}
        found.append(_episode(table, rows, "grad_explosion", places[group], 0.85, numbers))
    return found


def _usual(log: np.ndarray) -> np.ndarray:
    """The median of the records before each, in steps of a few, so that an explosion is not what is usual."""
    usual, n = np.empty_like(log), len(log)
    stride = max(1, min(16, n // 64), n // 4000)
    held = float(np.median(log[: min(n, _LEAST_POINTS)]))
    for begin in range(0, n, stride):
        part = log[max(0, begin - _BEFORE) : begin]
        if len(part) >= _LEAST_POINTS:
            middle = float(np.median(part))
            held = min(middle, held + 0.05 * stride)
        usual[begin : begin + stride] = held
    return usual


def _groups(places: np.ndarray) -> list[np.ndarray]:
    return np.split(places, np.flatnonzero(np.diff(places) > _GAP) + 1) if len(places) else []


def _episode(
    table: Table, rows: np.ndarray, kind: str, group: np.ndarray, confidence: float, evidence: dict[str, Any]
) -> Episode:
    first, last = int(rows[group[0]]), int(rows[group[-1]])
    return Episode(
        kind=kind,
        start=float(table.step[first]),
        end=float(table.step[last]),
        first=first,
        last=last,
        confidence=confidence,
        evidence=evidence,
    )
