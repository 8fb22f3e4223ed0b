"""Sections 1 to 8: what happened, how it was detected, and why."""

from __future__ import annotations

from holdfast.diagnosis.diagnose import IncidentVerdict
from holdfast.diagnosis.model.answers import fmt, fmt_steps
from holdfast.diagnosis.model.episode import INCIDENT_KINDS
from holdfast.diagnosis.model.run_journal import MISSING
from holdfast.diagnosis.postmortem import measurements
from holdfast.diagnosis.postmortem.context import MAX_INCIDENTS, PostmortemContext, title
from holdfast.diagnosis.postmortem.parts import Grid, Paragraph, Part, bullets, fmt_or_missing, grid
from holdfast.diagnosis.tree.recorded_cause import without_repeated_cause
from holdfast.diagnosis.tree.walk import Rival

TRIGGERS = {
    "lr_jumped": "the learning rate",
    "at_restart": "a restart",
    "duplicate_batch": "a repeated batch",
    "batch_changed": "a change of the batch shape",
    "at_epoch_boundary": "the start of an epoch",
    "nan_in_input": "the input data",
}
_MAX_EVENTS = 60
_NO_INCIDENT = Paragraph("none: no incident")
_KINDS_IN_JOURNAL = {
    "begin", "end", "finding", "plan", "action", "outcome", "quarantine", "incident", "overflow", "skipped",
    "rolled_back", "note", "restart",
}  # fmt: skip


def header(context: PostmortemContext) -> list[Part]:
    table, worst, summary = context.table, context.worst, context.journal.summary
    rows = [
        ["run", table.path],
        ["format", table.format],
        ["records", str(len(table))],
        ["steps", f"{fmt(float(table.step[0]))} to {fmt(float(table.step[-1]))}" if len(table) else MISSING],
        ["status", summary.status if summary else MISSING],
        ["incidents", str(len(context.report.verdicts))],
        ["verdict", "no incident" if worst is None else f"{worst.kind}: {worst.cause}"],
        ["confidence", MISSING if worst is None else f"{worst.confidence:.2f} ({worst.status})"],
    ]
    return [Grid(["", ""], rows)]


def impact(context: PostmortemContext) -> list[Part]:
    summary, cost = context.journal.summary, measurements.cost(context.table, context.report.verdicts)
    items = [
        f"steps inside incidents: {fmt(cost.steps)}",
        f"steps undone by rollbacks: {fmt_or_missing(context.journal.steps_undone())}",
        f"tokens inside incidents: {fmt_or_missing(cost.tokens)}",
    ]
    if summary is not None:
        items.append(f"time lost to recovery: {summary.seconds_lost:.1f} s")
        items.append(f"batches skipped: {summary.batches_skipped}")
    items.append(f"time inside incidents: {MISSING if cost.seconds is None else f'{cost.seconds:.1f} s'}")
    return [Paragraph(f"{context.report.summary.removesuffix('.')}."), bullets(items)]


def symptoms(context: PostmortemContext) -> list[Part]:
    parts: list[Part] = []
    for verdict in context.verdicts:
        head = ["signal", "median before", "inside", "not finite", "median after"]
        parts += [Paragraph(f"{title(verdict)}:"), grid(head, measurements.symptoms(context.table, verdict))]
    more = len(context.report.verdicts) - MAX_INCIDENTS
    if more > 0:
        parts.append(Paragraph(f"{more} further incidents are in the JSON report."))
    return parts or [_NO_INCIDENT]


def detection(context: PostmortemContext) -> list[Part]:
    items, leads = [], []
    for verdict in context.verdicts:
        by = ", ".join(f"{f.detector} at step {f.step} ({f.late} steps after its onset)" for f in verdict.findings)
        how = "from the curve of the whole log" if verdict.incident is None else f"online, incident {verdict.incident}"
        items.append(f"{title(verdict)}: {by or how}")
        for step in verdict.trail:
            if step.question == "gradient_leads" and step.answer == "yes":
                leads.append(f"the gradient norm showed it {step.numbers['lead']} records before the loss")
                items.append(leads[-1])
    items += context.journal.finding_lines()[:_MAX_EVENTS]
    if context.report.verdicts and not leads:
        items.append("earlier signs: none in the log")
    return [bullets(items, "nothing to detect: no incident")]


def timeline(context: PostmortemContext) -> list[Part]:
    table, journal = context.table, context.journal
    rows: list[tuple[float, str, str]] = []
    for verdict in context.verdicts:
        rows.append((verdict.step_start, "incident", f"{verdict.kind} begins: {INCIDENT_KINDS.get(verdict.kind, '')}"))
        if verdict.step_end > verdict.step_start:
            rows.append((verdict.step_end, "incident", f"{verdict.kind} ends, or the log does"))
    covered = _KINDS_IN_JOURNAL if journal.exists else {"overflow", "skipped"}
    events = [(e.step, e.kind, e.text[:120]) for e in table.events if e.kind not in covered]
    rows += [(float(step), kind, text) for step, kind, text in events if step is not None][: 4 * _MAX_EVENTS]
    for event in journal.select("action", "experiment", "cause", "restart", "incident_closed", "ack"):
        step, about = event.get("step"), without_repeated_cause(event.get("cause"), str(event.get("text") or ""))
        tried = [event.get("rung"), event.get("result"), *about]
        if isinstance(step, int) and event.get("action") != "skip":
            text = ": ".join(str(part) for part in tried if part) or event.get("action") or event.get("incident")
            rows.append((float(step), str(event["event"]), str(text or "")[:120]))
    first = float(table.step[0]) if len(table) else 0.0
    for note in context.report.notes:
        if not note.kind.startswith("incident_") and note.step_start > first:
            rows.append((note.step_start, f"note: {note.kind}", note.text[:120]))
    rows.sort(key=lambda row: row[0])
    shown = [[fmt(step), what, text] for step, what, text in rows[:_MAX_EVENTS]]
    parts = [grid(["step", "what", ""], shown, "the log has no events")]
    if len(rows) > _MAX_EVENTS:
        parts.append(Paragraph(f"{len(rows) - _MAX_EVENTS} further entries are left out."))
    changes = bullets(journal.config_changes(), "none between restarts" if journal.exists else MISSING)
    return [*parts, Paragraph("Changes of configuration:"), changes]


def hypotheses(context: PostmortemContext) -> list[Part]:
    parts: list[Part] = []
    for verdict in context.verdicts:
        causes: list[IncidentVerdict | Rival] = [verdict, *verdict.rivals]
        rows = [[str(rank), c.cause, f"{c.confidence:.2f}", c.status] for rank, c in enumerate(causes, 1)]
        parts += [Paragraph(f"{title(verdict)}:"), Grid(["", "cause", "confidence", "status"], rows)]
    return parts or [_NO_INCIDENT]


def evidence(context: PostmortemContext) -> list[Part]:
    parts: list[Part] = []
    for verdict in context.verdicts:
        items = [f"for: {text}" for text in verdict.evidence]
        items += [f"against: {text}" for text in verdict.against]
        items += [f"not checked: {text}" for text in verdict.unchecked]
        parts += [Paragraph(f"{title(verdict)}:"), bullets(items)]
    if replays := context.replay_lines("for", "against"):
        parts.append(bullets(replays))
    return parts or [_NO_INCIDENT]


def root_cause(context: PostmortemContext) -> list[Part]:
    items = []
    for verdict in context.verdicts:
        step = next((s for s in verdict.trail if s.question in TRIGGERS and s.answer == "yes"), None)
        trigger = f"trigger: {TRIGGERS[step.question]}: {step.sentence}" if step else "trigger: not established"
        if verdict.status == "established" and verdict.leaf.startswith("journal_"):
            trigger = "established by the experiments of the run"
        steps = fmt_steps(verdict.step_start, verdict.step_end)
        items.append(f"{steps}: root cause: {verdict.cause}; {trigger}")
    return [bullets([*items, *context.replay_lines("text")], "no incident, no cause")]
