"""`holdfast report`: shows a run: a page to open in any browser, or markdown, the terminal, a picture."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.diagnose import parse_mapping
from holdfast.cli.output import Json, echo, emit
from holdfast.core.base.errors import ConfigError
from holdfast.core.record.rundir import write_atomically
from holdfast.reports.console import console
from holdfast.reports.page import write_page
from holdfast.reports.picture import draw_picture
from holdfast.reports.recorded_run import open_run
from holdfast.reports.report_page import ReportPage, build_page
from holdfast.reports.report_text import render_markdown, show_report

SCHEMA = "holdfast.report/1"


class ReportFormat(StrEnum):
    HTML = "html"
    MD = "md"
    TERMINAL = "terminal"
    PNG = "png"


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or a log of another tool.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="File to write; its ending names the format.")
    ] = None,
    format: Annotated[ReportFormat | None, typer.Option("--format", help="Default: html, or by the ending.")] = None,
    mapping: Annotated[
        list[str] | None, typer.Option("--map", metavar="NAME=COLUMN", help="The log's column for a signal.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a run: what happened, what it cost, the curves, and the story of each incident.

    Without -o, html is written to report.html, and png to report.png; md and terminal are printed.
    The page is one file: it needs no network, and works on a phone and on paper.
    png needs matplotlib. The logs that `holdfast diagnose` reads are shown too.

    \b
    Examples:
      holdfast report runs/a
      holdfast report runs/a -o a.html
      holdfast report train.log -o train.html
      holdfast report log.csv --map loss=train_nll -o log.html
      holdfast report runs/a --format terminal
      holdfast report runs/a -o a.png
    """
    if output is not None:
        check_output(output, "report")
    chosen = format or _format_of(output)
    if output is None and chosen in (ReportFormat.HTML, ReportFormat.PNG):
        output = Path(f"report.{chosen}")
        check_output(output, "report")
    if output is not None and chosen is ReportFormat.TERMINAL:
        raise ConfigError(["--format terminal prints; for a file choose md or html, or leave out -o"], "report")
    opened = open_run(run, mapping=parse_mapping(mapping or [], "report"))
    page = build_page(opened)
    if chosen is ReportFormat.PNG and output is not None:
        draw_picture(opened, page, output)
    elif chosen is ReportFormat.HTML and output is not None:
        write_page(page, output)
    elif output is not None:
        write_atomically(output, render_markdown(page))
    elif not as_json and chosen is ReportFormat.MD:
        for line in render_markdown(page).splitlines():
            echo(line)
    elif not as_json:
        show_report(console(), page, opened.table.series("loss"))
    if as_json:
        emit(_answer(page, run, output, chosen))
    elif output is not None:
        echo(f"wrote {output}: {page.verdict.label}: {page.verdict.text}", err=True)


def check_output(output: Path, command: str, option: str = "-o") -> None:
    """Raise ConfigError if a file cannot be made at `output`."""
    if output.is_dir():
        raise ConfigError(
            [f"{option} {output}: is a folder; name a file in it: {option} {output / 'report.html'}"], command
        )
    if not output.parent.is_dir():
        raise ConfigError([f"{option} {output}: no folder {output.parent}; make it: mkdir -p {output.parent}"], command)


def _format_of(output: Path | None) -> ReportFormat:
    if output is None:
        return ReportFormat.HTML
    endings = {".html": "html", ".htm": "html", ".md": "md", ".markdown": "md", ".png": "png"}
    if output.suffix.lower() not in endings:
        raise ConfigError([f"-o {output}: end it in .html, .md or .png, or name the --format"], "report")
    return ReportFormat(endings[output.suffix.lower()])


def _answer(page: ReportPage, run: str, output: Path | None, chosen: ReportFormat) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "ok": True,
        "run": run,
        "output": None if output is None else str(output),
        "format": str(chosen),
        "verdict": page.verdict,
        "cards": page.cards,
        "costs": page.costs,
        "incidents": [
            {"title": i.title, "line": i.line, "state": i.state, "onset": i.onset, "last": i.last}
            for i in page.incidents
        ],
    }
