"""`holdfast checkpoints verify`: every byte of a checkpoint is what was saved, or what is wrong with it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from holdfast.cli.output import Json, emit
from holdfast.cli.places import BY, console, counted, held, home_of, is_checkpoint, noting, run_at, size_of
from holdfast.core.base.errors import RunDirError
from holdfast.core.base.types import Health
from holdfast.core.checkpoints import verify as checking
from holdfast.core.checkpoints.entry import CheckpointEntry, read_entry
from holdfast.core.checkpoints.folder import Folder
from holdfast.core.checkpoints.resume import CHECKPOINTS
from holdfast.core.record.rundir import RunDir
from holdfast.reports.clean import clean

SCHEMA = "holdfast.checkpoints.verify/1"
EXIT_DAMAGED = 1
EXIT_NOTHING = 3


class Result(NamedTuple):
    path: Path
    wrong: str | None
    """what; None where every byte is as it was saved"""
    bytes: int
    health: str | None
    """as its health.json says; None where that cannot be believed"""
    marked: bool = False


def verify(
    paths: Annotated[list[str], typer.Argument(metavar="RUN|CHECKPOINT...", help="Run directories, or checkpoints.")],
    every: Annotated[
        bool, typer.Option("--all", help="Also those of a run that are marked bad or quarantined already.")
    ] = False,
    mark: Annotated[
        bool, typer.Option("--mark", help="Mark what is damaged as bad. Refused while the run is alive.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Read every byte of checkpoints and compare it with what was saved; say of each what is wrong.

    Without --mark nothing is changed, and a live run may go on meanwhile.
    Exit status: 0 all are whole; 1 something is damaged; 3 there was nothing to verify.

    \b
    Examples:
      holdfast checkpoints verify runs/a
      holdfast checkpoints verify runs/a/checkpoints/step_00001000
      holdfast checkpoints verify runs/a runs/b --all --json
      holdfast checkpoints verify runs/a --mark
    """
    targets, skipped = _targets(paths, every)
    with contextlib.ExitStack() as stack:
        homes = _homes(targets) if mark else {}
        for home in homes.values():
            stack.enter_context(held(home))
        results = check(targets, quiet=as_json)
        if mark:
            results = [_marked(result, homes) for result in results]
    damaged = sum(r.wrong is not None for r in results)
    if as_json:
        emit(_answer(results, skipped))
    else:
        _tell(results, skipped)
    if damaged or not results:
        raise typer.Exit(EXIT_DAMAGED if damaged else EXIT_NOTHING)


def _targets(paths: list[str], every: bool) -> tuple[list[Path], int]:
    """The folders to read, each once, and how many were left out as they are known to be no good."""
    found: dict[Path, None] = {}
    skipped = 0
    for text in paths:
        path = Path(text)
        if path.is_dir() and is_checkpoint(path):
            found[path.resolve()] = None
            continue
        if not path.exists() and is_checkpoint(path):
            raise RunDirError(f"{clean(text)}: no such checkpoint; see holdfast checkpoints ls RUN")
        entries = Folder(run_at(text).path / CHECKPOINTS).entries()
        wanted = [e for e in entries if every or e.damage is not None or e.health in (Health.GOOD, Health.CANDIDATE)]
        skipped += len(entries) - len(wanted)
        found |= {e.path: None for e in reversed(wanted)}
    return list(found), skipped


def _homes(targets: list[Path]) -> dict[Path, RunDir]:
    """The run directories whose checkpoints may be marked."""
    homes: dict[Path, RunDir] = {}
    for path in targets:
        home = home_of(path)
        if home is None:
            raise RunDirError(f"{clean(str(path))} is not in a run directory's {CHECKPOINTS}: verify it without --mark")
        homes[home.path] = home
    return homes


def check(targets: list[Path], *, quiet: bool = False) -> list[Result]:
    """Each in turn, with a bar on a terminal. One that a live run removes meanwhile is left out of the results."""
    errors = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        console=errors, transient=True, disable=quiet or not errors.is_terminal,
    )  # fmt: skip
    entries = {path: read_entry(path) for path in targets}
    results: list[Result] = []
    with bar:
        task = bar.add_task("verifying", total=sum(_length(entry) for entry in entries.values()))
        done = 0
        for path, entry in entries.items():
            bar.update(task, description=path.name)
            wrong = checking.verify(path, progress=_follow(bar, task, done))
            done += _length(entry)
            bar.update(task, completed=done)
            if os.path.lexists(path):
                health = None if entry is None or entry.damage is not None else str(entry.health)
                results.append(Result(path, wrong, size_of(path), health))
    return results


def _length(entry: CheckpointEntry | None) -> int:
    return 0 if entry is None or entry.manifest is None else sum(f.bytes for f in entry.manifest.files.values())


def _follow(bar: Progress, task: Any, before: int) -> Callable[[int, int], None]:
    return lambda done, total: bar.update(task, completed=before + done)


def _marked(result: Result, homes: dict[Path, RunDir]) -> Result:
    """Where it is damaged and its small files are whole, so that it can be said there; in the journal first."""
    entry = read_entry(result.path)
    if result.wrong is None or entry is None or entry.damage is not None or entry.health is Health.BAD:
        return result
    home = home_of(result.path)
    assert home is not None and home.path in homes, "it is held"
    with noting(home) as log:
        log.write(
            "checkpoint",
            durable=True,
            status=str(Health.BAD),
            step=entry.step,
            name=entry.name,
            why=result.wrong,
            by=BY,
        )
    Folder(home.path / CHECKPOINTS).mark(entry.name, Health.BAD, result.wrong, time.time())
    return result._replace(marked=True, health=str(Health.BAD))


def _tell(results: list[Result], skipped: int) -> None:
    out = console()
    several = len({r.path.parent for r in results}) > 1
    names = [clean(str(r.path) if several else r.path.name) for r in results]
    width = max(map(len, names), default=0)
    for name, result in zip(names, results, strict=True):
        good = result.wrong is None
        line = Text("✓ " if good else "✗ ", style="green" if good else "red")
        said = "ok" if good else clean(result.wrong or "") + (" (marked bad)" if result.marked else "")
        line.append(f"{name:<{width}}  {decimal(result.bytes):>8}  {said}", style="default")
        out.print(line, soft_wrap=True)
    out.print(_sum(results, skipped), soft_wrap=True)


def _sum(results: list[Result], skipped: int) -> Text:
    damaged = sum(r.wrong is not None for r in results)
    left = f"; {counted(skipped, 'other')} marked bad or quarantined not read: see --all" if skipped else ""
    number = counted(len(results), "checkpoint")
    if not results:
        return Text(f"nothing to verify: no checkpoints{left}", style="yellow")
    if damaged:
        return Text(f"{damaged:,} of {number} damaged{left}", style="bold red")
    whole = "it is whole" if len(results) == 1 else "all are whole"
    return Text(f"{number}, {decimal(sum(r.bytes for r in results))}: {whole}{left}", style="bold green")


def _answer(results: list[Result], skipped: int) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "ok": bool(results) and all(r.wrong is None for r in results),
        "checkpoints": [
            {"name": r.path.name, "path": str(r.path), "ok": r.wrong is None, "wrong": r.wrong, "bytes": r.bytes,
             "health": r.health, "marked": r.marked}
            for r in results
        ],
        "damaged": sum(r.wrong is not None for r in results),
        "not_read": skipped,
    }  # fmt: skip
