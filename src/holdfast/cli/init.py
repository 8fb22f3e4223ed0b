"""`holdfast init`: writes the default policy, with a comment for every key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.output import Json, emit
from holdfast.core.base.config import template
from holdfast.core.base.errors import HoldfastError, RunDirError
from holdfast.core.record.rundir import write_atomically


def init(
    path: Annotated[str, typer.Argument(metavar="PATH", help="The file to write; - for stdout.")] = "holdfast.toml",
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Write a policy file with all keys, defaults and meanings.

    \b
    Examples:
      holdfast init                        write holdfast.toml here
      holdfast init configs/run.toml       write it elsewhere
      holdfast init --force                replace an existing file
      holdfast init - | less               print it
    """
    if path == "-":
        if as_json:
            emit({"ok": True, "path": "-", "text": template()})
        else:
            typer.echo(template(), nl=False)
        return
    target = Path(path)
    replaced = os.path.lexists(target)
    _check_target(target, force)
    try:
        write_atomically(target, template())
    except RunDirError as error:
        raise HoldfastError(f"{error}; choose another path, or `holdfast init -` to print it") from None
    if as_json:
        emit({"ok": True, "path": str(target), "replaced": replaced})
    else:
        typer.echo(f"{'replaced' if replaced else 'wrote'} {target}; every key in it is optional")


def _check_target(target: Path, force: bool) -> None:
    """Raise HoldfastError if writing would fail or would replace a file without --force."""
    if target.is_dir():
        raise HoldfastError(f"{target} is a folder; name a file in it: holdfast init {target / 'holdfast.toml'}")
    if os.path.lexists(target) and not force:
        raise HoldfastError(f"{target} exists; replace it with --force, or name another path")
    if not target.parent.exists():
        raise HoldfastError(f"{target} cannot be written: no folder {target.parent}; make it: mkdir -p {target.parent}")
