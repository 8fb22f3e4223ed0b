"""Sections 9 to 16: what Holdfast did, what to do, and what to keep."""

from __future__ import annotations

import shlex

from holdfast.diagnosis.model.answers import fmt, fmt_steps
from holdfast.diagnosis.model.run_journal import MISSING, ListedCheckpoint, fmt_recorded
from holdfast.diagnosis.postmortem import measurements
from holdfast.diagnosis.postmortem.context import PostmortemContext, title
from holdfast.diagnosis.postmortem.parts import Bullets, Command, Grid, Paragraph, Part, bullets, grid


def automatic_actions(context: PostmortemContext) -> list[Part]:
    journal = context.journal
    if not journal.exists:
        return [Paragraph(f"{MISSING}: Holdfast did not guard this run")]
    skipped, rollbacks = journal.batches_skipped(), len(journal.actions("rollback"))
    cuts = [
        f"{fmt_recorded(cut.get('lr_from'))} -> {fmt_recorded(cut.get('lr_to'))} at step {cut.get('step')}"
        for cut in journal.actions("cut_lr")[:10]
    ]
    effects = [
        f"data order: {f'{skipped} batches skipped' if skipped else 'unchanged'}",
        f"learning rate: {'; '.join(cuts) or 'unchanged'}",
        f"RNG: {f'restored from {rollbacks} snapshots' if rollbacks else 'unchanged'}",
    ]
    return [bullets(journal.action_lines(), "no action"), Paragraph("Effects:"), Bullets(effects)]


def remedy(context: PostmortemContext) -> list[Part]:
    items = list(dict.fromkeys(f"{title(verdict)}: {verdict.action}" for verdict in context.verdicts))
    return [bullets([*items, *context.replay_lines("fix")], "none needed: no incident")]


def verification(context: PostmortemContext) -> list[Part]:
    parts: list[Part] = []
    for verdict in context.verdicts:
        expected = measurements.expected_loss(context.table, verdict)
        parts += [Paragraph(f"{title(verdict)}:"), Command(verdict.confirm), Paragraph(f"expected loss: {expected}")]
    return parts or [Paragraph("nothing to verify: no incident")]


def checkpoints(context: PostmortemContext) -> list[Part]:
    worst = context.worst
    if worst is None:
        return [Paragraph("no incident: all checkpoints are good")]
    if recorded := sorted(context.journal.checkpoints(), key=lambda checkpoint: checkpoint.step):
        good = [_name(c) for c in recorded if c.step < worst.step_start and c.health == "good"]
        bad = [_name(c) for c in recorded if c.step >= worst.step_start and c.health in ("bad", "quarantined")]
    else:
        saved = sorted(step for step in context.checkpoint_steps() if step is not None)
        good = [f"step {step}" for step in saved if step < worst.step_start]
        bad = [f"step {step}" for step in saved if step >= worst.step_start]
    missing = "none on record" if recorded else MISSING
    restored = [action["to_step"] for action in context.journal.actions("rollback") if "to_step" in action]
    rows = [
        ["last good", good[-1] if good else missing],
        ["first bad", bad[0] if bad else missing],
        ["restored snapshots", ", ".join(f"step {step}" for step in restored) or MISSING],
    ]
    return [Grid(["", f"relative to {title(worst)}"], rows)]


def _name(checkpoint: ListedCheckpoint) -> str:
    return f"step {checkpoint.step}{'' if checkpoint.on_disk else ', deleted since'}"


def differences(context: PostmortemContext) -> list[Part]:
    worst = context.worst
    if worst is None:
        return [Paragraph("no incident: nothing to compare")]
    rows = measurements.differences(context.table, worst)
    healthy = f"the {measurements.HEALTHY_RECORDS} records before step {fmt(worst.step_start)}"
    return [grid(["signal", healthy, "inside"], rows, "no signal changed by a fifth or more")]


def lessons(context: PostmortemContext) -> list[Part]:
    well, badly, lucky = [], [], []
    summary, saved = context.journal.summary, len(context.checkpoint_steps())
    if summary is not None and summary.status == "recovered":
        well.append(f"recovered automatically: {summary.skipped} skips, {summary.rollbacks} rollbacks")
    if not context.report.verdicts and not well:
        well.append("no incident")
    if saved:
        well.append(f"{saved} checkpoints in the log")
    last = len(context.table) - 1
    for verdict in context.verdicts:
        rows = verdict.row_end - verdict.row_start + 1
        if verdict.row_end == last and rows > 3 and verdict.incident is None:
            badly.append(f"the run continued for {rows} records after {verdict.kind} began, to the end of the log")
        if verdict.kind == "spike_recovered" and not context.journal.exists:
            lucky.append(f"{fmt_steps(verdict.step_start, verdict.step_end)}: the loss recovered without help")
    if summary is not None and summary.stopped:
        badly.append(f"stopped by policy: {summary.stopped}")
    if not context.table.has("grad_norm"):
        badly.append("the log has no gradient norm")
    groups = (("went well", well), ("went badly", badly), ("lucky", lucky[:5]))
    return [Bullets([f"{name}: {'; '.join(items) or 'nothing in the log'}" for name, items in groups])]


def follow_ups(context: PostmortemContext) -> list[Part]:
    limits = [limit for limit in context.report.limits if limit.code not in ("rolled_back", "not_committed")]
    items = [f"log what is missing: {limit.text}" for limit in limits]
    needed = [text.partition("Needs ")[2].rstrip(".") for v in context.verdicts for text in v.unchecked]
    items += [f"log {what}" for what in dict.fromkeys(needed) if what]
    items += [f"{note.kind}: {note.action}" for note in context.report.notes if note.action]
    return [bullets(items, "none")]


def raw_evidence(context: PostmortemContext) -> list[Part]:
    parts: list[Part] = []
    for verdict in context.verdicts[:3]:
        head, rows = measurements.raw_records(context.table, verdict)
        parts += [Paragraph(f"around step {fmt(verdict.step_start)}:"), grid(head, rows)]
    path = shlex.quote(context.table.path)
    parts += [Command(f"holdfast diagnose {path} --json"), Command(f"holdfast diagnose {path} --postmortem")]
    dropped, torn = context.table.dropped, context.journal.torn_lines
    if dropped or torn:
        parts.append(Paragraph(f"{dropped} records could not be read, {torn} journal lines are torn."))
    return parts
