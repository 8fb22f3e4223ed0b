"""The page of a comparison: the curves of two runs in the same pictures, and their differences."""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.diagnosis.model.table import COLUMNS
from holdfast.diagnosis.postmortem.parts import Bullets, Paragraph, Part
from holdfast.diagnosis.rundiff.compared_run import ComparedRun
from holdfast.diagnosis.rundiff.report import DiffReport
from holdfast.reports.plots import LABELS, Plot
from holdfast.reports.report_page import PageSection, PageVerdict, ReportPage, grid_section
from holdfast.reports.series import pack_series


def build_diff_page(report: DiffReport, a: ComparedRun, b: ComparedRun) -> ReportPage:
    """Build the page of two runs, compared at equal tokens, samples or steps."""
    verdict = report.verdict
    tone, label = ("good", "No worse run") if verdict.worse is None else ("warn", f"{verdict.worse.upper()} is worse")
    if verdict.identical:
        label = "Identical"
    elif verdict.worse is None and not report.evals and all(curve.signal != "loss" for curve in report.curves):
        tone, label = "warn", "No result to compare"
    elif a.nonfinite_since is not None and b.nonfinite_since is not None:
        tone = "warn"
    cards = []
    for name, run in (("A", report.a), ("B", report.b)):
        size = f"{run.points:,} steps" + (f", {run.tokens:,.0f} tokens" if run.tokens is not None else "")
        cards.append((name, run.path.rpartition("/")[2] or run.path, f"{size}; {run.status or run.format}"))
    return ReportPage(
        kind="diff",
        title=f"{cards[0][1]} and {cards[1][1]}",
        subtitle=f"A: {report.a.path}; B: {report.b.path}",
        verdict=PageVerdict(status="diff", tone=tone, label=label, text=verdict.text),
        cards=cards,
        plots=_plots(report, a, b),
        sections=[section for section in _sections(report) if section.parts],
        axis={"tokens": "token", "samples": "sample", "steps": "step"}[report.axis],
    )


def _plots(report: DiffReport, a: ComparedRun, b: ComparedRun) -> list[Plot]:
    plots = []
    for name in dict.fromkeys(["loss", "grad_norm", "lr", *a.columns, *b.columns]):
        curves = []
        for label, run in (("A", a), ("B", b)):
            x, y = run.axis(report.axis), run.column(name)
            if x is not None and y is not None:
                kept = np.isfinite(x) & ~np.isnan(y)
                curves.append({"name": label, **pack_series(x[kept], y[kept])})
        if curves:
            plots.append(Plot(title=LABELS.get(name, name), help=COLUMNS.get(name, ""), curves=curves))
    return plots


def _sections(report: DiffReport) -> list[PageSection]:
    suspects = [[f"{s.score:.2f}", s.name, s.a, s.b, s.reason, s.confirm] for s in report.suspects]
    curves = [
        [c.signal, c.a_end, c.b_end, f"{c.gap:+.2%}", "" if c.parts_at_step is None else f"{c.parts_at_step:g}"]
        for c in report.curves
    ]
    evals = [
        [e.metric, e.a, e.b, "" if e.change is None else f"{e.change:+.2%}", (e.worse or "").upper()]
        for e in report.evals
    ]
    settings = [[s.key, "not set" if s.a is None else s.a, "not set" if s.b is None else s.b] for s in report.settings]
    missing = [f"{m.name}: {m.why}" for m in report.not_compared]
    missing += [f"{name}: {limit}" for name, run in (("A", report.a), ("B", report.b)) for limit in run.limits]
    more: list[Part] = [Bullets(missing)] if missing else []
    found: list[tuple[str, list[str], list[list[Any]]]] = [
        ("Suspects, the most likely first", ["score", "what", "A", "B", "why", "how to confirm"], suspects),
        ("Evaluations", ["metric", "A", "B", "change", "worse"], evals),
        ("Curves", ["signal", "end of A", "end of B", "gap", "part at step of A"], curves),
        ("Settings that differ", ["setting", "A", "B"], settings),
    ]
    sections = [grid_section(title, head, rows) for title, head, rows in found]
    for section in sections[:2]:
        section.is_open = True
    note: list[Part] = [Paragraph(report.axis_note)] if report.axis_note else []
    return [
        *sections,
        PageSection(title="What could not be compared", parts=[*note, *more]),
        PageSection(title="Next", parts=[Paragraph(report.next)], is_open=True),
    ]
