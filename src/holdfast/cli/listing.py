"""What `holdfast checkpoints ls` answers with: the tree of what was saved, and what a resume would make of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from holdfast.cli.places import counted, size_of
from holdfast.cli.planned import spoken
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.entry import CheckpointEntry
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.resume import Survey
from holdfast.reports.clean import clean

SCHEMA = "holdfast.checkpoints/1"
MARKS = {
    Health.GOOD: ("✓", "green"),
    Health.CANDIDATE: ("…", "yellow"),
    Health.BAD: ("✗", "red"),
    Health.QUARANTINED: ("⊘", "magenta"),
}
_WIDE = 110
"""columns from which there is room for every field in the table"""


class Row(NamedTuple):
    """A line of the tree: a checkpoint, or where a branch was left."""

    lanes: str
    entry: CheckpointEntry | None
    note: str = ""
    left: bool = False


def rows(survey: Survey) -> list[Row]:
    """Newest first along the run's lineage; what lies on a branch that was left stands above the place where it was."""
    newest = sorted(survey.entries, key=lambda e: (e.step, e.branch), reverse=True)
    lineage = survey.lineage
    if lineage is None or len({fork.branch for fork in lineage.forks} | {e.branch for e in newest}) == 1:
        return [Row("", e) for e in newest]
    own = {e.name for e in newest if _is_own(e, survey)}
    known = {e.branch: e.manifest.lineage for e in newest if e.manifest is not None and e.name in own}
    sides: dict[_Parting, list[CheckpointEntry]] = {}
    along: list[CheckpointEntry] = []
    for entry in newest:
        if entry.name in own and not lineage.holds(entry.branch, entry.step):
            sides.setdefault(_parting(entry, lineage, known), []).append(entry)
        else:
            along.append(entry)
    return list(_woven(along, sides, own, {fork.branch: n for n, fork in enumerate(lineage.forks)}))


def _is_own(entry: CheckpointEntry, survey: Survey) -> bool:
    return entry.manifest is None or survey.run is None or entry.manifest.run == survey.run


class _Parting(NamedTuple):
    """Where the way to a state and the run's lineage part: after this step, the lineage going on with this fork."""

    step: int
    fork: int


def _woven(
    along: list[CheckpointEntry], sides: dict[_Parting, list[CheckpointEntry]], own: set[str], places: dict[int, int]
) -> Iterator[Row]:
    waiting = sorted(sides, reverse=True)
    for entry in along:
        while waiting and entry.step <= waiting[0].step and places.get(entry.branch, -1) < waiting[0].fork:
            yield from _side(waiting[0].step, sides[waiting.pop(0)])
        yield Row("●" if entry.name in own else "│ ?", entry)
    for parting in waiting:
        yield from _side(parting.step, sides[parting])


def _side(step: int, entries: list[CheckpointEntry]) -> Iterator[Row]:
    for entry in entries:
        yield Row("│ ○", entry, left=True)
    yield Row("├─╯", None, f"left at step {step:,}", left=True)


def _parting(entry: CheckpointEntry, lineage: Lineage, known: Mapping[int, Lineage]) -> _Parting:
    own = entry.manifest.lineage if entry.manifest is not None else known.get(entry.branch)
    forks = lineage.forks
    if own is None:  # damaged, and nothing else was saved on its branch
        return _Parting(entry.step, len(forks))
    same = next((n for n, (a, b) in enumerate(zip(own.forks, forks, strict=False)) if a != b), None)
    if same is not None:
        return _Parting(min(own.forks[same].step, forks[same].step), same)
    if len(own.forks) < len(forks):
        return _Parting(forks[len(own.forks)].step, len(own.forks))
    return _Parting(own.forks[len(forks)].step if len(own.forks) > len(forks) else entry.step, len(forks))


# ---- for a person


def tell(console: Console, survey: Survey, run: Path, settings: Mapping[str, Any], making: list[str]) -> None:
    if not survey.entries:
        console.print(Text(f"{clean(str(run))} has no checkpoints yet"), soft_wrap=True)
    else:
        console.print(_table(survey, wide=console.width >= _WIDE))
        console.print()
    for line in _verdict(survey):
        console.print(line, soft_wrap=True)
    _tell_whys(console, survey, wide=console.width >= _WIDE)
    place = clean(str(run))
    if survey.entries:
        total = sum(size_of(e.path) for e in survey.entries)
        cure = f"holdfast checkpoints verify {place}"
        console.print()
        console.print(
            Text(f"{counted(len(survey.entries), 'checkpoint')}, {decimal(total)}; to read every byte: {cure}"),
            soft_wrap=True,
        )
    for name in making:
        console.print(Text(f"{clean(name)}: in the making, or left by a process that was killed"), soft_wrap=True)
    for said in _overridden(settings):
        console.print(Text(said, style="yellow"), soft_wrap=True)


def _table(survey: Survey, *, wide: bool) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0) if wide else (0, 1))
    shown = rows(survey)
    table.add_column("", no_wrap=True)
    for name in ("name", *(("step", "branch") if wide else ()), "health", "size", "age", "ranks", "reason"):
        right = name in ("step", "branch", "size", "age", "ranks")
        table.add_column(name, no_wrap=name != "reason", overflow="fold", justify="right" if right else "left")
    if wide:
        table.add_column("why", overflow="fold", ratio=1)
    now = time.time()
    for row in shown:
        gutter = Text("→ " if row.entry is not None and row.entry == survey.taken else "  ", style="bold green")
        gutter.append(row.lanes, style="dim" if row.left else "cyan")
        cells = [Text(row.note)] if row.entry is None else _cells(row.entry, now, wide)
        table.add_row(gutter, *cells, style="dim" if row.left else None)
    return table


def _cells(entry: CheckpointEntry, now: float, wide: bool) -> list[Text]:
    manifest = entry.manifest
    mark, colour = MARKS[entry.health]
    health = "damaged" if entry.damage is not None else str(entry.health)
    numbers = [f"{entry.step:,}", str(entry.branch)] if wide else []
    age = "?" if manifest is None else _age(now - manifest.time)
    ranks = "?" if manifest is None else str(manifest.world_size)
    reason = "?" if manifest is None else clean(manifest.reason)
    texts = [
        Text(entry.name), *map(Text, numbers), Text(f"{mark} {health}", style=colour), Text(decimal(size_of(entry.path))),
        Text(age), Text(ranks), Text(reason),
    ]  # fmt: skip
    return [*texts, Text(_why(entry))] if wide else texts


def _age(seconds: float) -> str:
    return spoken(float(max(0, round(seconds)))) if seconds < 120 else spoken(seconds)


def _why(entry: CheckpointEntry) -> str:
    said = "saved at an orderly stop, to go on from" if entry.handover and not entry.why else entry.why
    return clean(said)


def _verdict(survey: Survey) -> Iterator[Text]:
    taken = survey.taken
    if taken is not None:
        why = f"{taken.health}{': ' if _why(taken) else ''}{_why(taken)}"
        yield Text(f"→ a resume would take {taken.name} ({why})", style="bold green")
    elif survey.refusal is not None:
        yield Text(
            f"a start of the run would be refused: {clean(survey.refusal.partition(chr(10))[0])}", style="bold red"
        )
    else:
        yield Text("there is nothing to resume from: the run would begin", style="bold yellow")


def _tell_whys(console: Console, survey: Survey, *, wide: bool) -> None:
    """Why each newer one would be passed over; where the table has no room, what is wrong with older ones too."""
    over = {p.name: p.why for p in survey.passed}
    others = (
        {} if wide else {e.name: _why(e) for e in reversed(survey.entries) if _is_doubted(e) and e.name not in over}
    )
    for title, lines in (("passed over, newest first", over), ("older ones in doubt", others)):
        if lines:
            console.print(Text(title, style="bold"))
            for name, why in lines.items():
                console.print(Text(f"  {name}: {clean(why)}"), soft_wrap=True)


def _is_doubted(entry: CheckpointEntry) -> bool:
    return entry.damage is not None or entry.health in (Health.BAD, Health.QUARANTINED)


def _overridden(settings: Mapping[str, Any]) -> Iterator[str]:
    if settings.get("load_path"):
        yield f"the latest start of the run had [checkpoint] load_path = {clean(str(settings['load_path']))!r}, which wins"
    elif settings.get("resume") == "never":
        yield 'the latest start of the run had [checkpoint] resume = "never": as long as that stands, none is taken'


# ---- for a program


def answer(survey: Survey, run: Path, making: list[str]) -> dict[str, Any]:
    taken, now = survey.taken, time.time()
    return {
        "schema": SCHEMA,
        "ok": True,
        "path": str(run),
        "run": survey.run,
        "lineage": None if survey.lineage is None else [[f.branch, f.step] for f in survey.lineage.forks],
        "resume": {
            "name": None if taken is None else taken.name,
            "path": None if taken is None else str(taken.path),
            "refusal": survey.refusal,
            "passed_over": [p._asdict() for p in survey.passed],
        },
        "checkpoints": [_plain(e, survey, now) for e in reversed(survey.entries)],
        "bytes": sum(size_of(e.path) for e in survey.entries),
        "in_the_making": making,
    }


def _plain(entry: CheckpointEntry, survey: Survey, now: float) -> dict[str, Any]:
    manifest, lineage = entry.manifest, survey.lineage
    return {
        "name": entry.name,
        "path": str(entry.path),
        "step": entry.step,
        "branch": entry.branch,
        "on_lineage": lineage is not None and _is_own(entry, survey) and lineage.holds(entry.branch, entry.step),
        "health": str(entry.health),
        "why": entry.why,
        "damage": entry.damage,
        "handover": entry.handover,
        "bytes": size_of(entry.path),
        "time": None if manifest is None else manifest.time,
        "age_seconds": None if manifest is None else max(0.0, now - manifest.time),
        "ranks": None if manifest is None else manifest.world_size,
        "reason": None if manifest is None else manifest.reason,
        "run": None if manifest is None else manifest.run,
    }
