"""Sections 9 to 16: what was done, what to do, and what to keep."""

from __future__ import annotations

import shlex

from holdfast.diagnosis.model.answers import number
from holdfast.diagnosis.model.own_journal import MISSING, spoken
from holdfast.diagnosis.postmortem import measure
from holdfast.diagnosis.postmortem.case import Case
from holdfast.diagnosis.postmortem.parts import Block, Bullets, Command, Grid, Paragraph, bullets, grid, span


def done(case: Case) -> list[Block]:
    if not case.journal.there:
        return [Paragraph(f"{MISSING}: the log of a run that Holdfast did not guard")]
    actions = case.journal.of("action")
    cuts = [a for a in actions if a.get("action") == "cut_lr"]
    back = [a for a in actions if a.get("action") == "rollback"]
    left = case.journal.batches_left_out()
    order = f"{left} batches left out of the order" if left else "unchanged"
    rate = "; ".join(
        f"{spoken(a.get('lr_from'))} -> {spoken(a.get('lr_to'))} at step {a.get('step')}" for a in cuts[:10]
    )
    states = f"taken from {len(back)} snapshots on rollback" if back else "no rollback touched it"
    effects = [f"data order: {order}", f"learning rate: {rate or 'unchanged'}", f"RNG: {states}"]
    return [bullets(case.journal.actions(), "nothing was done"), Paragraph("Effects:"), Bullets(effects)]


def remedy(case: Case) -> list[Block]:
    items = list(dict.fromkeys(f"{v.kind}, {span(v.step_start, v.step_end)}: {v.action}" for v in case.verdicts))
    return [bullets(items, "none needed: no incident")]


def verify(case: Case) -> list[Block]:
    blocks: list[Block] = []
    for verdict in case.verdicts:
        blocks.append(Paragraph(f"{verdict.kind}, {span(verdict.step_start, verdict.step_end)}:"))
        blocks.append(Command(verdict.confirm))
        blocks.append(Paragraph(f"expected band of the loss: {measure.band(case.table, verdict)}"))
    return blocks or [Paragraph("nothing to verify: no incident")]


def checkpoints(case: Case) -> list[Block]:
    worst = case.gravest
    if worst is None:
        return [Paragraph("no incident: every checkpoint is as good as the run")]
    saved = sorted(event.step for event in case.events("checkpoint") if event.step is not None)
    good = [step for step in saved if step < worst.step_start]
    bad = [step for step in saved if step >= worst.step_start]
    back = [a["to_step"] for a in case.journal.of("action") if a.get("action") == "rollback" and "to_step" in a]
    rows = [
        ["last good", f"step {good[-1]}" if good else MISSING],
        ["first bad", f"step {bad[0]}" if bad else MISSING],
        ["snapshots rolled back to", ", ".join(f"step {step}" for step in back) or MISSING],
    ]
    return [Grid(["", f"against {worst.kind}, {span(worst.step_start, worst.step_end)}"], rows)]


def differs(case: Case) -> list[Block]:
    worst = case.gravest
    if worst is None:
        return [Paragraph("no incident: nothing to compare")]
    rows = measure.differences(case.table, worst)
    healthy = f"the {measure.HEALTHY} records before step {number(worst.step_start)}"
    return [grid(["signal", healthy, "inside"], rows, "no signal on record changed by a fifth or more")]


def lessons(case: Case) -> list[Block]:
    well, badly, lucky = [], [], []
    summary = case.journal.summary()
    if summary is not None and summary.status == "recovered":
        well.append(f"recovered without a person: {summary.skipped} skips, {summary.rollbacks} rollbacks")
    if not case.report.verdicts and not well:
        well.append("no incident")
    if case.events("checkpoint"):
        well.append(f"{len(case.events('checkpoint'))} checkpoints are on record")
    last = len(case.table) - 1
    for verdict in case.verdicts:
        rows = verdict.row_end - verdict.row_start + 1
        if verdict.row_end == last and rows > 3 and verdict.incident is None:
            badly.append(f"the run went on for {rows} records after {verdict.kind} began, to the end of the log")
        if verdict.kind == "spike_recovered" and not case.journal.there:
            lucky.append(f"{span(verdict.step_start, verdict.step_end)}: it came back by itself")
    if summary is not None and summary.stopped:
        badly.append(f"stopped by policy: {summary.stopped}")
    if not case.table.has("grad_norm"):
        badly.append("no gradient norm on record")
    said = "nothing on record"
    return [
        Bullets(
            [
                f"went well: {'; '.join(well) or said}",
                f"went badly: {'; '.join(badly) or said}",
                f"lucky: {'; '.join(lucky[:5]) or said}",
            ]
        )
    ]


def follow_ups(case: Case) -> list[Block]:
    limits = [limit for limit in case.report.limits if limit.code not in ("rolled_back", "not_committed")]
    items = [f"record what this log lacks: {limit.text}" for limit in limits]
    needed = [text.partition("Needs ")[2].rstrip(".") for v in case.verdicts for text in v.unchecked]
    items += [f"record {what}" for what in dict.fromkeys(needed) if what]
    items += [f"{note.kind}: {note.action}" for note in case.report.notes if note.action]
    return [bullets(items, "none")]


def raw_evidence(case: Case) -> list[Block]:
    blocks: list[Block] = []
    for verdict in case.verdicts[:3]:
        head, rows = measure.raw(case.table, verdict)
        blocks += [Paragraph(f"around step {number(verdict.step_start)}:"), grid(head, rows)]
    path = shlex.quote(case.table.path)
    blocks.append(Command(f"holdfast diagnose {path} --json"))
    blocks.append(Command(f"holdfast diagnose {path} --postmortem"))
    if case.table.dropped or case.journal.torn:
        blocks.append(
            Paragraph(f"{case.table.dropped} records could not be read, {case.journal.torn} journal lines are torn.")
        )
    return blocks
