"""Turns findings of the watch-only detectors into episodes (dead run, collapsed loss scale) and notes."""

from __future__ import annotations

import re

import numpy as np

from holdfast.core.base.types import Finding, Kind
from holdfast.diagnosis.find.losses import Losses
from holdfast.diagnosis.model.episode import Episode, Note

_EPISODES = {Kind.DEAD_RUN: "dead_run", Kind.SCALE_COLLAPSE: "scale_collapse"}
_DEAD_RECORDS = 100
_FITTED = 0.05
_NOTES = (Kind.PLATEAU, Kind.LR_JUMP, Kind.LR_FROZEN, Kind.SCALE_STUCK, Kind.WEIGHT_NORM, Kind.DUPLICATE_BATCH)


def find(losses: Losses, known: list[Episode]) -> tuple[list[Episode], list[Note]]:
    """Return the episodes and the notes. A plateau inside a `known` episode is not noted."""
    episodes, notes = [], []
    for index, finding in losses.findings:
        if finding.kind in _EPISODES:
            episode = _episode(losses, index, finding)
            if finding.kind == Kind.DEAD_RUN:
                if not _stays_constant(losses, episode):
                    continue
                episode.last, episode.end = int(losses.rows[-1]), float(losses.step[-1])
            episodes.append(episode)
        elif finding.kind in _NOTES and not (finding.kind == Kind.PLATEAU and _overlaps_any(finding, known)):
            start, end = float(finding.onset), float(finding.step)
            notes.append(
                Note(kind=finding.kind, start=start, end=end, text=_in_unit(finding.message, losses.table.unit))
            )
    return episodes, notes


def _in_unit(message: str, unit: str) -> str:
    """Return a message of a detector, which counts in steps, in the unit of the log."""
    return re.sub(r"\bstep(s?)\b", rf"{unit}\1", message)


def _stays_constant(losses: Losses, episode: Episode) -> bool:
    """Return whether the loss is constant to the end: a hinge loss can be 0 for a while, and a loss can be fitted to 0."""
    loss, before = losses.loss[losses.rows >= episode.first], losses.before(int((losses.rows < episode.first).sum()))
    is_fitted = len(before) > 0 and loss[0] == 0 and np.median(before) < _FITTED * np.nanmax(losses.loss)
    return len(loss) >= _DEAD_RECORDS and bool((loss == loss[0]).all()) and not is_fitted


def _overlaps_any(finding: Finding, known: list[Episode]) -> bool:
    return any(e.start <= finding.step and finding.onset <= e.end for e in known)


def _episode(losses: Losses, index: int, finding: Finding) -> Episode:
    first, kind = losses.index_of_step(finding.onset, index), _EPISODES[Kind(finding.kind)]
    return losses.episode(kind, first, index, 0.8, evidence=dict(finding.evidence), findings=[finding])
