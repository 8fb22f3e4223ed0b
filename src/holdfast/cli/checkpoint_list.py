"""The answer of `holdfast checkpoints ls`: the tree of checkpoints, and the one that a resume would use."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from holdfast.cli.output import format_count, format_duration
from holdfast.cli.run_paths import checkpoint_bytes
from holdfast.core.base.clean import clean
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.entry import CheckpointEntry
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.resume import Survey

SCHEMA = "holdfast.checkpoints/1"
MARKS = {
    Health.GOOD: ("✓", "green"),
    Health.CANDIDATE: ("…", "yellow"),
    Health.BAD: ("✗", "red"),
    Health.QUARANTINED: ("⊘", "magenta"),
}
_WIDE = 110
"""columns of a terminal that fits every field of the table"""


class TreeRow(NamedTuple):
    """A row of the tree: a checkpoint, or the point where a branch was abandoned."""

    graph: str
    entry: CheckpointEntry | None
    note: str = ""
    is_abandoned: bool = False


class _ForkPoint(NamedTuple):
    """Where an abandoned branch leaves the lineage: after `step`, when the lineage continues with fork number `fork`."""

    step: int
    fork: int


def tree_rows(survey: Survey) -> list[TreeRow]:
    """Return the rows, newest first along the lineage; an abandoned branch comes above its fork point."""
    newest = sorted(survey.entries, key=lambda e: (e.step, e.branch), reverse=True)
    lineage = survey.lineage
    if lineage is None or len({fork.branch for fork in lineage.forks} | {e.branch for e in newest}) == 1:
        return [TreeRow("", e) for e in newest]
    of_run = {e.name for e in newest if _is_of_run(e, survey)}
    branch_lineages = {e.branch: e.manifest.lineage for e in newest if e.manifest is not None and e.name in of_run}
    abandoned: dict[_ForkPoint, list[CheckpointEntry]] = {}
    trunk: list[CheckpointEntry] = []
    for entry in newest:
        if entry.name in of_run and not lineage.holds(entry.branch, entry.step):
            abandoned.setdefault(_fork_point(entry, lineage, branch_lineages), []).append(entry)
        else:
            trunk.append(entry)
    fork_numbers = {fork.branch: n for n, fork in enumerate(lineage.forks)}
    rows: list[TreeRow] = []
    pending = sorted(abandoned, reverse=True)
    for entry in trunk:
        fork_number = fork_numbers.get(entry.branch, -1)
        while pending and entry.step <= pending[0].step and fork_number < pending[0].fork:
            rows += _branch_rows(pending[0].step, abandoned[pending.pop(0)])
        rows.append(TreeRow("●" if entry.name in of_run else "│ ?", entry))
    for point in pending:
        rows += _branch_rows(point.step, abandoned[point])
    return rows


def _branch_rows(step: int, entries: list[CheckpointEntry]) -> Iterator[TreeRow]:
    for entry in entries:
        yield TreeRow("│ ○", entry, is_abandoned=True)
    yield TreeRow("├─╯", None, f"abandoned at step {step:,}", is_abandoned=True)


def _is_of_run(entry: CheckpointEntry, survey: Survey) -> bool:
    return entry.manifest is None or survey.run is None or entry.manifest.run == survey.run


def _fork_point(entry: CheckpointEntry, lineage: Lineage, branch_lineages: Mapping[int, Lineage]) -> _ForkPoint:
    branch = entry.manifest.lineage if entry.manifest is not None else branch_lineages.get(entry.branch)
    forks = lineage.forks
    if branch is None:  # damaged, and its branch has no other checkpoint
        return _ForkPoint(entry.step, len(forks))
    differing = next((n for n, (a, b) in enumerate(zip(branch.forks, forks, strict=False)) if a != b), None)
    if differing is not None:
        return _ForkPoint(min(branch.forks[differing].step, forks[differing].step), differing)
    if len(branch.forks) < len(forks):
        return _ForkPoint(forks[len(branch.forks)].step, len(branch.forks))
    return _ForkPoint(branch.forks[len(forks)].step if len(branch.forks) > len(forks) else entry.step, len(forks))


# ---- text


def print_list(out: Console, survey: Survey, run: Path, settings: Mapping[str, Any], unfinished: list[str]) -> None:
    """Print the table, the checkpoint that a resume would use, and the reasons against the others."""
    path, is_wide = clean(str(run)), out.width >= _WIDE
    if survey.entries:
        out.print(_table(survey, is_wide))
        out.print()
    else:
        out.print(Text(f"{path} has no checkpoints yet"), soft_wrap=True)
    out.print(_verdict(survey), soft_wrap=True)
    _print_reasons(out, survey, is_wide)
    if survey.entries:
        total = decimal(sum(checkpoint_bytes(e.path) for e in survey.entries))
        count = format_count(len(survey.entries), "checkpoint")
        out.print()
        out.print(Text(f"{count}, {total}; to read every byte: holdfast checkpoints verify {path}"), soft_wrap=True)
    for name in unfinished:
        out.print(Text(f"{clean(name)}: unfinished, or left by a killed process"), soft_wrap=True)
    override = None
    if settings.get("load_path"):
        override = f"load_path = {clean(str(settings['load_path']))!r}, which overrides this"
    elif settings.get("resume") == "never":
        override = 'resume = "never": with it, none is used'
    if override is not None:
        text = f"the latest start of the run had [checkpoint] {override}"
        out.print(Text(text, style="yellow"), soft_wrap=True)


def _table(survey: Survey, is_wide: bool) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0) if is_wide else (0, 1))
    table.add_column("", no_wrap=True)
    for name in ("name", *(("step", "branch") if is_wide else ()), "health", "size", "age", "ranks", "reason"):
        right = name in ("step", "branch", "size", "age", "ranks")
        table.add_column(name, no_wrap=name != "reason", overflow="fold", justify="right" if right else "left")
    if is_wide:
        table.add_column("why", overflow="fold", ratio=1)
    now = time.time()
    for row in tree_rows(survey):
        is_used = row.entry is not None and row.entry == survey.chosen
        gutter = Text("→ " if is_used else "  ", style="bold green")
        gutter.append(row.graph, style="dim" if row.is_abandoned else "cyan")
        cells = [Text(row.note)] if row.entry is None else _cells(row.entry, now, is_wide)
        table.add_row(gutter, *cells, style="dim" if row.is_abandoned else None)
    return table


def _cells(entry: CheckpointEntry, now: float, is_wide: bool) -> list[Text]:
    manifest = entry.manifest
    mark, colour = MARKS[entry.health]
    health = "damaged" if entry.damage is not None else str(entry.health)
    about = ["?"] * 3
    if manifest is not None:
        seconds = now - manifest.time
        age = format_duration(float(max(0, round(seconds))) if seconds < 120 else seconds)
        about = [age, str(manifest.world_size), clean(manifest.reason)]
    return [
        Text(entry.name),
        *map(Text, [f"{entry.step:,}", str(entry.branch)] if is_wide else []),
        Text(f"{mark} {health}", style=colour),
        Text(decimal(checkpoint_bytes(entry.path))),
        *map(Text, about),
        *map(Text, [_why(entry)] if is_wide else []),
    ]


def _why(entry: CheckpointEntry) -> str:
    return clean("saved at an orderly stop, to resume from" if entry.handover and not entry.why else entry.why)


def _verdict(survey: Survey) -> Text:
    used = survey.chosen
    if used is not None:
        why = f"{used.health}{': ' if _why(used) else ''}{_why(used)}"
        return Text(f"→ a resume would use {used.name} ({why})", style="bold green")
    if survey.refusal is not None:
        first_line = clean(survey.refusal.partition("\n")[0])
        return Text(f"the run would refuse to start: {first_line}", style="bold red")
    return Text("nothing to resume from: the run would start from the beginning", style="bold yellow")


def _print_reasons(out: Console, survey: Survey, is_wide: bool) -> None:
    """Print why each newer checkpoint would be passed over; if the table has no room for it, also why older ones are bad."""
    passed = {p.name: p.why for p in survey.rejected}
    older = (
        {} if is_wide else {e.name: _why(e) for e in reversed(survey.entries) if _is_bad(e) and e.name not in passed}
    )
    for title, reasons in (("passed over, newest first", passed), ("older, not usable", older)):
        if reasons:
            out.print(Text(title, style="bold"))
            for name, why in reasons.items():
                out.print(Text(f"  {name}: {clean(why)}"), soft_wrap=True)


def _is_bad(entry: CheckpointEntry) -> bool:
    return entry.damage is not None or entry.health in (Health.BAD, Health.QUARANTINED)


# ---- JSON


def to_json(survey: Survey, run: Path, unfinished: list[str]) -> dict[str, Any]:
    used, now = survey.chosen, time.time()
    return {
        "schema": SCHEMA,
        "ok": True,
        "path": str(run),
        "run": survey.run,
        "lineage": None if survey.lineage is None else [[f.branch, f.step] for f in survey.lineage.forks],
        "resume": {
            "name": None if used is None else used.name,
            "path": None if used is None else str(used.path),
            "refusal": survey.refusal,
            "passed_over": [
                {"name": p.name, "step": p.step, "why": p.why, "damaged": p.damaged} for p in survey.rejected
            ],
        },
        "checkpoints": [_entry_json(e, survey, now) for e in reversed(survey.entries)],
        "bytes": sum(checkpoint_bytes(e.path) for e in survey.entries),
        "in_the_making": unfinished,
    }


def _entry_json(entry: CheckpointEntry, survey: Survey, now: float) -> dict[str, Any]:
    manifest, lineage = entry.manifest, survey.lineage
    return {
        "name": entry.name,
        "path": str(entry.path),
        "step": entry.step,
        "branch": entry.branch,
        "on_lineage": lineage is not None and _is_of_run(entry, survey) and lineage.holds(entry.branch, entry.step),
        "health": str(entry.health),
        "why": entry.why,
        "damage": entry.damage,
        "handover": entry.handover,
        "bytes": checkpoint_bytes(entry.path),
        "time": None if manifest is None else manifest.time,
        "age_seconds": None if manifest is None else max(0.0, now - manifest.time),
        "ranks": None if manifest is None else manifest.world_size,
        "reason": None if manifest is None else manifest.reason,
        "run": None if manifest is None else manifest.run,
    }
