"""`holdfast checkpoints`: lists, verifies, prunes and exports checkpoints, and prints the one that a resume would use."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli import checkpoint_list, export, prune, verify
from holdfast.cli.checked_command import CheckedCommand
from holdfast.cli.output import Json, echo, emit
from holdfast.cli.run_paths import checkpoint_settings, find_run, is_run, unfinished_checkpoints
from holdfast.core.base.clean import clean
from holdfast.core.base.errors import RunDirError
from holdfast.core.checkpoints.resume import resolve_resume_path, survey
from holdfast.core.checkpoints.verify import verify as verify_bytes
from holdfast.core.record.rundir import RunDir
from holdfast.reports.console import console

EXIT_NOTHING = verify.EXIT_NOTHING

app = typer.Typer(name="checkpoints", add_completion=False, rich_markup_mode=None)
app.command(cls=CheckedCommand)(verify.verify)
app.command(cls=CheckedCommand)(prune.prune)
app.command(cls=CheckedCommand)(export.export)


@app.callback(invoke_without_command=True)
def checkpoints(context: typer.Context) -> None:
    """List, verify, prune and export the checkpoints of a run.

    Only export needs torch. Only prune and verify --mark change anything; the others work while the run is alive.

    \b
    Examples:
      holdfast checkpoints ls runs/a
      holdfast checkpoints verify runs/a
      holdfast checkpoints prune runs/a --dry-run
      holdfast checkpoints resume-path runs/a
      holdfast checkpoints export runs/a --format safetensors
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("ls", cls=CheckedCommand)
def list_checkpoints(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run directory.")],
    as_json: Json = False,
) -> None:
    """List the checkpoints of a run, newest first.

    Shows health, size and branch, and marks the one that a resume would use.
    Reads only the small files of each. To read every byte: `holdfast checkpoints verify`.

    \b
    Examples:
      holdfast checkpoints ls runs/a
      holdfast checkpoints ls runs/a --json
    """
    folder = find_run(run)
    surveyed = survey(folder.path, lambda entry: verify_bytes(entry, contents=False))
    unfinished = unfinished_checkpoints(folder)
    if as_json:
        emit(checkpoint_list.to_json(surveyed, folder.path, unfinished))
    else:
        checkpoint_list.print_list(console(), surveyed, Path(run), checkpoint_settings(folder), unfinished)


@app.command("resume-path", cls=CheckedCommand)
def resume_path(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run directory.")],
    load_path: Annotated[
        str | None,
        typer.Option(
            "--load-path", metavar="PATH", help="Use this checkpoint, or this run's newest good one, instead."
        ),
    ] = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Trust the manifest: do not read every byte.")] = False,
    as_json: Json = False,
) -> None:
    """Print the checkpoint that a resume would use.

    The path is on stdout, the reasons are on stderr.
    Exit status: 0 with a path; 3 if the run would start from the beginning, also if RUN does not exist;
    1 if no checkpoint can be trusted, or if RUN is not a run directory.

    \b
    Examples:
      holdfast checkpoints resume-path runs/a
      python train.py --resume "$(holdfast checkpoints resume-path runs/a)"
      holdfast checkpoints resume-path runs/b --load-path runs/a
      holdfast checkpoints resume-path runs/a --json
    """
    home = Path(run) if _is_new_run(Path(run)) else find_run(run).path
    with _captured_log() as messages:
        checkpoint = resolve_resume_path(home, load_path, verify=not no_verify)
    if checkpoint is None and not messages:
        messages.append(f"{clean(run)} has no checkpoints: the run starts from the beginning")
    for message in messages:
        echo(message, err=True)
    path = None if checkpoint is None else os.path.abspath(checkpoint)
    if as_json:
        emit({"schema": "holdfast.checkpoints.resume-path/1", "ok": True, "path": path, "said": messages})
    elif path is not None and clean(path) != path:
        raise RunDirError(f"{path!r} holds characters that cannot be shown; --json prints it escaped")
    elif path is not None:
        echo(path)
    if path is None:
        raise typer.Exit(EXIT_NOTHING)


def _is_new_run(path: Path) -> bool:
    """Return True if the path is missing or an empty folder, which a first start would fill."""
    return not path.exists() or (path.is_dir() and not is_run(RunDir(path)) and not any(path.iterdir()))


@contextlib.contextmanager
def _captured_log() -> Iterator[list[str]]:
    """Collect holdfast's log messages, INFO and above, instead of logging them."""
    log, handler = logging.getLogger("holdfast"), _ListHandler()
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield handler.messages
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


class _ListHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
