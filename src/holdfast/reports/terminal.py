"""A diagnosis in the terminal: the verdict first, then the window, the evidence, and what to do next."""

from __future__ import annotations

import shlex

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from holdfast.diagnosis.diagnose import NoteLine, Report, Verdict, gravity, seen
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.postmortem.parts import Block, Bullets, Command, Grid, Paragraph, PostMortem, span
from holdfast.diagnosis.tree.kinds import INCIDENTS
from holdfast.reports.clean import clean
from holdfast.reports.curve import curve

FEW_VERDICTS = 6
"""up to so many incidents are told in full"""
MOST_VERDICTS = 5
"""of more, the gravest so many; a table has the others"""
MOST_LINES = 200
_LEAST_ROOM = 12
MOST_NOTES = 12
_AROUND = 60


def show(console: Console, table: Table, report: Report, *, everything: bool = False) -> None:
    """Print the report of one run; `everything`: each of many incidents in full."""
    console.print(_head(report))
    told = list(range(len(report.verdicts)))
    if len(told) > FEW_VERDICTS:
        console.print(_overview(report.verdicts if everything else report.verdicts[:MOST_LINES], console.width))
        if not everything:
            if len(told) > MOST_LINES:
                more = len(told) - MOST_LINES
                console.print(_line(f"   and {more} more: --all and --json have every one", "dim"))
            by_weight = sorted(told, key=lambda i: gravity(table, report.verdicts[i]), reverse=True)
            count = len(told)
            console.print()
            console.print(_line(f"the gravest {MOST_VERDICTS} of {count} in full; all of them with --all", "bold"))
            told = sorted(by_weight[:MOST_VERDICTS])
    for i in told:
        console.print(_verdict(i + 1, report.verdicts[i], table, min(console.width, 100)))
    if report.notes:
        console.print(_line("notes", "bold"))
        for note in report.notes[:MOST_NOTES]:
            console.print(_note(note))
        if len(report.notes) > MOST_NOTES:
            console.print(_line(f"  and {len(report.notes) - MOST_NOTES} more", "dim"))
    if report.limits:
        console.print(_line("what this log cannot show", "bold"))
        for limit in report.limits:
            console.print(_bullet(limit.text, "dim"))
    path = shlex.quote(report.path)
    follow = f"holdfast diagnose {path} --postmortem" if report.verdicts else f"holdfast diagnose {path} --json"
    console.print(Text.assemble(("next: ", "bold"), clean(follow)), soft_wrap=True)


def show_postmortem(console: Console, found: PostMortem) -> None:
    console.print(_line(found.title, "bold"))
    for section in found.sections:
        console.print()
        console.print(_line(f"{section.number}. {section.title}", "bold cyan"))
        for block in section.blocks:
            console.print(_block(block))


def refused(console: Console, path: str, reason: str) -> None:
    console.print(
        Text.assemble((clean(path), "bold"), ": ", ("refused", "yellow"), ": ", clean(reason)), soft_wrap=True
    )


def _head(report: Report) -> RenderableType:
    colour = "red" if report.verdicts else "green"
    line = Text.assemble((clean(report.path), "bold"), f"  {clean(report.format)}, {report.points} records\n")
    line.append(clean(report.summary), style=colour)
    return line


def _overview(verdicts: list[Verdict], width: int) -> RenderableType:
    """One line for each incident; the cause as far as there is room for it."""
    rows = [("#", "kind", "steps", "sure", "cause")]
    for i, verdict in enumerate(verdicts, 1):
        where = span(verdict.step_start, verdict.step_end).split(" ", 1)[1]
        rows.append((str(i), clean(verdict.kind), where, f"{verdict.confidence:.2f}", clean(verdict.cause)))
    number, kind, steps, sure, _ = (max(len(row[k]) for row in rows) for k in range(5))
    room = width - (number + kind + steps + sure + 9)
    text = Text()
    for row in rows:
        line = f"\n {row[0]:>{number}}  {row[1]:<{kind}}  {row[2]:<{steps}}  {row[3]:<{sure}}"
        cause = row[4] if len(row[4]) <= room else row[4][: room - 1] + "…"
        text.append(f"{line}  {cause}" if room >= _LEAST_ROOM else line.rstrip(), "bold" if row is rows[0] else "")
    return text


def _verdict(number: int, verdict: Verdict, table: Table, width: int) -> RenderableType:
    what = INCIDENTS.get(verdict.kind, verdict.kind)
    head = Text.assemble(
        (f"\n{number}. {clean(verdict.kind)}", "bold red"),
        f" at {span(verdict.step_start, verdict.step_end)}: {what}\n",
    )
    head.rstrip()
    parts: list[RenderableType] = [head, _labelled("cause", verdict.cause, "bold")]
    state = f"; in the journal: {verdict.state}" if verdict.state else ""
    parts.append(Text(f"   {verdict.status}, confidence {verdict.confidence:.2f}{state}\n"))
    parts += _charts(table, verdict, width)
    for title, lines in (
        ("for", verdict.evidence),
        ("against", verdict.against),
        ("could not be checked", verdict.unchecked),
    ):
        if lines:
            parts.append(_line(f"   {title}", "bold"))
            parts += [_bullet(line) for line in lines]
    parts.append(_labelled("do", verdict.action))
    parts.append(_labelled("confirm", verdict.confirm))
    return Group(*parts)


def _charts(table: Table, verdict: Verdict, width: int) -> list[RenderableType]:
    table, verdict = seen(table, verdict)
    length = verdict.row_end - verdict.row_start + 1
    reach = max(_AROUND, min(length // 2, 10 * _AROUND))
    first, stop = max(0, verdict.row_start - reach), min(len(table), verdict.row_end + 1 + reach)
    charts: list[RenderableType] = []
    for name, colour in _signals(verdict.kind):
        if not table.has(name):
            continue
        there = np.flatnonzero(table.present[name][first:stop])
        if len(there) < 2:
            continue
        begin = int(np.searchsorted(there, verdict.row_start - first))
        end = int(np.searchsorted(there, verdict.row_end - first, "right")) - 1
        begin = min(begin, len(there) - 1)
        picture = curve(
            table.step[first:stop][there],
            table.columns[name][first:stop][there],
            (begin, max(begin, end)),
            name=name,
            colour=colour,
            width=width - 4,
        )
        charts.append(Padding(picture, (0, 0, 0, 3)))
    return charts


def _signals(kind: str) -> list[tuple[str, str]]:
    """The signals an incident is about."""
    if kind in ("oom", "memory_leak", "fragmentation"):
        return [("memory_allocated", "yellow"), ("memory_reserved", "yellow"), ("memory_peak", "yellow")]
    if kind in ("throughput_drop", "straggler"):
        return [("seconds", "yellow"), ("tokens_per_second", "yellow")]
    scale = [("loss_scale", "yellow")] if kind in ("scale_collapse", "grad_nonfinite") else []
    return [("loss", "cyan"), ("grad_norm", "magenta"), *scale]


def _note(note: NoteLine) -> RenderableType:
    text = Text.assemble(
        "   - ", (clean(note.kind), "bold"), f" at {span(note.step_start, note.step_end)}: ", clean(note.text)
    )
    if note.action:
        text.append(f" Do: {clean(note.action)}", style="dim")
    return text


def _line(text: str, style: str = "") -> Text:
    return Text(clean(text) if text.strip() else text, style=style)


def _bullet(text: str, style: str = "") -> RenderableType:
    return Padding(Text(f"- {clean(text)}", style=style), (0, 0, 0, 5))


def _labelled(label: str, text: str, style: str = "green") -> RenderableType:
    return Padding(Text.assemble(f"{label}: ", (clean(text), style)), (0, 0, 0, 3))


def _block(block: Block) -> RenderableType:
    if isinstance(block, Paragraph):
        return Padding(Text(clean(block.text)), (0, 0, 0, 2))
    if isinstance(block, Bullets):
        return Padding(Group(*(Text(f"- {clean(item)}") for item in block.items)), (0, 0, 0, 3))
    if isinstance(block, Command):
        return Padding(Text(clean(block.text), style="green"), (0, 0, 0, 4))
    assert isinstance(block, Grid)
    made = RichTable(show_header=any(block.head), box=None, padding=(0, 2, 0, 0))
    for title in block.head:
        made.add_column(Text(clean(title)), overflow="fold")
    for row in block.rows:
        made.add_row(*(Text(clean(cell)) for cell in row))
    return Padding(made, (0, 0, 0, 2))
