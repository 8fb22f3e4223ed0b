"""`holdfast train`: the reference trainer."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import msgspec
import typer

from holdfast.cli import overrides
from holdfast.cli.output import Json, emit
from holdfast.core.base.errors import ConfigError, DataError, MissingDependency, RunDirError, SetupError
from holdfast.reference.config import TrainConfig, load

CONTEXT_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
OPTIONS_METAVAR = "[OPTIONS] [--section.key=value ...]"
EXIT_RESUME = 75
EXIT_NOT_RESUMABLE = 1


def train(
    context: typer.Context,
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="The trainer's configuration file.")],
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="PATH", help="Go on from this checkpoint, or from the newest good one of this run."
        ),
    ] = None,
    stop_at: Annotated[
        int | None, typer.Option("--stop-at", metavar="STEP", min=1, help="Stop after this step, resumable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a small transformer on token files, or on the embedded data set, guarded.

    Any key can be overridden with --section.key=value. A run directory that has checkpoints is gone on from, exactly, by
    the same command; the first Ctrl-C ends the run after the current step and leaves one to go on from.
    Under torchrun the ranks it starts share the run as [distributed] says; the loss does not depend on their number.
    Exit status: 0 done, 75 stopped early and resumable, 70 stopped by policy, 78 bad configuration or input.

    \b
    Examples:
      holdfast train configs/tiny.toml
      holdfast train configs/tiny.toml --train.steps=1000 --optimizer.lr=1e-3
      holdfast train configs/tiny.toml --resume runs/tiny/checkpoints/step_00000200
      holdfast train configs/tiny.toml --checkpoint.resume=never
      torchrun --nproc-per-node 4 -m holdfast train configs/tiny.toml --distributed.shard=2
    """
    checked = _load([config, *context.args])
    result, first = _train(checked, resume, stop_at, quiet=as_json)
    if as_json and first:
        emit({"ok": True, **msgspec.to_builtins(result)})
    if result.stopped is not None:
        cure = "the same command goes on from there" if result.checkpoint else "no checkpoint was left to go on from"
        if first:
            typer.echo(f"stopped at step {result.steps}: {result.stopped}; {cure}", err=True)
        raise typer.Exit(EXIT_RESUME if result.checkpoint else EXIT_NOT_RESUMABLE)


def _load(words: list[str]) -> TrainConfig:
    source, assignments, errors = overrides.sort(words)
    if source is None:
        raise ConfigError([*errors, "no file named; write: holdfast train CONFIG [--section.key=value ...]"], "train")
    try:
        checked = load(source, assignments)
    except ConfigError as error:
        raise ConfigError([*errors, *error.errors], source) from None
    if errors:
        raise ConfigError(errors, source)
    return checked


def _train(config: TrainConfig, resume: str | None, stop_at: int | None, quiet: bool) -> tuple[Any, bool]:
    """What the run came to, and whether this is the first of its ranks, which speaks for all."""
    try:
        from holdfast.reference import ranks
        from holdfast.reference.progress import Show
        from holdfast.reference.trainer import build, check_run_dir
    except ImportError as error:
        raise MissingDependency(
            f"holdfast train needs torch, which cannot be imported ({error}); install it with: pip install 'holdfast[torch]'"
        ) from None
    check_run_dir(config.train.run_dir)
    with ranks.joined(config.train.device):
        trainer = build(config)
        first = trainer.layout.rank == 0
        if not first:
            logging.getLogger("holdfast").setLevel(logging.ERROR)
        view = None if quiet or not first else Show()
        try:
            return trainer.run(view=view, resume=resume, stop_at=stop_at), first
        except (DataError, RunDirError, SetupError) as error:
            raise ConfigError([str(error)], "train") from None
        finally:
            if view is not None:
                view.close()
