"""What does not jump: a record that stands still, a loss scale that collapses; and what is only worth a note."""

from __future__ import annotations

from holdfast.core.base.types import Finding, Kind
from holdfast.diagnosis.find.losses import Losses
from holdfast.diagnosis.model.episode import Episode, Note
from holdfast.diagnosis.model.table import Table

_EPISODES = {Kind.DEAD_RUN: "dead_run", Kind.SCALE_COLLAPSE: "scale_collapse"}
_DEAD_FOR = 100
_NOTES = (Kind.PLATEAU, Kind.LR_JUMP, Kind.LR_FROZEN, Kind.SCALE_STUCK, Kind.WEIGHT_NORM, Kind.DUPLICATE_BATCH)


def find(losses: Losses, found: list[Episode]) -> tuple[list[Episode], list[Note]]:
    """Episodes and notes from the detectors that only watch."""
    table, episodes, notes = losses.table, [], []
    for place, finding in losses.findings:
        if finding.kind in _EPISODES:
            episode = _episode(losses, place, finding)
            if finding.kind == Kind.DEAD_RUN:
                if not _to_the_end(table, episode):
                    continue
                episode.last, episode.end = int(losses.rows[-1]), float(losses.step[-1])
            episodes.append(episode)
        elif finding.kind in _NOTES and not _inside(finding, found):
            notes.append(
                Note(kind=finding.kind, start=float(finding.onset), end=float(finding.step), text=finding.message)
            )
    return episodes, notes


def _to_the_end(table: Table, episode: Episode) -> bool:
    """A loss of zero for a while is a hinge without violations; a dead run stays dead."""
    there = table.present["loss"][episode.first :]
    loss = table.columns["loss"][episode.first :][there]
    return len(loss) >= _DEAD_FOR and bool((loss == loss[0]).all())


def _inside(finding: Finding, found: list[Episode]) -> bool:
    return finding.kind == Kind.PLATEAU and any(e.start <= finding.step and finding.onset <= e.end for e in found)


def _episode(losses: Losses, place: int, finding: Finding) -> Episode:
    first = losses.place_of(finding.onset, place)
    return Episode(
        kind=_EPISODES[Kind(finding.kind)],
        start=float(losses.step[first]),
        end=float(losses.step[place]),
        first=int(losses.rows[first]),
        last=int(losses.rows[place]),
        confidence=0.8,
        evidence=dict(finding.evidence),
        findings=[finding],
    )
