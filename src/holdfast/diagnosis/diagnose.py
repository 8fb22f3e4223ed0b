"""Turns a table into a report: incidents with their verdicts, notes, and the limits of the log."""

from __future__ import annotations

import msgspec
import numpy as np

from holdfast.core.base.types import MEMORY_KINDS, Kind
from holdfast.diagnosis.find import episodes, hang, journal_incidents, memory, throughput
from holdfast.diagnosis.model.answers import fmt_steps
from holdfast.diagnosis.model.episode import CURVE_KINDS, INCIDENT_KINDS, Episode
from holdfast.diagnosis.model.run_journal import RunJournal, read_run_journal
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.model.wording import headline
from holdfast.diagnosis.tree import recorded_cause, walk
from holdfast.diagnosis.tree.load import DecisionTree, load_tree

SCHEMA_VERSION = 1
MAX_FINDINGS = 5
_MAX_NOTED = 20


class LimitLine(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    text: str


class FindingLine(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what a detector reported, and how many steps after the onset."""

    detector: str
    step: int
    late: int
    message: str


class IncidentVerdict(msgspec.Struct, kw_only=True):
    """Holds one incident: kind, window, cause, confidence, evidence, and the next action.

    `confidence` covers the whole claim: the kind, and the cause if one is named. `detected` covers the kind alone.
    """

    kind: str
    headline: str = ""
    """what happened, in one sentence"""
    size: float = 1.0
    """how many times its usual value the signal reaches; infinite for NaN"""
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
    trail: list[walk.TrailStep]
    rivals: list[walk.Rival]
    """other possible causes of the same kind, most likely first"""
    findings: list[FindingLine]
    detected: float
    row_start: int
    row_end: int
    """rows of the table: a step is ambiguous if the run went back"""
    incident: int | None = None
    """its number in the journal, if Holdfast handled it online"""
    state: str = ""
    """state of a journal incident: open, closed or stopped"""


class NoteLine(msgspec.Struct, kw_only=True):
    """Holds an observation that is not an incident."""

    kind: str
    step_start: float
    step_end: float
    text: str
    action: str = ""
    confirm: str = ""
    leaf: str = ""
    confidence: float | None = None
    cause: str = ""
    """transient, data, lr, objective or not_established, if the journal names one"""


class DiagnosisReport(msgspec.Struct, kw_only=True):
    """Holds the diagnosis of one run."""

    schema_version: int = SCHEMA_VERSION
    path: str
    format: str
    points: int
    unit: str = "step"
    """what the steps count: step, epoch, tick or record"""
    is_judged: bool = True
    """false if the log has neither a training loss nor a reward: then nothing is known about the run"""
    limits: list[LimitLine]
    verdicts: list[IncidentVerdict]
    notes: list[NoteLine]
    summary: str


def diagnose(table: Table, tree: DecisionTree | None = None) -> DiagnosisReport:
    """Diagnose a run. Each incident gets its own verdict and window; a healthy run has no verdict."""
    tree = tree or load_tree()
    with np.errstate(all="ignore"):  # logs hold values near the limits of a float
        detected, curve_notes = episodes.find(table)
    detected = [*detected, *find_machine_episodes(table, tree)]
    journal = read_run_journal(table.path)
    detected = journal_incidents.without_known_causes(detected, journal)
    verdicts = _journal_verdicts(tree, table, journal, detected)
    notes = _journal_notes(journal, {verdict.incident for verdict in verdicts})
    notes += [NoteLine(kind=n.kind, step_start=n.start, step_end=n.end, text=n.text) for n in curve_notes]
    for episode in [e for e in detected if not _is_recorded(e, verdicts)]:
        conclusion = _conclude(tree, table, episode)
        if conclusion.leaf.incident:
            verdicts.append(_verdict(episode, conclusion, table.unit))
        else:
            notes.append(_leaf_note(conclusion, episode.kind, episode.start, episode.end))
    verdicts.sort(key=lambda v: (v.row_start, v.row_end))
    notes += _rule_notes(tree, table, verdicts, {note.kind for note in notes})
    return DiagnosisReport(
        path=table.path,
        format=table.format,
        points=len(table),
        unit=table.unit,
        is_judged=table.has("loss") or table.has("reward") or bool(verdicts),
        limits=[LimitLine(code=limit.code, text=limit.text) for limit in table.limits],
        verdicts=verdicts,
        notes=notes,
        summary=_summary(table, verdicts),
    )


def find_machine_episodes(table: Table, tree: DecisionTree) -> list[Episode]:
    """Return the episodes of memory, ranks and speed."""
    with np.errstate(all="ignore"):  # logs hold values near the limits of a float
        return [
            *memory.find(table, tree.thresholds("allocated_rises"), tree.thresholds("reserved_grows_apart")),
            *hang.find(table),
            *throughput.find(table, tree.thresholds("steps_slower"), tree.thresholds("one_rank_slow")),
        ]


def _size(episode: Episode) -> float:
    """Return how many times its usual value the signal reaches."""
    if episode.kind in ("nan", "grad_nonfinite", "nonfinite_state"):
        return float(np.finfo(np.float32).max)
    ratio = episode.evidence.get("ratio")
    return float(ratio) if isinstance(ratio, int | float) and np.isfinite(ratio) else 1.0


def _conclude(tree: DecisionTree, table: Table, episode: Episode) -> walk.Conclusion:
    """Return the conclusion of the tree. It names no cause for a few records, and none for a column that is not the loss."""
    signals, column = episode.evidence.get("signals"), episode.evidence.get("column")
    if signals is None and column is None:
        return walk.walk(tree, table, episode)
    conclusion = walk.abstain(tree, table, episode)
    conclusion.evidence = list(signals or [headline(episode, table.unit)])
    if column is not None and episode.kind == "dead_run":
        conclusion.action = f"Check the labels of the training data: nothing in it trains {column}."
    if column == "reward":
        conclusion.action = (
            "Continue from a checkpoint before the fall, with a lower learning rate or a smaller clip range."
        )
    return conclusion


def _verdict(episode: Episode, conclusion: walk.Conclusion, unit: str) -> IncidentVerdict:
    return IncidentVerdict(
        kind=episode.kind,
        headline=headline(episode, unit),
        size=_size(episode),
        cause=conclusion.leaf.cause,
        step_start=episode.start,
        step_end=episode.end,
        confidence=conclusion.confidence,
        evidence=conclusion.evidence or [INCIDENT_KINDS.get(episode.kind, episode.kind)],
        against=conclusion.against,
        action=conclusion.action,
        leaf=conclusion.id,
        status=conclusion.leaf.status,
        confirm=conclusion.confirm,
        unchecked=conclusion.unchecked,
        trail=conclusion.trail,
        rivals=conclusion.rivals,
        findings=[
            FindingLine(detector=f.detector, step=f.step, late=f.step - f.onset, message=f.message)
            for f in episode.findings[:MAX_FINDINGS]
        ],
        detected=round(episode.confidence, 3),
        row_start=episode.first,
        row_end=episode.last,
    )


def _journal_verdicts(
    tree: DecisionTree, table: Table, journal: RunJournal, detected: list[Episode]
) -> list[IncidentVerdict]:
    """Judge the incidents that Holdfast handled online, except those without a cause that the curve shows too."""
    verdicts = []
    for incident in journal_incidents.find(table, journal):
        episode, line = incident.episode, incident.line
        shown = any(e.kind == episode.kind and e.start <= episode.end and e.end >= episode.start for e in detected)
        if shown and line.cause is None:
            continue
        conclusion = recorded_cause.conclude(line, journal, episode, walk.walk(tree, incident.table, episode))
        if not conclusion.leaf.incident:
            continue
        verdict = _verdict(episode, conclusion, table.unit)
        verdict.incident, verdict.state = line.number, line.state
        verdict.row_start = verdict.row_end = incident.row
        verdict.evidence.append(
            f"incident {line.number} of the journal, {line.state}: {line.describe_actions() or 'none'}"
        )
        verdicts.append(verdict)
    return verdicts


def _is_recorded(episode: Episode, recorded: list[IncidentVerdict]) -> bool:
    """Return whether the journal explains an excursion of the curve: its account outranks the shape of the curve."""
    if episode.kind not in CURVE_KINDS or episode.kind == "dead_run":
        return False
    return any(v.cause and v.step_start <= episode.end and episode.start <= v.step_end for v in recorded)


def _journal_notes(journal: RunJournal, judged: set[int | None]) -> list[NoteLine]:
    """Note the incidents without a verdict: observed only, or of a kind that the tree does not know; noted causes;
    slow ranks, and findings about memory."""
    notes = []
    for line in [*(line for line in journal.incidents if line.number not in judged), *journal.noted_causes]:
        done = line.describe_actions() or "none"
        text = f"incident {line.number} of the journal: {line.kind}; actions: {done}; {line.state}"
        kind = f"incident_{line.state}"
        if not line.number:
            kind, text = line.kind, "not an incident"
        note = NoteLine(kind=kind, step_start=float(line.onset), step_end=float(line.step), text=text)
        if line.cause is not None:
            note.cause, note.text = line.cause, f"{text}; cause: {recorded_cause.describe_cause(line)}"
            note.action, note.confirm = recorded_cause.advise(line.cause, line, journal)
        notes.append(note)
    noted = [event for event in journal.select("finding") if event.get("kind") in (Kind.STRAGGLER, *MEMORY_KINDS)]
    for event in noted[:_MAX_NOTED]:
        step, kind = float(event.get("step") or 0), str(event["kind"])
        text = str(event.get("message") or INCIDENT_KINDS.get(kind, kind))
        notes.append(NoteLine(kind=kind, step_start=float(event.get("onset") or step), step_end=step, text=text))
    return notes


def restored_view(table: Table, verdict: IncidentVerdict) -> tuple[Table, IncidentVerdict]:
    """Return the table and rows that show a verdict's incident: the run's own table lacks vetoed and undone rows."""
    journal = read_run_journal(table.path)
    line = next((line for line in journal.incidents if line.number == verdict.incident), None)
    incident = None if line is None else journal_incidents.restore(table, line, journal)
    if incident is None:
        return table, verdict
    rows = {"row_start": incident.episode.first, "row_end": incident.episode.last}
    return incident.table, msgspec.structs.replace(verdict, **rows)


def _leaf_note(conclusion: walk.Conclusion, kind: str, start: float, end: float) -> NoteLine:
    return NoteLine(
        kind=kind,
        step_start=start,
        step_end=end,
        text=f"{conclusion.leaf.cause}. {'; '.join(conclusion.evidence)}",
        action=conclusion.action,
        confirm=conclusion.confirm,
        leaf=conclusion.id,
        confidence=conclusion.confidence,
    )


def _rule_notes(
    tree: DecisionTree, table: Table, verdicts: list[IncidentVerdict], noted_kinds: set[str]
) -> list[NoteLine]:
    """Note the whole-run rules that fire, except those that repeat a verdict or a note."""
    if not len(table):
        return []
    repeated = noted_kinds | {verdict.leaf for verdict in verdicts}
    causes = {verdict.cause for verdict in verdicts}
    start, end = float(table.step[0]), float(table.step[-1])
    return [
        _leaf_note(conclusion, conclusion.leaf.kinds[0], start, end)
        for conclusion in walk.check_rules(tree, table)
        if conclusion.leaf.kinds[0] not in repeated and conclusion.leaf.cause not in causes
    ]


_LASTING = (
    "nan", "divergence", "silent_divergence", "spike", "dead_run", "oom", "hang", "nonfinite_state", "scale_collapse",
)  # fmt: skip


def severity_key(table: Table, verdict: IncidentVerdict) -> tuple[bool, bool, bool, float]:
    """Return a sort key: unresolved first, then what the guard recorded, lasting damage, and size times length.

    The confidence does not count: to name a cause never lowers an incident.
    """
    length = max(1, verdict.row_end - verdict.row_start + 1)
    lasts = verdict.kind in _LASTING or (bool(len(table)) and verdict.step_end == table.step[-1])
    weight = min(verdict.size, 1e6) * length**0.5
    return verdict.state != "closed", verdict.incident is not None, lasts, weight


def _summary(table: Table, verdicts: list[IncidentVerdict]) -> str:
    """Summarize the diagnosis in one sentence."""
    records = f"{len(table):,} record{'s' if len(table) != 1 else ''}"
    unread = next((limit.text for limit in table.limits if limit.code in ("lines_lost", "truncated")), "")
    if not verdicts and not (table.has("loss") or table.has("reward")):
        reason = next((limit.text for limit in table.limits if limit.code == "no_loss"), "no training loss found")
        return f"Not judged: {reason}"
    if not verdicts:
        judged = f"No incident in {records}"
        judged += f", {fmt_steps(float(table.step[0]), float(table.step[-1]), table.unit)}" if len(table) > 1 else ""
        few = "; too few to tell a spike from noise" if table.has_limit("few_points") else ""
        return f"{judged}{few}." + (f" Not judged: {unread}." if unread else "")
    worst = max(verdicts, key=lambda verdict: severity_key(table, verdict))
    count, closed = len(verdicts), sum(verdict.state == "closed" for verdict in verdicts)
    resolved = "" if not closed else " (all resolved)" if closed == count else f" ({closed} resolved)"
    sentence = worst.headline or f"{INCIDENT_KINDS.get(worst.kind, worst.kind)}"
    sentence = f"{count} incidents in {records}{resolved}; the worst: {sentence}" if count > 1 else sentence
    sentence = "The" + sentence[3:] if sentence.startswith("the ") else sentence
    return f"{sentence}; cause: {worst.cause}."
