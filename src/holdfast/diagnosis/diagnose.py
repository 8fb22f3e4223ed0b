"""From a table to a report: incidents with their verdicts, notes, and what the log could not show."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import numpy as np

from holdfast.diagnosis.find import episodes, hang, memory, recorded, throughput
from holdfast.diagnosis.model.answers import number
from holdfast.diagnosis.model.episode import Episode, Note
from holdfast.diagnosis.model.own_journal import Journal, open_journal
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.tree import walk
from holdfast.diagnosis.tree.kinds import INCIDENTS
from holdfast.diagnosis.tree.load import Tree
from holdfast.diagnosis.tree.load import tree as load

SCHEMA_VERSION = 1
MOST_FINDINGS = 5


class LimitLine(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    text: str


class FindingLine(msgspec.Struct, frozen=True, kw_only=True):
    """What a detector saw, and how many steps after its onset."""

    detector: str
    step: int
    late: int
    message: str


class Verdict(msgspec.Struct, kw_only=True):
    """One incident: what, from where to where, why, how sure, and what next.

    `confidence` is in the whole claim: the kind, and the cause where one is named. `detected` is in the kind alone.
    """

    kind: str
    cause: str
    step_start: float
    step_end: float
    confidence: float
    evidence: list[str]
    against: list[str]
    action: str
    leaf: str
    status: str
    confirm: str
    unchecked: list[str]
    trail: list[walk.Step]
    rivals: list[walk.Rival]
    """other causes of the same kind that the answers leave standing, the likeliest first"""
    findings: list[FindingLine]
    detected: float
    row_start: int
    row_end: int
    """rows of the table; the step alone is ambiguous where a run went back"""
    incident: int | None = None
    """its number in the journal, if Holdfast met it while the run went on"""
    state: str = ""
    """of an incident in the journal: open, closed (dealt with) or stopped"""


class NoteLine(msgspec.Struct, kw_only=True):
    """What looks like trouble and is not, or is worth knowing and no incident."""

    kind: str
    step_start: float
    step_end: float
    text: str
    action: str = ""
    confirm: str = ""
    leaf: str = ""
    confidence: float | None = None


class Report(msgspec.Struct, kw_only=True):
    """Everything a log says, and what it cannot."""

    schema_version: int = SCHEMA_VERSION
    path: str
    format: str
    points: int
    limits: list[LimitLine]
    verdicts: list[Verdict]
    notes: list[NoteLine]
    summary: str


def diagnose(table: Table, tree: Tree | None = None) -> Report:
    """Every incident of a run, each with its own verdict and window; a healthy run has none."""
    tree = tree or load()
    found, notes = episodes.find(table)
    found = [*found, *machine(table, tree)]
    journal = open_journal(table.path)
    verdicts = _recorded(tree, table, journal, found)
    lines = [*_incidents(table, journal, verdicts), *(_note(note) for note in notes)]
    for episode in found:
        walked = walk.walk(tree, table, episode)
        if walked.leaf.incident:
            verdicts.append(_verdict(episode, walked))
        else:
            lines.append(_leaf_note(walked, episode.kind, episode.start, episode.end))
    verdicts.sort(key=lambda v: (v.row_start, v.row_end))
    lines += _rules(tree, table, verdicts, {line.kind for line in lines})
    return Report(
        path=table.path,
        format=table.format,
        points=len(table),
        limits=[LimitLine(code=limit.code, text=limit.text) for limit in table.limits],
        verdicts=verdicts,
        notes=lines,
        summary=_summary(table, verdicts),
    )


def machine(table: Table, tree: Tree) -> list[Episode]:
    """Incidents of memory, ranks and speed."""
    leak, apart = tree.thresholds("allocated_rises"), tree.thresholds("reserved_grows_apart")
    slower, straggler = tree.thresholds("steps_slower"), tree.thresholds("one_rank_slow")
    with np.errstate(all="ignore"):  # logs hold values at the edge of what a float can
        return [
            *memory.find(table, leak, apart),
            *hang.find(table),
            *throughput.find(table, slower, straggler),
        ]


def _verdict(episode: Episode, walked: walk.Walked) -> Verdict:
    return Verdict(
        kind=episode.kind,
        cause=walked.leaf.cause,
        step_start=episode.start,
        step_end=episode.end,
        confidence=walked.confidence,
        evidence=walked.evidence or [INCIDENTS.get(episode.kind, episode.kind)],
        against=walked.against,
        action=walked.action,
        leaf=walked.id,
        status=walked.leaf.status,
        confirm=walked.confirm,
        unchecked=walked.unchecked,
        trail=walked.trail,
        rivals=walked.rivals,
        findings=[
            FindingLine(detector=f.detector, step=f.step, late=f.step - f.onset, message=f.message)
            for f in episode.findings[:MOST_FINDINGS]
        ],
        detected=round(episode.confidence, 3),
        row_start=episode.first,
        row_end=episode.last,
    )


def _recorded(tree: Tree, table: Table, journal: Journal, found: list[Episode]) -> list[Verdict]:
    """What Holdfast met and dealt with itself, but for what the curve shows too."""
    verdicts = []
    for incident in recorded.find(table, journal):
        episode, line = incident.episode, incident.line
        if any(e.kind == episode.kind and e.start <= episode.end and e.end >= episode.start for e in found):
            continue
        walked = walk.walk(tree, incident.table, episode)
        if not walked.leaf.incident:
            continue
        verdict = _verdict(episode, walked)
        verdict.incident, verdict.state = line.number, line.state
        verdict.row_start = verdict.row_end = incident.row
        verdict.evidence.append(f"incident {line.number} of the journal, {line.state}: {_counted(line.actions)}")
        verdicts.append(verdict)
    return verdicts


def _incidents(table: Table, journal: Journal, verdicts: list[Verdict]) -> list[NoteLine]:
    """Incidents of the journal that are no verdict of their own: observed only, or of no kind that the tree knows."""
    summary = journal.summary()
    said = {verdict.incident for verdict in verdicts}
    return [
        NoteLine(
            kind=f"incident_{line.state}",
            step_start=float(line.onset),
            step_end=float(line.step),
            text=f"incident {line.number} of the journal: {line.kind}; done: {_counted(line.actions)}; {line.state}",
        )
        for line in (summary.incidents if summary else [])
        if line.number not in said
    ]


def seen(table: Table, verdict: Verdict) -> tuple[Table, Verdict]:
    """The table and rows in which a verdict's incident is to be seen: what Holdfast vetoed is not in the run's own."""
    if verdict.incident is None:
        return table, verdict
    journal = open_journal(table.path)
    summary = journal.summary()
    line = next((one for one in (summary.incidents if summary else []) if one.number == verdict.incident), None)
    incident = None if line is None else recorded.view(table, line, journal)
    if incident is None:
        return table, verdict
    rows = {"row_start": incident.episode.first, "row_end": incident.episode.last}
    return incident.table, msgspec.structs.replace(verdict, **rows)


def _counted(actions: list[str]) -> str:
    return ", ".join(f"{name} x{n}" if n > 1 else name for name, n in Counter(actions).items()) or "nothing"


def _note(note: Note) -> NoteLine:
    return NoteLine(kind=note.kind, step_start=note.start, step_end=note.end, text=note.text)


def _leaf_note(walked: walk.Walked, kind: str, start: float, end: float) -> NoteLine:
    return NoteLine(
        kind=kind,
        step_start=start,
        step_end=end,
        text=f"{walked.leaf.cause}. {'; '.join(walked.evidence)}",
        action=walked.action,
        confirm=walked.confirm,
        leaf=walked.id,
        confidence=walked.confidence,
    )


def _rules(tree: Tree, table: Table, verdicts: list[Verdict], said: set[str]) -> list[NoteLine]:
    """The rules that fire, but for those that a verdict or an earlier note has said already."""
    if not len(table):
        return []
    said = said | {verdict.leaf for verdict in verdicts}
    causes = {verdict.cause for verdict in verdicts}
    start, end = float(table.step[0]), float(table.step[-1])
    return [
        _leaf_note(walked, walked.leaf.kinds[0], start, end)
        for walked in walk.check(tree, table)
        if walked.leaf.kinds[0] not in said and walked.leaf.cause not in causes
    ]


def gravity(table: Table, verdict: Verdict) -> tuple[bool, bool, float]:
    """For sorting: what nobody dealt with, what the run ended in, and what is sure, weigh most."""
    return verdict.state != "closed", bool(len(table)) and verdict.step_end == table.step[-1], verdict.confidence


def _summary(table: Table, verdicts: list[Verdict]) -> str:
    """One sentence: what happened, or that nothing did."""
    points = f"{len(table)} record{'s' if len(table) != 1 else ''}"
    if not len(table):
        return "no training records: there is nothing to diagnose"
    if not verdicts:
        doubts = f"; this log cannot show everything ({', '.join(dict(table.limits))})" if table.limits else ""
        return f"no incident in {points}{doubts}"
    worst = max(verdicts, key=lambda verdict: gravity(table, verdict))
    count = len(verdicts)
    closed = sum(verdict.state == "closed" for verdict in verdicts)
    healed = "" if not closed else " (all dealt with)" if closed == count else f" ({closed} dealt with)"
    head = f"{count} incidents in {points}{healed}, the gravest: " if count > 1 else ""
    span = f"step {number(worst.step_start)}"
    if not math.isclose(worst.step_start, worst.step_end):
        span = f"steps {number(worst.step_start)} to {number(worst.step_end)}"
    return f"{head}{INCIDENTS.get(worst.kind, worst.kind)} at {span}; cause: {worst.cause}"
