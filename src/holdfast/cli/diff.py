"""`holdfast diff`: ranks the differences between two runs by how well they explain a worse evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.cli.chart import Chart
from holdfast.cli.diagnose import Mapping, parse_mapping
from holdfast.cli.output import Json, echo, emit, titled_table
from holdfast.cli.report import check_output
from holdfast.core.base.clean import clean
from holdfast.core.base.errors import LogRefused, RunDirError
from holdfast.diagnosis import rundiff
from holdfast.diagnosis.rundiff import curves
from holdfast.diagnosis.rundiff.compared_run import ComparedRun
from holdfast.diagnosis.rundiff.report import DiffReport
from holdfast.reports.console import console
from holdfast.reports.diff_page import build_diff_page
from holdfast.reports.page import write_page

_COLOURS = {"A": "cyan", "B": "magenta"}
_HEIGHT = 10
_MAX_WIDTH = 110
_MAX_ROWS = 12


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A run directory, or a log of another tool.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The run to compare with it.")],
    page: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with both curves, to open in a browser.")
    ] = None,
    mapping: Mapping = None,
    as_json: Json = False,
) -> None:
    """Rank the differences between two runs as suspects.

    For "the loss looks fine, but the evaluation is worse".
    Compares settings, LR schedule, data mixture, tokenizer, versions, decode settings, recoveries, curves at equal tokens
    and evaluation results. What a run has not recorded is listed as not compared, not assumed equal.

    \b
    Examples:
      holdfast diff runs/a runs/b
      holdfast diff runs/a ../old/trainer_state.json
      holdfast diff a.csv b.csv --map loss=train_nll
      holdfast diff runs/a runs/b --html diff.html
      holdfast diff runs/a runs/b --json
    """
    if Path(first).exists() and Path(second).exists() and Path(first).samefile(second):
        raise RunDirError(f"{first} and {second} are the same run; name two")
    if page is not None:
        check_output(page, "diff", "--html")
    names = parse_mapping(mapping or [], "diff")
    a, b = _load_both(first, second, names)
    report = rundiff.compare(a, b)
    if page is not None:
        write_page(build_diff_page(report, a, b), page)
        echo(f"wrote {page}", err=True)
    if as_json:
        emit(msgspec.to_builtins(report))
    else:
        _print_report(console(), report, a, b)


def _load_both(first: str, second: str, names: dict[str, str]) -> tuple[ComparedRun, ComparedRun]:
    """Load both runs. Each column that --map names must be in one of them; the other log may have other names."""
    (a, missing_a), (b, missing_b) = (_load_mapped(path, names) for path in (first, second))
    for signal in missing_a.keys() & missing_b.keys():
        raise missing_b[signal]
    return a, b


def _load_mapped(path: str, names: dict[str, str]) -> tuple[ComparedRun, dict[str, LogRefused]]:
    """Load a run with those names that its log has. Return also an error for each of the others."""
    missing: dict[str, LogRefused] = {}
    while True:
        present = {signal: column for signal, column in names.items() if signal not in missing}
        try:
            return rundiff.load(path, present), missing
        except LogRefused as error:
            signal = next((s for s, c in present.items() if error.reason.startswith(f"--map {s}={c}:")), None)
            if signal is None:
                raise
            missing[signal] = error


def _print_report(out: Console, report: DiffReport, a: ComparedRun, b: ComparedRun) -> None:
    """Print verdict, picture, suspects, what could not be compared, and what to do."""
    out.print(_text(report.verdict.text, "bold"), soft_wrap=True)
    out.print()
    if (picture := _picture(report, a, b, min(out.width, _MAX_WIDTH))) is not None:
        out.print(picture)
        out.print()
    for name, run in (("A", report.a), ("B", report.b)):
        size = f"{run.points} steps logged" + (f", {run.tokens:,.0f} tokens" if run.tokens is not None else "")
        line = Text(f"{name}  ", style=_COLOURS[name])
        line.append_text(_text(f"{run.path} ({run.format}): {size}" + (f", {run.status}" if run.status else "")))
        out.print(line, soft_wrap=True)
    for table in (_suspects(report), _curves(report), _evals(report), _settings(report)):
        if table is not None:
            out.print()
            out.print(table)
    _print_not_compared(out, report)
    out.print()
    out.print(_text(f"next: {report.next}"), soft_wrap=True)


def _picture(report: DiffReport, a: ComparedRun, b: ComparedRun, width: int) -> Text | None:
    """Draw both losses over the steps of A; each value of B is at the step of A with equal data."""
    pair = curves.smooth_pair(a, b, "loss", report.axis)
    if pair is None:
        return None
    last = int(curves.step_at(a, report.axis, float(pair.a.x[-1])))
    settled = [float(v) for s in (pair.a, pair.b) for v in s.values[len(s.values) // 20 :]]
    chart = Chart(max(1, last), _COLOURS, top=max(settled))
    for name, smooth in (("A", pair.a), ("B", pair.b)):
        for x, value in curves.interpolate(smooth, 2 * width):
            chart.add(name, max(1, int(curves.step_at(a, report.axis, x))), value)
    picture = chart.render(width, _HEIGHT)
    note = f"loss, medians of {len(pair.a.x)} segments at equal {report.axis}, over the steps of A"
    picture.append(f"  {note}", style="dim")
    return picture


def _text(words: str, style: str = "default") -> Text:
    """Return text from a log as one line."""
    return Text(clean(words), style=style)


def _suspects(report: DiffReport) -> Table | None:
    if not report.suspects:
        return None
    table = titled_table("suspects", "score", "what", "why", "what it explains")
    for suspect in report.suspects[:_MAX_ROWS]:
        against = f" [against: {'; '.join(suspect.against)}]" if suspect.against else ""
        table.add_row(f"{suspect.score:.2f}", suspect.name, _text(suspect.reason + against), suspect.explains)
    return table


def _curves(report: DiffReport) -> Table | None:
    if not report.curves:
        return None
    table = titled_table(
        f"curves at equal {report.axis}, the last tenth", "curve", "A", "B", "gap", "noise of a step", "part"
    )
    for curve in report.curves:
        parts = "never, beyond noise" if not curve.parted else f"at step {curve.parts_at_step:.0f} of A"
        table.add_row(
            curve.signal, f"{curve.a_end:.4g}", f"{curve.b_end:.4g}", f"{curve.gap:+.2%}", f"{curve.noise:.2%}", parts
        )
    return table


def _evals(report: DiffReport) -> Table | None:
    evals = [e for e in report.evals if e.a is not None or e.b is not None]
    if not evals:
        return None
    table = titled_table("evaluations", "metric", "A", "B", "change", "worse")
    for e in evals[:_MAX_ROWS]:
        steps = [f" (step {s})" if s is not None and e.a_step != e.b_step else "" for s in (e.a_step, e.b_step)]
        values = ["-" if v is None else f"{v:.4g}{s}" for v, s in zip((e.a, e.b), steps, strict=True)]
        change = "-" if e.change is None else f"{e.change:+.2%}"
        table.add_row(_text(e.metric), *values, change, (e.worse or "-").upper())
    return table


def _settings(report: DiffReport) -> Table | None:
    if not report.settings:
        return None
    table = titled_table("settings that differ", "setting", "A", "B")
    for setting in report.settings[:_MAX_ROWS]:
        table.add_row(_text(setting.key), _text(_short(setting.a)), _text(_short(setting.b)))
    if len(report.settings) > _MAX_ROWS:
        table.add_row("...", f"{len(report.settings) - _MAX_ROWS} more with --json", "")
    return table


def _short(value: object) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _print_not_compared(out: Console, report: DiffReport) -> None:
    lines = [f"{m.name}: {m.why}" for m in report.not_compared]
    lines += [f"{name}: {limit}" for name, run in (("A", report.a), ("B", report.b)) for limit in run.limits]
    if report.axis_note:
        lines.insert(0, report.axis_note)
    if lines:
        out.print()
        out.print(Text("what could not be compared", style="bold"))
        for line in lines:
            out.print(_text(f"  {line}"), soft_wrap=True)
