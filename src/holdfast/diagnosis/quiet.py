"""What does not jump: a record that stands still, a loss scale that collapses; and what is only worth a note."""

from __future__ import annotations

import numpy as np

from holdfast.core.config import Detect
from holdfast.core.detectors.scan import scan
from holdfast.core.types import Finding, Kind
from holdfast.diagnosis.episodes import Episode, Note
from holdfast.diagnosis.table import Table

_EPISODES = {Kind.DEAD_RUN: "dead_run", Kind.SCALE_COLLAPSE: "scale_collapse"}
_NOTES = (Kind.PLATEAU, Kind.LR_JUMP, Kind.LR_FROZEN, Kind.SCALE_STUCK, Kind.WEIGHT_NORM, Kind.DUPLICATE_BATCH)


def find(table: Table, found: list[Episode]) -> tuple[list[Episode], list[Note]]:
    """Episodes and notes from the detectors that only watch."""
    if not table.has("loss"):
        return [], []
    episodes, notes = [], []
    for finding in scan(table, _watching(table)):
        if finding.kind in _EPISODES:
            episodes.append(_episode(table, finding))
        elif finding.kind in _NOTES and not _inside(finding, found):
            notes.append(
                Note(kind=finding.kind, start=float(finding.onset), end=float(finding.step), text=finding.message)
            )
    return episodes, notes


def _watching(table: Table) -> Detect:
    patience = max(200.0, 0.25 * len(table)) * table.interval()
    return Detect(
        loss_spike=False, divergence=False, grad_spike=False, update_spike=False, plateau_steps=max(1, int(patience))
    )


def _inside(finding: Finding, found: list[Episode]) -> bool:
    return finding.kind == Kind.PLATEAU and any(e.start <= finding.step and finding.onset <= e.end for e in found)


def _episode(table: Table, finding: Finding) -> Episode:
    first = int(np.searchsorted(table.step, finding.onset))
    last = min(len(table) - 1, int(np.searchsorted(table.step, finding.step)))
    return Episode(
        kind=_EPISODES[Kind(finding.kind)],
        start=float(table.step[min(first, last)]),
        end=float(table.step[last]),
        first=min(first, last),
        last=last,
        confidence=0.8,
        evidence=dict(finding.evidence),
        findings=[finding],
    )
