"""`holdfast checkpoints`: what a run has saved, whether it is whole, what may go, and what a resume would take."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli import listing, prune, verify
from holdfast.cli.output import Json, emit
from holdfast.cli.places import console, in_the_making, is_run, run_at, settings
from holdfast.core.checkpoints.entry import CheckpointEntry
from holdfast.core.checkpoints.resume import resolve_resume_path, survey
from holdfast.core.checkpoints.verify import verify as verify_bytes
from holdfast.core.record.rundir import RunDir
from holdfast.reports.clean import clean

EXIT_NOTHING = verify.EXIT_NOTHING

app = typer.Typer(name="checkpoints", add_completion=False, rich_markup_mode=None)
app.command()(verify.verify)
app.command()(prune.prune)


@app.callback(invoke_without_command=True)
def checkpoints(context: typer.Context) -> None:
    """What a run has saved: list it, verify it, prune it, and say what a resume would take.

    None of it needs torch; all but prune and verify --mark change nothing, and work while the run is alive.

    \b
    Examples:
      holdfast checkpoints ls runs/a
      holdfast checkpoints verify runs/a
      holdfast checkpoints prune runs/a --dry-run
      holdfast checkpoints resume-path runs/a
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("ls")
def list_them(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run directory.")],
    as_json: Json = False,
) -> None:
    """List the checkpoints of a run, newest first: health, size, branch, and which one a resume would take.

    Reads the small files of each, not the tensors: see `holdfast checkpoints verify`.

    \b
    Examples:
      holdfast checkpoints ls runs/a
      holdfast checkpoints ls runs/a --json
    """
    folder = run_at(run)
    found = survey(folder.path, _by_small_files)
    making = in_the_making(folder)
    if as_json:
        emit(listing.answer(found, folder.path, making))
    else:
        listing.tell(console(), found, Path(run), settings(folder), making)


def _by_small_files(entry: CheckpointEntry) -> str | None:
    return verify_bytes(entry, contents=False)


@app.command("resume-path")
def resume_path(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run directory.")],
    load_path: Annotated[
        str | None,
        typer.Option(
            "--load-path", metavar="PATH", help="This checkpoint, or the newest good one of this run, instead."
        ),
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Believe the manifest: do not read every byte.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the checkpoint that a start of the run would go on from: its path on stdout, the reasons on stderr.

    Exit status: 0 with a path; 3 where there is none and the run would begin, so also where RUN is not there yet;
    1 where there are some and none can be trusted, or RUN is not a run directory.

    \b
    Examples:
      holdfast checkpoints resume-path runs/a
      python train.py --resume "$(holdfast checkpoints resume-path runs/a)"
      holdfast checkpoints resume-path runs/b --load-path runs/a
      holdfast checkpoints resume-path runs/a --json
    """
    home = Path(run) if _is_new(run) else run_at(run).path
    with _told() as said:
        found = resolve_resume_path(home, load_path, verify=not no_verify)
    if found is None and not said:
        said.append(f"{clean(run)} has no checkpoints: the run begins")
    for message in said:
        typer.echo("\n".join(clean(line) for line in message.split("\n")), err=True)
    path = None if found is None else os.path.abspath(found)
    if as_json:
        emit({"schema": "holdfast.checkpoints.resume-path/1", "ok": True, "path": path, "said": said})
    elif path is not None:
        typer.echo(path)
    if path is None:
        raise typer.Exit(EXIT_NOTHING)


def _is_new(run: str) -> bool:
    """Whether it is a run directory that a first start would make, or fill."""
    path = Path(run)
    return not path.exists() or (path.is_dir() and not is_run(RunDir(path)) and not any(path.iterdir()))


@contextlib.contextmanager
def _told() -> Iterator[list[str]]:
    """What is logged meanwhile, instead of where it would go."""
    log, messages = logging.getLogger("holdfast"), _Messages()
    level, propagate = log.level, log.propagate
    log.addHandler(messages)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield messages.said
    finally:
        log.removeHandler(messages)
        log.setLevel(level)
        log.propagate = propagate


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
