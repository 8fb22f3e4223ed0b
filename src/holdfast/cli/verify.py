"""`holdfast checkpoints verify`: compares every byte of a checkpoint with its recorded checksums."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from holdfast.cli.output import Json, emit, format_count
from holdfast.cli.run_paths import (
    WRITER,
    checkpoint_bytes,
    checkpoint_folder,
    find_run,
    is_checkpoint,
    lock,
    open_journal,
    run_of,
)
from holdfast.core.base.clean import clean
from holdfast.core.base.errors import RunDirError
from holdfast.core.base.types import Health
from holdfast.core.checkpoints import verify as checking
from holdfast.core.checkpoints.entry import CheckpointEntry, read_entry
from holdfast.core.checkpoints.folder import Folder
from holdfast.core.checkpoints.resume import CHECKPOINTS
from holdfast.core.record.rundir import RunDir
from holdfast.reports.console import console

SCHEMA = "holdfast.checkpoints.verify/1"
EXIT_DAMAGED = 1
EXIT_NOTHING = 3


class VerifiedCheckpoint(NamedTuple):
    """Holds what verification found out about one checkpoint."""

    path: Path
    damage: str | None
    """None if every byte is as saved"""
    bytes: int
    health: str | None
    """from its health.json, or None if that cannot be trusted"""
    is_marked: bool = False


def verify(
    paths: Annotated[list[str], typer.Argument(metavar="RUN|CHECKPOINT...", help="Run directories, or checkpoints.")],
    every: Annotated[
        bool, typer.Option("--all", help="Include checkpoints of a run that are already marked bad or quarantined.")
    ] = False,
    mark: Annotated[
        bool, typer.Option("--mark", help="Mark damaged checkpoints as bad. Refused while the run is alive.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare every byte of checkpoints with their checksums.

    Without --mark this changes nothing and works while the run is alive.
    Exit status: 0 all are intact; 1 at least one is damaged; 3 there was nothing to verify.

    \b
    Examples:
      holdfast checkpoints verify runs/a
      holdfast checkpoints verify runs/a/checkpoints/step_00001000
      holdfast checkpoints verify runs/a runs/b --all --json
      holdfast checkpoints verify runs/a --mark
    """
    targets, skipped = _find_targets(paths, every)
    with contextlib.ExitStack() as stack:
        if mark:
            for run in _runs_of(targets):
                stack.enter_context(lock(run))
        results = check(list(targets), quiet=as_json)
        if mark:
            results = [_mark_if_damaged(result, targets[result.path]) for result in results]
    damaged = sum(r.damage is not None for r in results)
    if as_json:
        emit(_to_json(results, skipped))
    else:
        _print_results(results, skipped)
    if damaged or not results:
        raise typer.Exit(EXIT_DAMAGED if damaged else EXIT_NOTHING)


def _find_targets(paths: list[str], every: bool) -> tuple[dict[Path, RunDir | None], int]:
    """Return the checkpoints to read with their runs, and the number skipped because they are known to be unusable."""
    targets: dict[Path, RunDir | None] = {}
    skipped = 0
    for text in paths:
        path = Path(text)
        if path.is_dir() and is_checkpoint(path):
            targets[path.resolve()] = run_of(path)
            continue
        if not path.exists() and is_checkpoint(path):
            raise RunDirError(f"{clean(text)}: no such checkpoint; list them with: holdfast checkpoints ls RUN")
        run = find_run(text)
        entries = Folder(run.path / CHECKPOINTS).entries()
        wanted = [e for e in entries if every or e.damage is not None or e.health in (Health.GOOD, Health.CANDIDATE)]
        skipped += len(entries) - len(wanted)
        targets |= {e.path: run for e in reversed(wanted)}
    return targets, skipped


def _runs_of(targets: dict[Path, RunDir | None]) -> list[RunDir]:
    """Return the runs of the checkpoints, each once; raise RunDirError for a checkpoint outside a run."""
    runs: dict[Path, RunDir] = {}
    for path, run in targets.items():
        if run is None:
            raise RunDirError(f"{clean(str(path))} is not in a run directory's {CHECKPOINTS}: verify it without --mark")
        runs.setdefault(run.path, run)
    return list(runs.values())


def check(targets: list[Path], *, quiet: bool = False) -> list[VerifiedCheckpoint]:
    """Verify each checkpoint, with a progress bar on a terminal. Leave out those that a live run removes meanwhile."""
    bar = progress_bar(quiet)
    entries = {path: read_entry(path) for path in targets}
    results: list[VerifiedCheckpoint] = []
    with bar:
        task = bar.add_task("verifying", total=sum(_data_bytes(entry) for entry in entries.values()))
        done = 0
        for path, entry in entries.items():
            bar.update(task, description=path.name)
            damage = checking.verify(path, progress=_progress_callback(bar, task, done))
            done += _data_bytes(entry)
            bar.update(task, completed=done)
            if os.path.lexists(path):
                health = None if entry is None or entry.damage is not None else str(entry.health)
                results.append(VerifiedCheckpoint(path, damage, checkpoint_bytes(path), health))
    return results


def progress_bar(quiet: bool) -> Progress:
    """Return a progress bar in bytes, which is shown on a terminal only."""
    errors = console(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(), console=errors, transient=True, disable=quiet or not errors.is_terminal,
    )  # fmt: skip


def _data_bytes(entry: CheckpointEntry | None) -> int:
    return 0 if entry is None or entry.manifest is None else sum(f.bytes for f in entry.manifest.files.values())


def _progress_callback(bar: Progress, task: Any, before: int) -> Callable[[int, int], None]:
    return lambda done, total: bar.update(task, completed=before + done)


def _mark_if_damaged(result: VerifiedCheckpoint, run: RunDir | None) -> VerifiedCheckpoint:
    """Mark a damaged checkpoint as bad, first in the journal, if its own small files are intact."""
    entry = read_entry(result.path)
    if result.damage is None or entry is None or entry.damage is not None or entry.health is Health.BAD:
        return result
    assert run is not None, "_runs_of has checked this"
    bad = str(Health.BAD)
    with open_journal(run) as log:
        log.write(
            "checkpoint", durable=True, status=bad, step=entry.step, name=entry.name, why=result.damage, by=WRITER
        )
    checkpoint_folder(run).mark(entry.name, Health.BAD, result.damage, time.time())
    return result._replace(is_marked=True, health=bad)


def _print_results(results: list[VerifiedCheckpoint], skipped: int) -> None:
    out = console()
    show_paths = len({r.path.parent for r in results}) > 1
    names = [clean(str(r.path) if show_paths else r.path.name) for r in results]
    width = max(map(len, names), default=0)
    for name, result in zip(names, results, strict=True):
        line = Text("✓ ", style="green") if result.damage is None else Text("✗ ", style="red")
        verdict = (
            "ok" if result.damage is None else clean(result.damage) + (" (marked bad)" if result.is_marked else "")
        )
        line.append(f"{name:<{width}}  {decimal(result.bytes):>8}  {verdict}", style="default")
        out.print(line, soft_wrap=True)
    out.print(_format_total(results, skipped), soft_wrap=True)


def _format_total(results: list[VerifiedCheckpoint], skipped: int) -> Text:
    damaged = sum(r.damage is not None for r in results)
    others = f"; skipped {format_count(skipped, 'other')} marked bad or quarantined: see --all" if skipped else ""
    count = format_count(len(results), "checkpoint")
    if not results:
        return Text(f"nothing to verify: no checkpoints{others}", style="yellow")
    if damaged:
        return Text(f"{damaged:,} of {count} damaged{others}", style="bold red")
    return Text(f"{count}, {decimal(sum(r.bytes for r in results))}: all intact{others}", style="bold green")


def _to_json(results: list[VerifiedCheckpoint], skipped: int) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "ok": bool(results) and all(r.damage is None for r in results),
        "checkpoints": [
            {"name": r.path.name, "path": str(r.path), "ok": r.damage is None, "wrong": r.damage, "bytes": r.bytes,
             "health": r.health, "marked": r.is_marked}
            for r in results
        ],
        "damaged": sum(r.damage is not None for r in results),
        "not_read": skipped,
    }  # fmt: skip
