"""Sections 1 to 8: what happened, how it was seen, and why."""

from __future__ import annotations

from holdfast.diagnosis.model.answers import number
from holdfast.diagnosis.model.own_journal import MISSING
from holdfast.diagnosis.postmortem import measure
from holdfast.diagnosis.postmortem.case import MOST_INCIDENTS, Case
from holdfast.diagnosis.postmortem.parts import Block, Grid, Paragraph, bullets, grid, shown, span
from holdfast.diagnosis.tree.kinds import INCIDENTS

TRIGGERS = {
    "lr_jumped": "the learning rate",
    "at_restart": "a restart",
    "duplicate_batch": "a batch served again",
    "batch_changed": "a change of the batch's shape",
    "at_epoch_boundary": "the turn of an epoch",
    "nan_in_input": "the input data",
}
_MOST_EVENTS = 60
_TOLD_BY_THE_JOURNAL = {
    "begin", "end", "finding", "plan", "action", "outcome", "quarantine", "incident", "overflow", "skipped",
    "rolled_back", "note", "restart",
}  # fmt: skip


def header(case: Case) -> list[Block]:
    table, worst, summary = case.table, case.gravest, case.journal.summary()
    steps = f"{number(float(table.step[0]))} to {number(float(table.step[-1]))}" if len(table) else MISSING
    rows = [
        ["run", table.path],
        ["format", table.format],
        ["records", str(len(table))],
        ["steps", steps],
        ["status", summary.status if summary else MISSING],
        ["incidents", str(len(case.report.verdicts))],
        ["verdict", "no incident" if worst is None else f"{worst.kind}: {worst.cause}"],
        ["confidence", MISSING if worst is None else f"{worst.confidence:.2f} ({worst.status})"],
    ]
    return [Grid(["", ""], rows)]


def impact(case: Case) -> list[Block]:
    summary, lost = case.journal.summary(), measure.cost(case.table, case.report.verdicts)
    items = [f"steps inside incidents: {number(lost.steps)}"]
    undone = case.journal.steps_undone()
    items.append(f"steps undone by rollbacks: {shown(None if undone is None else float(undone))}")
    items.append(f"tokens inside incidents: {shown(lost.tokens)}")
    if summary is not None:
        items.append(f"time lost to recovery: {summary.seconds_lost:.1f} s")
        items.append(f"batches left out: {summary.batches_skipped}")
    items.append(f"time inside incidents: {MISSING if lost.seconds is None else f'{lost.seconds:.1f} s'}")
    return [Paragraph(f"{case.report.summary}."), bullets(items)]


def symptoms(case: Case) -> list[Block]:
    blocks: list[Block] = []
    for verdict in case.verdicts:
        blocks.append(Paragraph(f"{verdict.kind}, {span(verdict.step_start, verdict.step_end)}:"))
        head = ["signal", "median before", "inside", "not finite", "median after"]
        blocks.append(grid(head, measure.symptoms(case.table, verdict)))
    more = len(case.report.verdicts) - MOST_INCIDENTS
    if more > 0:
        blocks.append(Paragraph(f"{more} further incidents are in the JSON report."))
    return blocks or [Paragraph("none: no incident")]


def detection(case: Case) -> list[Block]:
    items = []
    for verdict in case.verdicts:
        where = span(verdict.step_start, verdict.step_end)
        by = ", ".join(f"{f.detector} at step {f.step} ({f.late} steps after its onset)" for f in verdict.findings)
        how = "by the course of the whole log" if verdict.incident is None else f"online, incident {verdict.incident}"
        items.append(f"{verdict.kind}, {where}: {by or how}")
        lead = next((s for s in verdict.trail if s.question == "gradient_leads" and s.answer == "yes"), None)
        if lead is not None:
            items.append(f"the gradient norm should have fired {lead.numbers['lead']} records sooner than the loss")
    items += case.journal.findings()[:_MOST_EVENTS]
    if case.report.verdicts and not any("sooner" in item for item in items):
        items.append("what should have fired sooner: nothing on record shows an earlier sign")
    return [bullets(items, "nothing to detect: no incident")]


def timeline(case: Case) -> list[Block]:
    rows: list[tuple[float, list[str]]] = []
    for verdict in case.verdicts:
        rows.append((verdict.step_start, ["incident", f"{verdict.kind} begins: {INCIDENTS.get(verdict.kind, '')}"]))
        if verdict.step_end > verdict.step_start:
            rows.append((verdict.step_end, ["incident", f"{verdict.kind} ends, or the log does"]))
    told = _TOLD_BY_THE_JOURNAL if case.journal.there else {"overflow", "skipped"}
    for event in [e for e in case.table.events if e.kind not in told and e.step is not None][: 4 * _MOST_EVENTS]:
        if event.step is not None:
            rows.append((float(event.step), [event.kind, event.text[:120]]))
    for action in case.journal.of("action", "restart", "incident_closed", "ack"):
        step = action.get("step")
        if isinstance(step, int) and action.get("action") != "skip":
            rows.append(
                (float(step), [str(action["event"]), str(action.get("action") or action.get("incident") or "")])
            )
    for note in case.report.notes:
        if not note.kind.startswith("incident_") and note.step_start > float(
            case.table.step[0] if len(case.table) else 0
        ):
            rows.append((note.step_start, [f"note: {note.kind}", note.text[:120]]))
    rows.sort(key=lambda row: row[0])
    blocks = [
        grid(
            ["step", "what", ""], [[number(step), *rest] for step, rest in rows[:_MOST_EVENTS]], "no event is on record"
        )
    ]
    if len(rows) > _MOST_EVENTS:
        blocks.append(Paragraph(f"{len(rows) - _MOST_EVENTS} further entries are left out."))
    changes = case.journal.config_changes() if case.journal.there else []
    missing = "none between the lives of the run" if case.journal.there else MISSING
    return [*blocks, Paragraph("Changes of configuration:"), bullets(changes, missing)]


def hypotheses(case: Case) -> list[Block]:
    blocks: list[Block] = []
    for verdict in case.verdicts:
        rows = [["1", verdict.cause, f"{verdict.confidence:.2f}", verdict.status]]
        for rank, rival in enumerate(verdict.rivals, 2):
            rows.append([str(rank), rival.cause, f"{rival.confidence:.2f}", rival.status])
        blocks.append(Paragraph(f"{verdict.kind}, {span(verdict.step_start, verdict.step_end)}:"))
        blocks.append(Grid(["", "cause", "confidence", "status"], rows))
    return blocks or [Paragraph("none: no incident")]


def evidence(case: Case) -> list[Block]:
    blocks: list[Block] = []
    for verdict in case.verdicts:
        items = [f"for: {text}" for text in verdict.evidence]
        items += [f"against: {text}" for text in verdict.against]
        items += [f"could not be checked: {text}" for text in verdict.unchecked]
        blocks.append(Paragraph(f"{verdict.kind}, {span(verdict.step_start, verdict.step_end)}:"))
        blocks.append(bullets(items))
    return blocks or [Paragraph("none: no incident")]


def root_cause(case: Case) -> list[Block]:
    items = []
    for verdict in case.verdicts:
        trigger = next((s for s in verdict.trail if s.question in TRIGGERS and s.answer == "yes"), None)
        said = f"{TRIGGERS[trigger.question]}: {trigger.sentence}" if trigger else "not established"
        items.append(f"{span(verdict.step_start, verdict.step_end)}: root cause: {verdict.cause}; trigger: {said}")
    return [bullets(items, "no incident, no cause")]
