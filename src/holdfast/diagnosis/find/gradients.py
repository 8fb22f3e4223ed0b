"""Finds gradient episodes: a norm that is not finite or rises by orders of magnitude, and overflows that do not end."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np

from holdfast.diagnosis.model.episode import Episode, Note
from holdfast.diagnosis.model.table import Table

_GAP = 25
_HIGH_RATIO, _HUGE_RATIO = 30.0, 1000.0
_MIN_HIGH = 3
_BASELINE_RECORDS = 200
_MIN_RECORDS = 20
_SCALER_OVERFLOWS = 32
"""shorter groups of Inf under a dynamic loss scale: the scaler searches for its scale"""
_FALLS, _USEFUL_SCALE = 5, 1.0
"""falls of the loss scale in a row, to below what a working fp16 run needs"""
_SCALE = re.compile(r"(?:scale|reducing)\D{0,20}?(\d+(?:\.\d+)?(?:e[-+]?\d+)?)\W*$", re.IGNORECASE)
"""the number at the end of the messages of fairseq, Apex and DeepSpeed"""


def find(table: Table) -> list[Episode]:
    """Return all gradient episodes, non-finite groups first, then explosions."""
    if not table.has("grad_norm"):
        return []
    rows = np.flatnonzero(table.present["grad_norm"])
    norms = table.columns["grad_norm"][rows]
    nonfinite = [e for e in _nonfinite(table, rows, norms) if not _was_skipped(table, e)]
    return [*nonfinite, *_explosions(table, rows, norms)]


def find_skipped(table: Table) -> list[Note]:
    """Return a note for each non-finite gradient whose update was skipped, as the learning rate shows."""
    if not table.has("grad_norm"):
        return []
    rows = np.flatnonzero(table.present["grad_norm"])
    found = [e for e in _nonfinite(table, rows, table.columns["grad_norm"][rows]) if _was_skipped(table, e)]
    text = "the gradient norm is NaN or Inf and the learning rate does not advance: the update was skipped"
    return [Note(kind="skipped_update", start=e.start, end=e.end, text=text) for e in found]


def find_falling_scale(table: Table) -> list[Episode]:
    """Return an episode if messages of overflows have the loss scale fall below 1, again and again."""
    messages = [(event, _SCALE.search(event.text)) for event in table.events if event.kind == "overflow"]
    scales = [(event.step, float(match[1])) for event, match in messages if match is not None]
    falls = 0
    for (_, before), (_, after) in pairwise(scales):
        falls = falls + 1 if after < before else 0
    if falls < _FALLS or scales[-1][1] >= _USEFUL_SCALE or not len(table):
        return []
    rows = np.arange(len(table))
    steps = [table.step[-1] if step is None else step for step, _ in scales[-falls:]]
    group = np.clip(np.searchsorted(table.step, [steps[0], steps[-1]], "right") - 1, 0, len(table) - 1)
    return [_episode(table, rows, "scale_collapse", group, 0.8, {"falls": falls, "scale": scales[-1][1]})]


def _was_skipped(table: Table, episode: Episode) -> bool:
    """Return whether the learning rate, which otherwise changes with every record, stands still at these rows."""
    if "lr" not in table.columns or not table.present["lr"].all() or len(table) < 10:
        return False
    changes = np.diff(table.columns["lr"]) != 0
    rows = np.arange(max(1, episode.first), min(len(table) - 1, episode.last) + 1)
    stands_still = ~changes[rows - 1] | ~changes[np.minimum(rows, len(changes) - 1)]
    return float(changes.mean()) > 0.8 and bool(stands_still.all())


def _nonfinite(table: Table, rows: np.ndarray, norms: np.ndarray) -> list[Episode]:
    loss = table.columns.get("loss")
    has_loss = np.isfinite(loss[rows]) & table.present["loss"][rows] if loss is not None else np.ones(len(rows), bool)
    is_scaled = table.has("loss_scale") or any(e.kind in ("overflow", "skipped") for e in table.events)
    return [
        _episode(table, rows, "grad_nonfinite", group, 0.9, {"rows": len(group)})
        for group in _groups(np.flatnonzero(~np.isfinite(norms) & has_loss))
        if len(group) >= (_SCALER_OVERFLOWS if is_scaled else 1) and not _precedes_nan(table, rows, group)
    ]


def _precedes_nan(table: Table, rows: np.ndarray, group: np.ndarray) -> bool:
    """Return whether a single bad gradient comes right before a NaN loss, and so belongs to that episode."""
    after = rows[group[-1]] + 1
    has_next = "loss" in table.columns and after < len(table) and bool(table.present["loss"][after])
    return len(group) == 1 and has_next and not np.isfinite(table.columns["loss"][after])


def _explosions(table: Table, rows: np.ndarray, norms: np.ndarray) -> list[Episode]:
    """Return each group with several norms 30 times above the baseline, or one a thousand times."""
    usable = np.isfinite(norms) & (norms > 0)
    if usable.sum() < _MIN_RECORDS:
        return []
    indices, log = np.flatnonzero(usable), np.log(norms[usable])
    baseline = _baseline(log)
    ratios = np.exp(np.minimum(log - baseline, 700.0))
    episodes = []
    for group in _groups(np.flatnonzero(ratios >= _HIGH_RATIO)):
        ratio = float(ratios[group].max())
        if len(group) >= _MIN_HIGH or ratio >= _HUGE_RATIO:
            evidence = {"ratio": ratio, "usual": float(np.exp(baseline[group[0]])), "rows": len(group)}
            episodes.append(_episode(table, rows, "grad_explosion", indices[group], 0.85, evidence))
    return episodes


def _baseline(log: np.ndarray) -> np.ndarray:
    """Return the median of the preceding records. Its rise is bounded, so an explosion does not become the baseline."""
    baseline, n = np.empty_like(log), len(log)
    stride = max(1, min(16, n // 64), n // 4000)
    level = float(np.median(log[: min(n, _MIN_RECORDS)]))
    for begin in range(0, n, stride):
        preceding = log[max(0, begin - _BASELINE_RECORDS) : begin]
        if len(preceding) >= _MIN_RECORDS:
            level = min(float(np.median(preceding)), level + 0.05 * stride)
        baseline[begin : begin + stride] = level
    return baseline


def _groups(indices: np.ndarray) -> list[np.ndarray]:
    return np.split(indices, np.flatnonzero(np.diff(indices) > _GAP) + 1) if len(indices) else []


def _episode(
    table: Table, rows: np.ndarray, kind: str, group: np.ndarray, confidence: float, evidence: dict[str, Any]
) -> Episode:
    first, last = int(rows[group[0]]), int(rows[group[-1]])
    return Episode.at_rows(table, kind, first, last, confidence, evidence=evidence)
