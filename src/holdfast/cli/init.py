"""`holdfast init`: writes the default policy with a comment for every key, or a script that starts a training."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.checked_command import CheckedCommand
from holdfast.cli.launch_scripts import SLURM_FILE, TORCHRUN_FILE, Launch, slurm_script, torchrun_script
from holdfast.cli.output import Json, echo, emit
from holdfast.core.base.config import template
from holdfast.core.base.errors import HoldfastError, RunDirError
from holdfast.core.record.rundir import write_atomically

POLICY_FILE = "holdfast.toml"
_COMMAND = "holdfast.command"


class InitCommand(CheckedCommand):
    """Takes what follows `--` as the command to start: typer would take its first word for PATH."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[_COMMAND] = args[end + 1 :]
        return super().parse_args(ctx, args[:end])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND ...]"]


def init(
    context: typer.Context,
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="PATH",
            help=f"The file to write; - for stdout. Default: {POLICY_FILE}, {SLURM_FILE} or {TORCHRUN_FILE}.",
            show_default=False,
        ),
    ] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Write a batch script that saves and requeues on a signal.")
    ] = False,
    torchrun: Annotated[bool, typer.Option("--torchrun", help="Write the same for torchrun without Slurm.")] = False,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Nodes.")] = 1,
    gpus: Annotated[int, typer.Option("--gpus", min=0, help="GPUs per node; 0 to train on CPUs.")] = 1,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, help="Processes per node; one per GPU if not given.")
    ] = None,
    time: Annotated[str, typer.Option("--time", help="Slurm's time limit.")] = "24:00:00",
    array: Annotated[
        str | None, typer.Option("--array", help="Slurm's array, as 0-7; each task has its own run directory.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Write a policy file with all keys, or a script for Slurm or torchrun.

    \b
    Examples:
      holdfast init                        write holdfast.toml here
      holdfast init configs/run.toml       write it elsewhere
      holdfast init --force                replace an existing file
      holdfast init - | less               print it
      holdfast init --slurm --nodes 2 --gpus 8 -- train.py --lr 3e-4    write train.sbatch
      holdfast init --torchrun run.sh --gpus 4 -- -m project.train      write run.sh
    """
    command: list[str] = context.meta[_COMMAND]
    if slurm and torchrun:
        raise typer.BadParameter("choose one of them", param_hint="--slurm --torchrun")
    if command and not (slurm or torchrun):
        message = f"{command[0]!r}: a command needs --slurm or --torchrun before the --"
        raise typer.BadParameter(message, param_hint="COMMAND")
    for option in ("nodes", "gpus", "processes", "time", "array"):
        needs_slurm = option in ("time", "array")
        source = context.get_parameter_source(option)
        is_given = source is not None and source.name != "DEFAULT"
        if is_given and not (slurm or (torchrun and not needs_slurm)):
            raise typer.BadParameter(
                f"needs --slurm{'' if needs_slurm else ' or --torchrun'}", param_hint=f"--{option}"
            )
    for option, value in (("--time", time), ("--array", array)):
        if value is not None and not re.fullmatch(r"(?=.*\d)[0-9A-Za-z:,%-]+", value):
            raise typer.BadParameter(f"{value!r} is no value that sbatch takes", param_hint=option)
    default = SLURM_FILE if slurm else TORCHRUN_FILE if torchrun else POLICY_FILE
    path = path or default
    file = os.path.basename(path) if path != "-" and path.isprintable() else default
    launch = Launch(file, command or ["train.py"], nodes, gpus, processes or max(1, gpus), time, array)
    if slurm:
        text, use = slurm_script(launch), f"submit it: sbatch {shlex.quote(path)}"
    elif torchrun:
        text, use = torchrun_script(launch), f"start it: bash {shlex.quote(path)}"
    else:
        text, use = template(), "every key in it is optional"
    if path == "-":
        if as_json:
            emit({"ok": True, "path": "-", "text": text})
        else:
            for line in text.removesuffix("\n").split("\n"):
                echo(line)
        return
    target = Path(path)
    replaced = os.path.lexists(target)
    _check_target(target, default, force)
    try:
        write_atomically(target, text)
    except RunDirError as error:
        raise HoldfastError(f"{error}; choose another path, or - to print it") from None
    if as_json:
        emit({"ok": True, "path": str(target), "replaced": replaced})
    else:
        echo(f"{'replaced' if replaced else 'wrote'} {target}; {use}")


def _check_target(target: Path, default: str, force: bool) -> None:
    """Raise HoldfastError if writing would fail or would replace a file without --force."""
    if target.is_dir():
        raise HoldfastError(f"{target} is a folder; name a file in it, such as {target / default}")
    if os.path.lexists(target) and not force:
        raise HoldfastError(f"{target} exists; replace it with --force, or name another path")
    if not target.parent.exists():
        raise HoldfastError(f"{target} cannot be written: no folder {target.parent}; make it: mkdir -p {target.parent}")
