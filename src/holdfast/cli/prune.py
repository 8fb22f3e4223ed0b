"""`holdfast checkpoints prune`: removes the checkpoints that no retention rule keeps, as the run itself would."""

from __future__ import annotations

import sys
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from holdfast.cli import verify
from holdfast.cli.output import Json, emit, format_count
from holdfast.cli.run_paths import (
    WRITER,
    checkpoint_bytes,
    checkpoint_folder,
    checkpoint_settings,
    find_run,
    lock,
    open_journal,
)
from holdfast.core.base.clean import clean
from holdfast.core.base.config import CheckpointSection
from holdfast.core.base.errors import RunDirError
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.entry import CheckpointEntry
from holdfast.core.checkpoints.resume import Survey, survey
from holdfast.core.checkpoints.retention import RetentionRules, SavedCheckpoint, select_for_deletion
from holdfast.core.record.rundir import RunDir
from holdfast.reports.console import console

SCHEMA = "holdfast.checkpoints.prune/1"
EXIT_NOT_DONE = 1
EXIT_UNASKED = 2


class Removal(NamedTuple):
    """A checkpoint that no rule keeps."""

    saved: SavedCheckpoint
    why: str
    bytes: int


class PrunePlan(NamedTuple):
    """Holds what would be removed."""

    removals: list[Removal]
    kept: int
    notes: list[str]
    """checkpoints that were left alone, or whose recorded health is wrong"""


def prune(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run directory.")],
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", min=1, metavar="N", help="Keep the newest N good ones.")
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option("--keep-every", min=0, metavar="M", help="Keep those at multiples of step M; 0: none."),
    ] = None,
    powers: Annotated[
        bool | None, typer.Option("--powers/--no-powers", help="Keep one for every power of two behind the newest.")
    ] = None,
    keep_bad: Annotated[
        int | None, typer.Option("--keep-bad", min=0, metavar="N", help="Keep N bad or quarantined ones to inspect.")
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not verify the newest good one before removing others.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed; remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove the checkpoints that no rule keeps.

    Abandoned branches go first, then those that newer good ones replace.
    Options override the run's own rules, [checkpoint] keep_*. The newest good checkpoint is verified first and never
    removed, nor is anything newer. Refused while the run is alive, which prunes by itself.
    Exit status: 0 done, or nothing to do; 1 something was not removed; 2 --yes is needed: there is no terminal to ask on.

    \b
    Examples:
      holdfast checkpoints prune runs/a --dry-run
      holdfast checkpoints prune runs/a --keep-last 1 --keep-every 10000 --yes
      holdfast checkpoints prune runs/a --no-powers --keep-bad 0 --yes --json
    """
    folder = find_run(run)
    rules = _resolve_rules(checkpoint_settings(folder), keep_last, keep_every, powers, keep_bad)
    if dry_run:
        plan = _plan(folder, rules, trust=no_verify, quiet=as_json)
        _report(folder, rules, plan, [], [], as_json, dry_run=True)
        return
    with lock(folder):  # refuse a live run before asking
        plan = _plan(folder, rules, trust=no_verify, quiet=as_json)
    if not plan.removals or not (yes or _confirm(plan, as_json)):
        _report(folder, rules, plan, [], [], as_json, dry_run=not plan.removals)
        if plan.removals:
            raise typer.Exit(EXIT_NOT_DONE if _can_ask(as_json) else EXIT_UNASKED)
        return
    with lock(folder):  # released while asking, so that the run may start meanwhile
        still_due = {r.saved.name for r in _plan(folder, rules, trust=True, quiet=True).removals}
        removed, failed = _remove(folder, [r for r in plan.removals if r.saved.name in still_due])
    _report(folder, rules, plan, removed, failed, as_json)
    if failed:
        raise typer.Exit(EXIT_NOT_DONE)


def _resolve_rules(
    config: dict[str, Any], keep_last: int | None, keep_every: int | None, powers: bool | None, keep_bad: int | None
) -> RetentionRules:
    """Return each rule from the options, else from the run's record, else the default."""
    default = CheckpointSection()

    def resolve(option: int | None, name: str) -> Any:
        recorded: Any = config.get(name)
        is_valid = type(recorded) is type(getattr(default, name)) and recorded >= 0
        return option if option is not None else recorded if is_valid else getattr(default, name)

    return RetentionRules(
        resolve(keep_last, "keep_last"),
        resolve(keep_every, "keep_every"),
        resolve(powers, "keep_powers_of_two"),
        resolve(keep_bad, "keep_bad"),
    )


def _plan(folder: RunDir, rules: RetentionRules, *, trust: bool, quiet: bool) -> PrunePlan:
    """Return what to remove. If the newest good checkpoint does not verify, treat it as bad and try the next older."""
    surveyed = survey(folder.path, lambda entry: None)
    notes: list[str] = []
    if surveyed.lineage is None:
        return PrunePlan([], len(surveyed.entries), notes)
    entries = _prunable(surveyed, notes)
    damaged: set[str] = set()
    while True:
        saved = [
            SavedCheckpoint(e.name, e.step, e.branch, Health.BAD if e.name in damaged else e.health, e.handover)
            for e in entries.values()
        ]
        good = [s for s in saved if s.health is Health.GOOD and surveyed.lineage.holds(s.branch, s.step)]
        newest = max(good, key=lambda s: (s.step, s.branch), default=None)
        removals = [
            Removal(s, why, checkpoint_bytes(entries[s.name].path))
            for s, why in select_for_deletion(saved, surveyed.lineage, rules)
        ]
        damage = None
        if newest is not None and removals and not trust:
            results = verify.check([entries[newest.name].path], quiet=quiet)
            damage = results[0].damage if results else "it is gone"
        if newest is None or damage is None:
            return PrunePlan(removals, len(surveyed.entries) - len(removals), notes)
        damaged.add(newest.name)
        notes.append(f"{newest.name} is marked good but damaged, and does not count as good: {damage}")


def _prunable(surveyed: Survey, notes: list[str]) -> dict[str, CheckpointEntry]:
    """Return the checkpoints of this run and of known branches; note the others."""
    assert surveyed.lineage is not None
    entries: dict[str, CheckpointEntry] = {}
    for entry in surveyed.entries:
        if entry.manifest is not None and surveyed.run is not None and entry.manifest.run != surveyed.run:
            notes.append(f"{entry.name} belongs to another run and is left alone")
        elif entry.damage is not None and entry.branch > surveyed.lineage.branch:
            notes.append(f"{entry.name} is damaged, but may be of the run's current branch: it is left alone")
        else:
            entries[entry.name] = entry
    return entries


def _can_ask(as_json: bool) -> bool:
    return not as_json and sys.stdin.isatty() and sys.stdout.isatty()


def _confirm(plan: PrunePlan, as_json: bool) -> bool:
    if not _can_ask(as_json):
        return False
    _print_plan(console(), plan)
    freed = decimal(sum(r.bytes for r in plan.removals))
    return typer.confirm(f"remove {format_count(len(plan.removals), 'checkpoint')}, {freed}?")


def _remove(folder: RunDir, removals: list[Removal]) -> tuple[list[Removal], list[tuple[Removal, str]]]:
    """Journal and remove each checkpoint; return those removed, and those that failed with the reason."""
    removed: list[Removal] = []
    failed: list[tuple[Removal, str]] = []
    checkpoints = checkpoint_folder(folder)
    with open_journal(folder) as log:
        for removal in removals:
            step, name = removal.saved.step, removal.saved.name
            log.write("checkpoint", durable=True, status="pruned", step=step, name=name, why=removal.why, by=WRITER)
            try:
                checkpoints.remove(name)
            except RunDirError as error:
                failed.append((removal, str(error)))
            else:
                removed.append(removal)
    return removed, failed


def _report(
    folder: RunDir, rules: RetentionRules, plan: PrunePlan, removed: list[Removal], failed: list[tuple[Removal, str]],
    as_json: bool, *, dry_run: bool = False,
) -> None:  # fmt: skip
    if as_json:
        emit(_to_json(folder, rules, plan, removed, failed, dry_run))
        return
    out = console()
    if dry_run or not _can_ask(as_json):
        _print_plan(out, plan)
    for removal, why in failed:
        out.print(Text(f"{removal.saved.name} was not removed: {clean(why)}", style="red"), soft_wrap=True)
    freed = decimal(sum(r.bytes for r in (removed or plan.removals)))
    kept = f"kept {plan.kept + len(plan.removals) - len(removed):,}"
    if not plan.removals:
        text = f"nothing to remove: the rules keep all {plan.kept:,}" if plan.kept else "there are no checkpoints"
    elif dry_run:
        text = f"would remove {format_count(len(plan.removals), 'checkpoint')}, {freed}, and keep {plan.kept:,}"
    elif removed:
        text = f"removed {format_count(len(removed), 'checkpoint')}, {freed}; {kept}"
    else:
        text = f"nothing was removed; {kept}" + ("" if _can_ask(as_json) else "; to remove them, add --yes")
    out.print(Text(text, style="bold"), soft_wrap=True)
    powers = "--powers" if rules.powers else "--no-powers"
    options = f"--keep-last {rules.keep_last} --keep-every {rules.keep_every} {powers} --keep-bad {rules.keep_bad}"
    out.print(Text(f"rules: {options}", style="dim"), soft_wrap=True)


def _print_plan(out: Console, plan: PrunePlan) -> None:
    for note in plan.notes:
        out.print(Text(clean(note), style="yellow"), soft_wrap=True)
    if not plan.removals:
        return
    table = Table(box=None, pad_edge=False, show_edge=False)
    for name in ("remove", "health", "size", "why"):
        table.add_column(name, no_wrap=name != "why", overflow="fold", justify="right" if name == "size" else "left")
    for saved, why, size in plan.removals:
        table.add_row(saved.name, str(saved.health), decimal(size), Text(clean(why)))
    out.print(table)


def _to_json(
    folder: RunDir, rules: RetentionRules, plan: PrunePlan, removed: list[Removal], failed: list[tuple[Removal, str]],
    dry_run: bool,
) -> dict[str, Any]:  # fmt: skip
    gone = {r.saved.name for r in removed}
    errors = {r.saved.name: why for r, why in failed}
    return {
        "schema": SCHEMA,
        "ok": dry_run or (len(gone) == len(plan.removals)),
        "path": str(folder.path),
        "dry_run": dry_run,
        "rules": rules._asdict(),
        "going": [
            {"name": r.saved.name, "step": r.saved.step, "branch": r.saved.branch, "health": str(r.saved.health),
             "bytes": r.bytes, "why": r.why, "removed": r.saved.name in gone, "error": errors.get(r.saved.name)}
            for r in plan.removals
        ],
        "bytes": sum(r.bytes for r in plan.removals),
        "bytes_freed": sum(r.bytes for r in removed),
        "kept": plan.kept,
        "notes": plan.notes,
    }  # fmt: skip
