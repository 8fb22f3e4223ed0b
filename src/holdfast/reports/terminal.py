"""Shows a diagnosis in the terminal: the verdict first, then the chart, the evidence, and the next action."""

from __future__ import annotations

import shlex

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from holdfast.core.base.clean import clean
from holdfast.diagnosis.diagnose import DiagnosisReport, IncidentVerdict, NoteLine, restored_view, severity_key
from holdfast.diagnosis.model.answers import fmt_steps
from holdfast.diagnosis.model.episode import INCIDENT_KINDS
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.postmortem.parts import Bullets, Command, Grid, Paragraph, Part, Postmortem
from holdfast.reports.curve import draw_curve

FEW_VERDICTS = 6
"""up to this many incidents are shown in full"""
MAX_VERDICTS = 5
"""of more incidents, this many are shown in full; a table lists them all"""
MAX_ROWS = 200
MAX_NOTES = 12
MAX_ADVICE = 4
_MIN_CAUSE_WIDTH = 12
_CONTEXT_ROWS = 60


def show(console: Console, table: Table, report: DiagnosisReport, *, everything: bool = False) -> None:
    """Print the report of one run. `everything` shows each incident in full, however many there are."""
    console.print(
        Text.assemble((clean(report.path), "bold"), f"  {clean(report.format)}, {report.points} records"),
        soft_wrap=True,
    )
    console.print(_summary(report))
    verdicts = report.verdicts
    shown = list(range(len(verdicts)))
    if len(verdicts) > FEW_VERDICTS:
        console.print(_overview(verdicts if everything else verdicts[:MAX_ROWS], console.width))
        if not everything:
            if len(verdicts) > MAX_ROWS:
                console.print(Text(f"   and {len(verdicts) - MAX_ROWS} more: --all and --json list every one", "dim"))
            by_severity = sorted(shown, key=lambda i: severity_key(table, verdicts[i]), reverse=True)
            head = f"the {MAX_VERDICTS} most severe of {len(verdicts)} in full; --all shows every one"
            console.print(Text(f"\n{head}", "bold"))
            shown = sorted(by_severity[:MAX_VERDICTS])
    for i in shown:
        console.print(_verdict(i + 1, verdicts[i], table, min(console.width, 100)))
    if report.notes:
        console.print(Text("notes", "bold"))
        for note in report.notes[:MAX_NOTES]:
            console.print(_note(note, table.unit))
        if len(report.notes) > MAX_NOTES:
            console.print(Text(f"  and {len(report.notes) - MAX_NOTES} more", "dim"))
    limits = [limit for limit in report.limits if limit.code != "no_loss"]
    if limits:
        console.print(Text("what this log cannot show", "bold"))
        for limit in limits:
            console.print(_bullet(limit.text, "dim"))
    if advice := _advice(verdicts):
        console.print(_hanging("to learn why: ", advice))
    action, command = _next(table, report)
    if action:
        console.print(_hanging("next: ", action))
    console.print(Text.assemble(("in full: " if action else "next: ", "bold"), clean(command)), soft_wrap=True)


def _advice(verdicts: list[IncidentVerdict]) -> str:
    """Return what to log so that the questions without an answer can be asked, once for all incidents."""
    needs = [text.rpartition("Needs ")[2].rstrip(".") for verdict in verdicts for text in verdict.unchecked]
    needs = list(dict.fromkeys(need.split(",")[0] for need in needs if need != "the loss"))
    return f"log {'; '.join(needs[:MAX_ADVICE])}" if needs else ""


def _next(table: Table, report: DiagnosisReport) -> tuple[str, str]:
    """Return the next action, empty if it is the command, and a command to type."""
    command = f"holdfast diagnose {shlex.quote(report.path)}"
    if not report.is_judged:
        option = next(
            (limit.text.rpartition("Try ")[2] for limit in report.limits if "Try --map" in limit.text), "--help"
        )
        return "", f"{command} {option}"
    if not report.verdicts:
        return next((note.action for note in report.notes if note.action), ""), f"{command} --json"
    worst = max(report.verdicts, key=lambda verdict: severity_key(table, verdict))
    return worst.action, f"{command} --postmortem"


def show_postmortem(console: Console, postmortem: Postmortem) -> None:
    console.print(Text(clean(postmortem.title), "bold"), soft_wrap=True)
    for section in postmortem.sections:
        console.print()
        console.print(Text(clean(f"{section.number}. {section.title}"), "bold cyan"))
        for part in section.parts:
            console.print(render_rich(part))


def show_refusal(console: Console, path: str, reason: str) -> None:
    """Print why a path could not be read."""
    console.print(
        Text.assemble((clean(path), "bold"), ": ", ("refused", "yellow"), ": ", clean(reason)), soft_wrap=True
    )


def _summary(report: DiagnosisReport) -> RenderableType:
    return Text(clean(report.summary), "red" if report.verdicts else "green" if report.is_judged else "yellow")


def _overview(verdicts: list[IncidentVerdict], width: int) -> RenderableType:
    """Return one line per incident, with as much of the cause as fits."""
    rows = [("#", "kind", "steps", "conf", "cause")]
    for i, verdict in enumerate(verdicts, 1):
        steps = fmt_steps(verdict.step_start, verdict.step_end).split(" ", 1)[1]
        rows.append(
            (str(i), clean(verdict.kind).replace("_", " "), steps, f"{verdict.confidence:.2f}", clean(verdict.cause))
        )
    number, kind_width, steps_width, sure, _ = (max(len(row[k]) for row in rows) for k in range(5))
    room = width - (number + kind_width + steps_width + sure + 9)
    text = Text()
    for row in rows:
        line = f"\n {row[0]:>{number}}  {row[1]:<{kind_width}}  {row[2]:<{steps_width}}  {row[3]:<{sure}}"
        cause = row[4] if len(row[4]) <= room else row[4][: room - 1] + "…"
        text.append(f"{line}  {cause}" if room >= _MIN_CAUSE_WIDTH else line.rstrip(), "bold" if row is rows[0] else "")
    return text


def _verdict(number: int, verdict: IncidentVerdict, table: Table, width: int) -> RenderableType:
    steps = fmt_steps(verdict.step_start, verdict.step_end, table.unit)
    what = verdict.headline or f"{INCIDENT_KINDS.get(verdict.kind, verdict.kind)} at {steps}"
    state = f"; in the journal: {clean(verdict.state)}" if verdict.state else ""
    parts: list[RenderableType] = [
        Text(),
        _hanging(f"{number}. ", f"{clean(verdict.kind).replace('_', ' ')}: {what}", "bold red"),
        _labelled("cause", verdict.cause, "bold"),
        Text(f"   {clean(verdict.status)}, confidence {verdict.confidence:.2f}{state}\n"),
        *_charts(table, verdict, width),
    ]
    groups = (("for", verdict.evidence), ("against", verdict.against))
    for title, lines in groups:
        if lines:
            parts += [Text(f"   {title}", "bold"), *(_bullet(line) for line in lines)]
    return Group(*parts, _labelled("do", verdict.action), _labelled("confirm", verdict.confirm))


def _charts(table: Table, verdict: IncidentVerdict, width: int) -> list[RenderableType]:
    table, verdict = restored_view(table, verdict)
    length = verdict.row_end - verdict.row_start + 1
    reach = max(_CONTEXT_ROWS, min(length // 2, 10 * _CONTEXT_ROWS))
    first, stop = max(0, verdict.row_start - reach), min(len(table), verdict.row_end + 1 + reach)
    charts: list[RenderableType] = []
    for name, colour in signals_of(verdict.kind):
        logged = np.flatnonzero(table.present[name][first:stop]) if table.has(name) else np.empty(0, int)
        if len(logged) < 2:
            continue
        begin = min(int(np.searchsorted(logged, verdict.row_start - first)), len(logged) - 1)
        end = int(np.searchsorted(logged, verdict.row_end - first, "right")) - 1
        steps, values = table.step[first:stop][logged], table.columns[name][first:stop][logged]
        chart = draw_curve(
            steps, values, (begin, max(begin, end)), name=name, colour=colour, width=width - 4, unit=table.unit
        )
        charts.append(Padding(chart, (0, 0, 0, 3)))
    return charts


def signals_of(kind: str) -> list[tuple[str, str]]:
    """Return the signals to chart for a kind of incident, with their colours."""
    if kind in ("oom", "memory_leak", "fragmentation"):
        return [("memory_allocated", "yellow"), ("memory_reserved", "yellow"), ("memory_peak", "yellow")]
    if kind in ("throughput_drop", "straggler"):
        return [("seconds", "yellow"), ("tokens_per_second", "yellow")]
    scale = [("loss_scale", "yellow")] if kind in ("scale_collapse", "grad_nonfinite") else []
    return [("loss", "cyan"), ("grad_norm", "magenta"), *scale]


def _note(note: NoteLine, unit: str) -> RenderableType:
    text = f"{fmt_steps(note.step_start, note.step_end, unit)}: {note.text}"
    return _hanging("   - ", f"{text.removesuffix('.')}. Do: {note.action}" if note.action else text)


def _hanging(label: str, text: str, style: str = "") -> RenderableType:
    """Return a label and a text whose further lines begin below the first."""
    grid = RichTable.grid()
    grid.add_column(no_wrap=True, width=len(label))
    grid.add_column()
    grid.add_row(Text(label, "bold"), Text(clean(text), style))
    return grid


def _bullet(text: str, style: str = "") -> RenderableType:
    return _hanging("     - ", text, style)


def _labelled(label: str, text: str, style: str = "green") -> RenderableType:
    return _hanging(f"   {label}: ", text, style)


def render_rich(part: Part) -> RenderableType:
    """Return one building block of a post-mortem or a report."""
    if isinstance(part, Paragraph):
        return Padding(Text(clean(part.text)), (0, 0, 0, 2))
    if isinstance(part, Bullets):
        return Padding(Group(*(Text(f"- {clean(item)}") for item in part.items)), (0, 0, 0, 3))
    if isinstance(part, Command):
        return Padding(Text(clean(part.text), style="green"), (0, 0, 0, 4))
    assert isinstance(part, Grid)
    grid = RichTable(show_header=any(part.head), box=None, padding=(0, 2, 0, 0))
    for title in part.head:
        grid.add_column(Text(clean(title)), overflow="fold")
    for row in part.rows:
        grid.add_row(*(Text(clean(cell)) for cell in row))
    return Padding(grid, (0, 0, 0, 2))
