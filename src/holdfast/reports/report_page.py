"""What a report shows, in one form for all its formats: verdict, figures, curves, marks, incidents and sections."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import msgspec
import numpy as np

from holdfast.core.base.clean import clean
from holdfast.core.base.types import Span
from holdfast.core.base.version import __version__
from holdfast.core.record.tally import describe_data
from holdfast.diagnosis import postmortem
from holdfast.diagnosis.diagnose import IncidentVerdict
from holdfast.diagnosis.importers import FORMATS
from holdfast.diagnosis.model.answers import fmt, fmt_steps
from holdfast.diagnosis.model.episode import INCIDENT_KINDS
from holdfast.diagnosis.postmortem.parts import Bullets, Command, Grid, Paragraph, Part
from holdfast.diagnosis.rundiff.compared_run import flatten
from holdfast.diagnosis.tree.recorded_cause import without_repeated_cause
from holdfast.reports.marks import Mark, checkpoint_marks, hang_marks, journal_marks, table_marks
from holdfast.reports.plots import LABELS, Plot, build_plots, is_constant, without_plot
from holdfast.reports.recorded_run import RecordedIncident, RecordedRun
from holdfast.reports.terminal import signals_of

_MAX_HEADLINE, _MAX_TEXT, _MAX_ROWS, _MAX_INCIDENTS, _MAX_FINDINGS = 300, 2000, 1000, 500, 40
_UNJUDGED = "it has no journal of decisions; `holdfast report` reads its curves for incidents"
VERDICTS = {
    "clean": ("good", "Clean"),
    "recovered": ("good", "Recovered"),
    "observed": ("warn", "Observed only"),
    "untrained": ("warn", "No step trained"),
    "training": ("live", "Training"),
    "stopped": ("bad", "Stopped by policy"),
    "failed": ("bad", "Ended by an error"),
    "ended": ("warn", "No end on record"),
    "incidents": ("warn", "Incidents found"),
    "log": ("good", "No incident found"),
    "not_judged": ("warn", "Not judged"),
    "unjudged": ("live", "Not diagnosed yet"),
}


class PageVerdict(msgspec.Struct, kw_only=True):
    """Holds the answer on top. `tone`: good, warn, bad or live."""

    status: str
    tone: str
    label: str
    text: str


class IncidentStory(msgspec.Struct, kw_only=True):
    """Holds an incident: one line for the list, and its story."""

    title: str
    line: str
    state: str
    onset: int
    last: int
    signals: list[str]
    """the columns that show it"""
    parts: list[Part]


class PageSection(msgspec.Struct, kw_only=True):
    title: str
    parts: list[Part]
    is_open: bool = False


class ReportPage(msgspec.Struct, kw_only=True):
    """Holds everything that a report shows."""

    kind: str = "run"
    title: str
    subtitle: str
    verdict: PageVerdict
    cards: list[tuple[str, str, str]]
    """figures on top: name, value, explanation"""
    costs: list[tuple[str, float]] = []
    plots: list[Plot]
    marks: list[Mark] = []
    incidents: list[IncidentStory] = []
    sections: list[PageSection] = []
    axis: str = "step"
    """the unit of the x axis"""
    version: str = __version__


class RunStory(msgspec.Struct, kw_only=True):
    """Holds the part of a page that the journal decides."""

    verdict: PageVerdict
    cards: list[tuple[str, str, str]]
    costs: list[tuple[str, float]]
    marks: list[Mark]
    incidents: list[IncidentStory]


def build_page(run: RecordedRun, *, is_live: bool = False) -> ReportPage:
    """Build the page of a run. `is_live`: leave out what takes long, the diagnosis and the post-mortem."""
    story = build_story(run, is_live=is_live)
    sections = [*_own_sections(run), *([] if is_live else _diagnosis_sections(run)), *_settings_sections(run)]
    return ReportPage(
        title=run.name,
        subtitle=f"{run.path}: {_describe_format(run.table.format)}",
        axis=run.table.unit,
        plots=build_plots(run.table),
        sections=[section for section in sections if section.parts],
        **msgspec.structs.asdict(story),
    )


def _describe_format(name: str) -> str:
    """Return what a kind of log is, without the names of its files."""
    return re.split(r"[:;(,]", FORMATS.get(name, name.replace("_", " ")))[0].strip()


def build_story(run: RecordedRun, *, is_live: bool = True) -> RunStory:
    """Build verdict, figures, marks and incidents."""
    incidents = run.journal_incidents if is_live else run.incidents
    marks = journal_marks(run.journal) if run.journal.exists else table_marks(run.table)
    return RunStory(
        verdict=build_verdict(run, is_live=is_live),
        cards=_cards(run, incidents),
        costs=list(run.goodput.parts.items()),
        marks=[*marks, *checkpoint_marks(run.checkpoints), *hang_marks(run.hangs)],
        incidents=[tell_story(incident, run) for incident in incidents[:_MAX_INCIDENTS]],
    )


def build_verdict(run: RecordedRun, *, is_live: bool = False) -> PageVerdict:
    status = "unjudged" if is_live and run.summary is None else run.status
    tone, label = VERDICTS[status]
    if run.summary is None:
        text = _UNJUDGED if is_live else run.diagnosis.summary.removeprefix(f"{label}: ")
        return PageVerdict(status=status, tone=tone, label=label, text=text)
    error = _last_error(run)
    summary = run.summary
    if status in ("training", "ended"):  # without an end, the journal counts in thousands
        summary = msgspec.structs.replace(summary, committed=_last_step(run))
    lines = str(summary).splitlines()
    incidents = run.journal_incidents if is_live else run.incidents
    handled = [incident for incident in incidents if incident.number]
    causes = Counter((incident.cause or "cause not known").replace("_", " ") for incident in handled)
    named = ", by cause: " + ", ".join(f"{cause} ({count})" for cause, count in causes.items()) if causes else ""
    if more := len(incidents) - len(handled):
        named += f"{';' if causes else ','} {more} found in the curve"
    restarts = f", {_count(summary.restarts, 'restart')}" if summary.restarts else ""
    text = f"{_count(summary.committed, 'step')} {lines[0].partition(' steps ')[2]}{restarts}" + (
        f". {_count(len(incidents), 'incident')}{named}" if named else ""
    )
    if status == "stopped":
        text = f"{_text(lines[-1], _MAX_HEADLINE)}; {text}"
    elif status == "failed":
        text = f"{_text(error, _MAX_HEADLINE)}; {text}"
    elif status == "ended":
        text = f"the last process left no end in the journal: killed, or still running elsewhere; {text}"
    elif ended_by := _ended_by_signal(run):
        text = f"{ended_by}; the same command continues it; {text}"
    return PageVerdict(status=status, tone=tone, label=label, text=text)


def _last_step(run: RecordedRun) -> int:
    """Return the last step of the metrics; of a run that was killed before its first row, that of its checkpoints."""
    return int(run.table.step[-1]) if len(run.table) else max([0, *(c.step for c in run.checkpoints)])


def _last_error(run: RecordedRun) -> Any:
    return next((e.get("error") for e in reversed(run.journal.select("run_end"))), None)


def _ended_by_signal(run: RecordedRun) -> str:
    """Return the signal and the step of the last end of the run; empty if the run ended by itself."""
    end = run.journal.select("run_end")[-1:]
    reason = str(end[0].get("stopped")) if end else ""
    return _text(f"{reason} at step {end[0].get('step')}") if reason.startswith("received SIG") else ""


def _cards(run: RecordedRun, incidents: list[RecordedIncident]) -> list[tuple[str, str, str]]:
    table, summary, goodput = run.table, run.summary, run.goodput
    trained = f"{len(table) if table.unit == 'record' else _last_step(run):,}"
    cards = [(f"{table.unit}s", trained, f"{len(table):,} recorded")]
    if len(loss := table.series("loss").value):
        cards.append(("last loss", fmt(float(loss[-1])), f"lowest {fmt(_lowest(loss))}"))
    if goodput.wall_seconds > 0:
        wall = goodput.wall_seconds
        lost = f"{duration(wall - goodput.seconds['productive'])} of {duration(wall)} lost"
        cards.append(("goodput", f"{goodput.share:.1%}", lost))
    states = Counter(incident.state or "found in the curve" for incident in incidents)
    cards.append(("incidents", str(len(incidents)), ", ".join(f"{count} {state}" for state, count in states.items())))
    if summary is not None:
        lost_to = f"{_count(summary.rollbacks, 'rollback')}, {_count(summary.skipped, 'skip')}"
        cards.append(("lost to recovery", duration(summary.seconds_lost), lost_to))
        left_out = f"{_count(summary.samples_quarantined, 'sample id')}; {len(run.quarantine):,} in quarantine"
        cards.append(("data left out", _count(summary.batches_skipped, "batch"), left_out))
        health = Counter(checkpoint.health for checkpoint in run.checkpoints)
        others = [f", {count} {name}" for name, count in health.items() if name not in ("good", "candidate")]
        cards.append(("checkpoints", f"{health['good']} good", f"{health['candidate']} not judged{''.join(others)}"))
        cards.append(("restarts", str(summary.restarts), _count(len(run.hangs), "hang") if run.hangs else ""))
    return cards


def _lowest(values: np.ndarray[Any, Any]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.min()) if len(finite) else float("nan")


def _count(number: int, noun: str) -> str:
    plural = (
        noun + "es" if noun.endswith("ch") else noun.removesuffix("y") + "ies" if noun.endswith("ry") else noun + "s"
    )
    return f"{number:,} {noun if number == 1 else plural}"


def duration(seconds: float) -> str:
    """Return a duration in the unit that a person would use."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{1e3 * seconds:.3g} ms" if 0 < seconds < 0.1 else f"{seconds:.3g} s"


# ---- the story of an incident


def tell_story(incident: RecordedIncident, run: RecordedRun) -> IncidentStory:
    """Tell what was found, what was tried, what came of it, and the cause."""
    number = f"{incident.number}. " if incident.number else ""
    kind = incident.kind.replace("_", " ")
    cause = "" if incident.cause is None else incident.cause.replace("_", " ")
    actions = ", ".join(f"{name} x{n}" if n > 1 else name for name, n in Counter(incident.actions).items())
    parts: list[Part] = [Paragraph(_text(INCIDENT_KINDS.get(incident.kind, "")))] if incident.number == 0 else []
    if incident.explained:
        parts.append(Paragraph(_text(f"Cause: {incident.explained}")))
    parts += _findings(incident.findings)
    parts += _tried(incident)
    if incident.verdict is not None:
        parts += _diagnosed(incident.verdict)
    for name, content in incident.files.items():
        parts += [Paragraph(_text(name)), _settings_grid(content)]
    if incident.number:
        path = run.path / "incidents" / f"{incident.number:04d}" / "incident.json"
        parts.append(Paragraph(_text(f"Everything on record: {path}")))
    steps = fmt_steps(float(incident.onset), float(incident.last_step), run.table.unit)
    line = "; ".join(filter(None, (actions, f"cause: {cause}" if cause else "", incident.state)))
    return IncidentStory(
        title=_text(f"{number}{kind} at {steps}"),
        line=_text(line),
        state=incident.state,
        onset=incident.onset,
        last=incident.last_step,
        signals=[name for name, _ in signals_of(incident.kind)] + ["lr"],
        parts=parts,
    )


def _findings(findings: list[dict[str, Any]]) -> list[Part]:
    rows: list[list[str]] = []
    for finding in findings:
        evidence = finding.get("evidence") or {}
        numbers = ", ".join(f"{key} {fmt(value)}" for key, value in evidence.items() if _is_number(value))
        row = [finding.get("step"), finding.get("detector"), finding.get("severity"), finding.get("message"), numbers]
        cells = [_text(cell) for cell in row]
        if finding.get("new", True) and cells not in rows:  # an experiment meets the same finding again
            rows.append(cells)
    origin = next((o for f in findings if isinstance(o := (f.get("evidence") or {}).get("origin"), dict)), None)
    ranks: list[Part] = [Paragraph("By rank:"), _settings_grid(origin)] if origin else []
    more = [Paragraph(f"{len(rows) - _MAX_FINDINGS} more findings are in the journal.")]
    grid = Grid(["step", "detector", "severity", "finding", "evidence"], rows[:_MAX_FINDINGS])
    return [Paragraph("Found:"), grid, *(more if len(rows) > _MAX_FINDINGS else []), *ranks] if rows else []


def _tried(incident: RecordedIncident) -> list[Part]:
    """Return experiments, actions and their outcomes in order. Equal neighbours are one row."""
    rows: list[list[str]] = []
    for event in incident.events:
        kind, step = event["event"], event.get("step")
        text = str(event.get("text") or event.get("reason") or "")
        what = ""
        if kind == "experiment":
            what = f"experiment {event.get('rung') or ''}: {event.get('result') or ''}"
        elif kind == "action":
            what = str(event["action"])
            if what == "rollback":
                text = f"from step {event.get('from_step')} to {event.get('to_step')}: {text}"
        elif kind in ("quarantine", "released"):
            spans, samples = event.get("spans") or [], event.get("samples") or []
            what, text = kind, f"{describe_data([Span(*span) for span in spans], samples)}: {text}"
        elif kind in ("cause", "incident_closed"):
            what, text = kind.replace("_", " "), " ".join(without_repeated_cause(event.get("cause"), text)).strip()
        if not what:
            continue
        if rows and rows[-1][1] == what and what != "rollback":
            rows[-1][0] = f"{rows[-1][0].partition(' ')[0]} to {step}" if step is not None else rows[-1][0]
        else:
            rows.append([_text("" if step is None else step), _text(what), _text(text)])
    grid = Grid(["step", "tried", "what came of it"], rows[:_MAX_ROWS])
    return [Paragraph("Tried, in order:"), grid] if rows else []


def _diagnosed(verdict: IncidentVerdict) -> list[Part]:
    parts: list[Part] = [
        Paragraph(_text(f"Diagnosis: {verdict.cause} ({verdict.status}, confidence {verdict.confidence:.2f})"))
    ]
    for title, lines in (("For", verdict.evidence), ("Against", verdict.against), ("Not checked", verdict.unchecked)):
        if lines:
            parts += [Paragraph(f"{title}:"), Bullets([_text(line) for line in lines])]
    if verdict.rivals:
        rows = [[_text(r.cause), f"{r.confidence:.2f}", _text(r.status)] for r in verdict.rivals]
        parts += [Paragraph("Other possible causes:"), Grid(["cause", "confidence", "status"], rows)]
    if verdict.action:
        parts += [Paragraph("Do next:"), Command(_text(verdict.action))]
    if verdict.confirm:
        parts += [Paragraph("To confirm:"), Command(_text(verdict.confirm))]
    return parts


# ---- sections


def _own_sections(run: RecordedRun) -> list[PageSection]:
    """Return checkpoints, quarantined data, ranks and hangs."""
    saved = [[str(c.step), c.name, c.health, c.why, "yes" if c.on_disk else "no"] for c in run.checkpoints]
    left_out = []
    for entry in run.quarantine:
        spans, samples = entry.get("spans") or [], entry.get("samples") or []
        named = describe_data([Span(*span) for span in spans], samples) or json.dumps(entry, default=str)
        left_out.append(
            [str(entry.get("step", "")), named, str(entry.get("reason", "")), str(entry.get("incident", ""))]
        )
    ranks = [
        [str(rank), str(event.get("event")), str(event.get("step", "")), _rest(event, "event", "step", "time", "n")]
        for rank, events in run.ranks.items()
        for event in events
    ]
    hangs = [[str(h.get("step", "")), str(h.get("summary", "")), str(h.get("line", ""))] for h in run.hangs]
    seconds = [[name, duration(value)] for name, value in run.goodput.parts.items()]
    error = _text(_last_error(run) or "")
    return [
        PageSection(title="The error", parts=[Command(error)] if len(error) > _MAX_HEADLINE else []),
        grid_section("Where the time went", ["part", "time"], seconds),
        grid_section("Hangs", ["step", "what", "line"], hangs),
        grid_section("Data left out", ["step", "data", "reason", "incident"], left_out),
        grid_section("Checkpoints", ["step", "name", "health", "why", "on disk"], saved),
        grid_section("Events of single ranks", ["rank", "event", "step", "details"], ranks),
    ]


def _diagnosis_sections(run: RecordedRun) -> list[PageSection]:
    notes = [
        [fmt_steps(n.step_start, n.step_end, run.table.unit), n.kind, n.text, n.action] for n in run.diagnosis.notes
    ]
    limits = [_text(limit.text) for limit in run.diagnosis.limits]
    parts: list[Part] = []
    for section in postmortem.build(run.table, run.diagnosis).sections:
        parts += [Paragraph(f"{section.number}. {section.title}"), *section.parts]
    return [
        grid_section("Notes", ["steps", "kind", "what", "do"], notes),
        PageSection(title="What this record cannot show", parts=[Bullets(limits)] if limits else []),
        PageSection(title="Post-mortem", parts=parts),
    ]


def _settings_sections(run: RecordedRun) -> list[PageSection]:
    about = {key: value for key, value in run.about.items() if key not in ("config", "facts")}
    constant = {
        name: series.value[0]
        for name, series in run.metrics.items()
        if len(series.value) and is_constant(series) and name not in LABELS
    }
    named = {"Facts": run.facts, "Environment": about, "Configuration": run.config, "Constant columns": constant}
    left_out = [_text(name) for name in without_plot(run.table)]
    return [
        *(
            PageSection(title=title, parts=[_settings_grid(content)] if content else [])
            for title, content in named.items()
        ),
        PageSection(title="Columns without a plot", parts=[Bullets(left_out)] if left_out else []),
    ]


def _settings_grid(content: Any) -> Grid:
    flat = flatten(content)
    rows = [[_text(key), _text(value)] for key, value in list(flat.items())[:_MAX_ROWS]]
    return Grid(["", ""], [*rows, ["...", f"{len(flat) - _MAX_ROWS} more"]] if len(flat) > _MAX_ROWS else rows)


def grid_section(title: str, head: list[str], rows: list[list[Any]]) -> PageSection:
    shown = [[_text(cell) for cell in row] for row in rows[:_MAX_ROWS]]
    more: list[Part] = [Paragraph(f"{len(rows) - _MAX_ROWS} more rows")] if len(rows) > _MAX_ROWS else []
    return PageSection(title=title, parts=[Grid(head, shown), *more] if rows else [])


def _rest(event: dict[str, Any], *shown: str) -> str:
    return ", ".join(f"{key} {value}" for key, value in event.items() if key not in shown)


def _text(value: Any, longest: int = _MAX_TEXT) -> str:
    """Return a value as one clean line of bounded length."""
    text = clean(value if isinstance(value, str) else fmt(value) if isinstance(value, float) else str(value))
    return text if len(text) <= longest else f"{text[:longest]}… ({len(text):,} characters)"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
