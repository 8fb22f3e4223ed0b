"""`holdfast checkpoints prune`: remove what no rule keeps, by lineage and health, as the run itself would."""

from __future__ import annotations

import sys
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from holdfast.cli import verify
from holdfast.cli.output import Json, emit
from holdfast.cli.places import BY, console, counted, held, noting, run_at, settings, size_of
from holdfast.core.base.config import CheckpointSection
from holdfast.core.base.errors import RunDirError
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.entry import CheckpointEntry
from holdfast.core.checkpoints.folder import Folder
from holdfast.core.checkpoints.resume import CHECKPOINTS, Survey, survey
from holdfast.core.checkpoints.retention import RetentionRules, SavedCheckpoint, select_for_deletion
from holdfast.core.record.rundir import RunDir
from holdfast.reports.clean import clean

SCHEMA = "holdfast.checkpoints.prune/1"
EXIT_NOT_DONE = 1
EXIT_UNASKED = 2


class Going(NamedTuple):
    """A checkpoint that no rule keeps."""

    saved: SavedCheckpoint
    why: str
    bytes: int


class Judged(NamedTuple):
    going: list[Going]
    kept: int
    notes: list[str]
    """what was not judged, or not as its health says"""


def prune(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run directory.")],
    keep_last: Annotated[int | None, typer.Option("--keep-last", min=1, metavar="N", help="Good ones kept.")] = None,
    keep_every: Annotated[
        int | None,
        typer.Option("--keep-every", min=0, metavar="M", help="Keep those at multiples of this step; 0: none."),
    ] = None,
    powers: Annotated[
        bool | None, typer.Option("--powers/--no-powers", help="Keep one for every power of two behind the newest.")
    ] = None,
    keep_bad: Annotated[
        int | None, typer.Option("--keep-bad", min=0, metavar="N", help="Bad or quarantined ones kept for a look.")
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Believe that the newest good one is whole: do not read it first.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove what no rule keeps: branches the run has left first, then what newer good ones have overtaken.

    The rules are the run's own, [checkpoint] keep_*, where no option says otherwise. The newest good one is read whole
    first, and never removed, nor anything newer. Refused while the run is alive, which prunes for itself.
    Exit status: 0 done, or nothing to do; 1 something was not removed; 2 a person would have to be asked, and is not there.

    \b
    Examples:
      holdfast checkpoints prune runs/a --dry-run
      holdfast checkpoints prune runs/a --keep-last 1 --keep-every 10000 --yes
      holdfast checkpoints prune runs/a --no-powers --keep-bad 0 --yes --json
    """
    folder = run_at(run)
    rules = _rules(settings(folder), keep_last, keep_every, powers, keep_bad)
    if dry_run:
        judged = _judge(folder, rules, believe=no_verify, quiet=as_json)
        _finish(folder, rules, judged, [], [], as_json, dry_run=True)
        return
    with held(folder):  # a live run is refused before anything is asked
        judged = _judge(folder, rules, believe=no_verify, quiet=as_json)
    if not judged.going or not (yes or _agreed(judged, as_json)):
        _finish(folder, rules, judged, [], [], as_json, dry_run=not judged.going)
        if judged.going:
            raise typer.Exit(EXIT_NOT_DONE if _is_person(as_json) else EXIT_UNASKED)
        return
    with held(folder):  # not while it was asked: a run that is started meanwhile goes first
        again = _judge(folder, rules, believe=True, quiet=True)
        still = {g.saved.name for g in again.going}
        removed, failed = _remove(folder, [g for g in judged.going if g.saved.name in still])
    _finish(folder, rules, judged, removed, failed, as_json)
    if failed:
        raise typer.Exit(EXIT_NOT_DONE)


def _rules(
    config: dict[str, Any], keep_last: int | None, keep_every: int | None, powers: bool | None, keep_bad: int | None
) -> RetentionRules:
    """As typed; where nothing was, as the run had them; where that is not on record, the defaults."""
    default = CheckpointSection()

    def rule(typed: int | None, name: str) -> Any:
        known: Any = config.get(name)
        fits = type(known) is type(getattr(default, name)) and known >= 0
        return typed if typed is not None else known if fits else getattr(default, name)

    return RetentionRules(
        rule(keep_last, "keep_last"),
        rule(keep_every, "keep_every"),
        rule(powers, "keep_powers_of_two"),
        rule(keep_bad, "keep_bad"),
    )


# ---- judging


def _judge(folder: RunDir, rules: RetentionRules, *, believe: bool, quiet: bool) -> Judged:
    """What goes. A newest good one that does not verify is bad, and the next older one is looked at in its place."""
    found = survey(folder.path, lambda entry: None)
    notes: list[str] = []
    if found.lineage is None:
        return Judged([], len(found.entries), notes)
    entries = _own(found, notes)
    spoilt: set[str] = set()
    while True:
        saved = [_saved(e, e.name in spoilt) for e in entries.values()]
        good = [s for s in saved if s.health is Health.GOOD and found.lineage.holds(s.branch, s.step)]
        newest = max(good, key=lambda s: (s.step, s.branch), default=None)
        going = [
            Going(s, why, size_of(entries[s.name].path)) for s, why in select_for_deletion(saved, found.lineage, rules)
        ]
        if newest is None or believe or not going:
            return Judged(going, len(found.entries) - len(going), notes)
        results = verify.check([entries[newest.name].path], quiet=quiet)
        wrong = results[0].wrong if results else "it is gone"
        if wrong is None:
            return Judged(going, len(found.entries) - len(going), notes)
        spoilt.add(newest.name)
        notes.append(f"{newest.name} is marked good and is damaged, so it is not counted as good: {wrong}")


def _own(found: Survey, notes: list[str]) -> dict[str, CheckpointEntry]:
    """Those to be judged: of this run, and of no branch that nothing is known of."""
    assert found.lineage is not None
    entries: dict[str, CheckpointEntry] = {}
    for entry in found.entries:
        if entry.manifest is not None and found.run is not None and entry.manifest.run != found.run:
            notes.append(f"{entry.name} is of another run, and is left alone")
        elif entry.damage is not None and entry.branch > found.lineage.branch:
            notes.append(f"{entry.name} is damaged, and may be of the branch the run is on: it is left alone")
        else:
            entries[entry.name] = entry
    return entries


def _saved(entry: CheckpointEntry, spoilt: bool) -> SavedCheckpoint:
    return SavedCheckpoint(entry.name, entry.step, entry.branch, Health.BAD if spoilt else entry.health, entry.handover)


# ---- asking and doing


def _is_person(as_json: bool) -> bool:
    return not as_json and sys.stdin.isatty() and sys.stdout.isatty()


def _agreed(judged: Judged, as_json: bool) -> bool:
    if not _is_person(as_json):
        return False
    out = console()
    _show(out, judged)
    freed = decimal(sum(g.bytes for g in judged.going))
    return typer.confirm(f"remove {counted(len(judged.going), 'checkpoint')}, {freed}?")


def _remove(folder: RunDir, going: list[Going]) -> tuple[list[Going], list[tuple[Going, str]]]:
    """One by one, each in the journal before it goes."""
    removed: list[Going] = []
    failed: list[tuple[Going, str]] = []
    place = Folder(folder.path / CHECKPOINTS)
    with noting(folder) as log:
        for one in going:
            saved = one.saved
            log.write("checkpoint", durable=True, status="pruned", step=saved.step, name=saved.name, why=one.why, by=BY)
            try:
                place.remove(saved.name)
            except RunDirError as error:
                failed.append((one, str(error)))
            else:
                removed.append(one)
    return removed, failed


# ---- saying


def _finish(
    folder: RunDir,
    rules: RetentionRules,
    judged: Judged,
    removed: list[Going],
    failed: list[tuple[Going, str]],
    as_json: bool,
    *,
    dry_run: bool = False,
) -> None:
    if as_json:
        emit(_answer(folder, rules, judged, removed, failed, dry_run))
        return
    out = console()
    if dry_run or not _is_person(as_json):
        _show(out, judged)
    for one, why in failed:
        out.print(Text(f"{one.saved.name} was not removed: {clean(why)}", style="red"), soft_wrap=True)
    freed = decimal(sum(g.bytes for g in (removed or judged.going)))
    stay = f"{judged.kept + len(judged.going) - len(removed):,} stay"
    if not judged.going:
        said = f"nothing to remove: the rules keep all {judged.kept:,}" if judged.kept else "there are no checkpoints"
    elif dry_run:
        said = f"{counted(len(judged.going), 'checkpoint')} would go, {freed}; {judged.kept:,} would stay"
    elif removed:
        said = f"removed {counted(len(removed), 'checkpoint')}, {freed}; {stay}"
    else:
        said = f"nothing was removed; {stay}" + ("" if _is_person(as_json) else "; to remove them, say --yes")
    out.print(Text(said, style="bold"), soft_wrap=True)
    rule = (
        f"--keep-last {rules.keep_last} --keep-every {rules.keep_every} {'--powers' if rules.powers else '--no-powers'}"
    )
    out.print(Text(f"rules: {rule} --keep-bad {rules.keep_bad}", style="dim"), soft_wrap=True)


def _show(out: Console, judged: Judged) -> None:
    for note in judged.notes:
        out.print(Text(clean(note), style="yellow"), soft_wrap=True)
    if not judged.going:
        return
    table = Table(box=None, pad_edge=False, show_edge=False)
    for name in ("goes", "health", "size", "why"):
        table.add_column(name, no_wrap=name != "why", overflow="fold", justify="right" if name == "size" else "left")
    for going, why, size in judged.going:
        table.add_row(going.name, str(going.health), decimal(size), Text(clean(why)))
    out.print(table)


def _answer(
    folder: RunDir,
    rules: RetentionRules,
    judged: Judged,
    removed: list[Going],
    failed: list[tuple[Going, str]],
    dry_run: bool,
) -> dict[str, Any]:
    gone = {g.saved.name for g in removed}
    wrong = {g.saved.name: why for g, why in failed}
    return {
        "schema": SCHEMA,
        "ok": dry_run or (len(gone) == len(judged.going)),
        "path": str(folder.path),
        "dry_run": dry_run,
        "rules": rules._asdict(),
        "going": [
            {"name": g.saved.name, "step": g.saved.step, "branch": g.saved.branch, "health": str(g.saved.health),
             "bytes": g.bytes, "why": g.why, "removed": g.saved.name in gone, "error": wrong.get(g.saved.name)}
            for g in judged.going
        ],
        "bytes": sum(g.bytes for g in judged.going),
        "bytes_freed": sum(g.bytes for g in removed),
        "kept": judged.kept,
        "notes": judged.notes,
    }  # fmt: skip
