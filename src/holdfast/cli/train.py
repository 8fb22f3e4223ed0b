"""`holdfast train`: runs the reference trainer."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import msgspec
import typer

from holdfast.cli.output import Json, echo, emit
from holdfast.cli.overrides import load_config
from holdfast.core.base.errors import ConfigError, DataError, RunDirError, SetupError, needs_torch
from holdfast.reference.config import TrainConfig, load

EXIT_RESUME = 75
EXIT_NOT_RESUMABLE = 1


def train(
    context: typer.Context,
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A TOML file; configs/NAME.toml also finds those that ship.")
    ],
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="PATH", help="Resume from this checkpoint, or from this run's newest good one."
        ),
    ] = None,
    stop_at: Annotated[
        int | None, typer.Option("--stop-at", metavar="STEP", min=1, help="Stop after this step, resumable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a small transformer with the reference trainer.

    The data are token files, or the embedded data set if the file names none.
    --section.key=value overrides any key. The same command resumes a run directory that has checkpoints, exactly.
    The first Ctrl-C ends the run after the current step with a checkpoint; the second ends it at once.
    Under torchrun, [distributed] says how the ranks share the run; the loss does not depend on their number.
    Exit status: 0 done, 75 stopped early and resumable, 70 stopped by policy, 78 bad configuration or input.

    \b
    Examples:
      holdfast train configs/tiny.toml
      holdfast train configs/tiny.toml --train.steps=1000 --optimizer.lr=1e-3
      holdfast train configs/tiny.toml --resume runs/tiny/checkpoints/step_00000200
      holdfast train configs/tiny.toml --checkpoint.resume=never
      torchrun --nproc-per-node 4 -m holdfast train configs/tiny.toml --distributed.shard=2
    """
    _, checked = load_config("train", [config, *context.args], load)
    result, is_rank_0 = _train(checked, resume, stop_at, quiet=as_json)
    if as_json and is_rank_0:
        emit({"ok": True, **msgspec.to_builtins(result)})
    if result.stopped is not None:
        cure = "the same command resumes it" if result.checkpoint else "there is no checkpoint to resume from"
        if is_rank_0:
            echo(f"stopped at step {result.steps}: {result.stopped}; {cure}", err=True)
        raise typer.Exit(EXIT_RESUME if result.checkpoint else EXIT_NOT_RESUMABLE)


def _train(config: TrainConfig, resume: str | None, stop_at: int | None, quiet: bool) -> tuple[Any, bool]:
    """Train and return the result and whether this is rank 0, which reports for all ranks."""
    with needs_torch("holdfast train"):
        from holdfast.reference.progress import TerminalProgress
        from holdfast.reference.ranks import process_group
        from holdfast.reference.trainer import build, check_run_dir
    check_run_dir(config.train.run_dir)
    with process_group(config.train.device):
        trainer = build(config)
        is_rank_0 = trainer.layout.rank == 0
        if not is_rank_0:
            logging.getLogger("holdfast").setLevel(logging.ERROR)
        view = None if quiet or not is_rank_0 else TerminalProgress()
        try:
            return trainer.run(view=view, resume=resume, stop_at=stop_at), is_rank_0
        except (DataError, RunDirError, SetupError) as error:
            raise ConfigError([str(error)], "train") from None
        finally:
            if view is not None:
                view.close()
