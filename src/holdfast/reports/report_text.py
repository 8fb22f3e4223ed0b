"""A report as markdown, or in the terminal."""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.text import Text

from holdfast.core.base.clean import clean
from holdfast.diagnosis.model.table import Series
from holdfast.reports.curve import draw_curve
from holdfast.reports.markdown import escape_markdown, render_part
from holdfast.reports.report_page import PageSection, ReportPage
from holdfast.reports.terminal import render_rich

_TONES = {"good": "bold green", "warn": "bold yellow", "bad": "bold red", "live": "bold cyan"}
_LONG = ("Post-mortem", "Configuration", "Environment")
"""sections that the terminal leaves to other commands"""


def render_markdown(page: ReportPage) -> str:
    """Return the report as the text of a file."""
    verdict = page.verdict
    texts = [
        f"# {escape_markdown(page.title)}",
        escape_markdown(page.subtitle),
        f"**{escape_markdown(verdict.label)}**: {escape_markdown(verdict.text)}",
    ]
    texts.append(
        "\n".join(f"- {escape_markdown(f'{name}: {value}')}{_aside(more)}" for name, value, more in page.cards)
    )
    if page.incidents:
        texts.append("## Incidents")
    for story in page.incidents:
        texts += [f"### {escape_markdown(story.title)}", escape_markdown(story.line)]
        texts += [render_part(part) for part in story.parts]
    for section in page.sections:
        texts += [f"## {escape_markdown(section.title)}", *(render_part(part) for part in section.parts)]
    return "\n\n".join(texts) + "\n"


def _aside(text: str) -> str:
    return f" ({escape_markdown(text)})" if text else ""


def show_report(console: Console, page: ReportPage, loss: Series) -> None:
    """Print the report: verdict, figures, the loss, incidents in full, and the short sections."""
    console.print(Text.assemble((clean(page.title), "bold"), "  ", (clean(page.subtitle), "dim")), soft_wrap=True)
    verdict = page.verdict
    console.print(
        Text.assemble((clean(verdict.label), _TONES.get(verdict.tone, "bold")), ": ", clean(verdict.text)),
        soft_wrap=True,
    )
    for name, value, more in page.cards:
        console.print(Text.assemble(f"  {clean(name):<18}", (clean(value), "bold"), f"  {clean(more)}" if more else ""))
    if len(loss.step) > 1:
        rows = np.searchsorted(loss.step, [story.onset for story in page.incidents[:1]])
        marked = (int(rows[0]), int(rows[0])) if len(rows) else (0, 0)
        console.print(
            draw_curve(
                loss.step, loss.value, marked, name="loss", colour="cyan", width=min(console.width, 100), unit=page.axis
            )
        )
    for story in page.incidents:
        console.print()
        console.print(Text.assemble((clean(story.title), "bold cyan"), f"  {clean(story.line)}"), soft_wrap=True)
        for part in story.parts:
            console.print(render_rich(part))
    for section in page.sections:
        if section.title not in _LONG:
            _show_section(console, section)


def _show_section(console: Console, section: PageSection) -> None:
    console.print()
    console.print(Text(clean(section.title), "bold cyan"))
    for part in section.parts:
        console.print(render_rich(part))
