"""The `holdfast` command: registers the commands and turns errors into messages and exit statuses.

Exit statuses:
    0    done
    1    any other error; a damaged checkpoint
    2    wrong command line; a confirmation is needed and stdin is not a terminal
    3    `diagnose --fail-on` matched; no checkpoint (`checkpoints resume-path`, `verify`); no hang (`hang`);
         `doctor --strict` has warnings
    4    `doctor` found something broken
    70   stopped by policy
    75   stopped early and resumable
    78   bad configuration or input
    130  ended by Ctrl-C
"""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

import holdfast
from holdfast.cli import (
    ack,
    check,
    checkpoints,
    demo,
    diagnose,
    diff,
    doctor,
    hang,
    init,
    overrides,
    plan,
    prepare,
    replay,
    report,
    train,
    ui,
)
from holdfast.cli.checked_command import CheckedCommand
from holdfast.cli.output import echo, emit
from holdfast.core.base.errors import ConfigError, HoldfastError, PolicyStop

EXIT_ERROR = 1
EXIT_BAD_CONFIG = 78
EXIT_INTERRUPTED = 130

# New typer bundles click and old typer imports it; the parent of BadParameter is UsageError in both.
_UsageError: Any = typer.BadParameter.__bases__[0]

# Plain help: rich would read the [brackets] of a usage line as markup and reflow the examples.
app = typer.Typer(
    name="holdfast",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_with_overrides = app.command(
    cls=CheckedCommand, context_settings=overrides.CONTEXT_SETTINGS, options_metavar=overrides.OPTIONS_METAVAR
)
app.command(cls=CheckedCommand)(demo.demo)
_with_overrides(train.train)
app.command(cls=CheckedCommand)(prepare.prepare)
app.command(cls=init.InitCommand)(init.init)
_with_overrides(check.check)
app.command(cls=CheckedCommand)(ack.ack)
app.command(cls=CheckedCommand)(diagnose.diagnose)
app.command(cls=CheckedCommand)(diff.diff)
app.command(cls=CheckedCommand)(report.report)
app.command(cls=CheckedCommand)(ui.ui)
app.command(cls=CheckedCommand)(hang.hang)
app.command(cls=CheckedCommand)(replay.replay)
app.command(cls=CheckedCommand)(plan.plan)
app.command(cls=CheckedCommand)(doctor.doctor)
app.add_typer(checkpoints.app)


def _print_version(wanted: bool) -> None:
    if wanted:
        echo(f"holdfast {holdfast.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _holdfast(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Holdfast keeps a PyTorch training run alive and honest.

    \b
    Examples:
      holdfast demo                    train a small model with faults, with and without the guard
      holdfast train configs/tiny.toml run the reference trainer
      holdfast prepare a.txt -o a.tok  make a token file from text
      holdfast init                    write a policy file with comments
      holdfast init --slurm -- train.py    write a batch script for Slurm
      holdfast check holdfast.toml     list every error in a policy file
      holdfast ack runs/a              acknowledge a stopped run and reset its recovery budgets
      holdfast diagnose runs/a         explain what happened to a run, from any tool's log
      holdfast diff runs/a runs/b      rank the differences between two runs as suspects
      holdfast report runs/a           write a page that shows the run, to open in a browser
      holdfast ui runs                 follow all runs of a folder live in a browser
      holdfast hang runs/a             name the rank, the line and the collective of a hang
      holdfast replay runs/a           run the step of the last incident again and name its line
      holdfast plan runs/a             recommend how often to save, and estimate the goodput
      holdfast doctor runs             test this machine: cores, memory, GPUs, disk, clocks, ranks
      holdfast checkpoints ls runs/a   list checkpoints and the one that a resume would use
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its status; `arguments` defaults to sys.argv.

    A HoldfastError, or an OSError that names a file, becomes one message on stderr and, with --json, also an object on
    stdout. Any other exception is a bug in Holdfast and keeps its traceback.
    """
    sys.exit(_run(list(sys.argv[1:] if arguments is None else arguments)))


def _run(words: list[str]) -> int:
    """Run one command and return its exit status."""
    try:
        # Not standalone, so that errors propagate to here; typer then returns the status of --help and --version.
        return typer.main.get_command(app).main(args=words, prog_name="holdfast", standalone_mode=False) or 0
    except typer.Abort:
        return EXIT_INTERRUPTED
    except (HoldfastError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None and error.errno != errno.ENOSPC:
            raise
        message = f"{error.filename or 'output'}: {error.strerror}" if isinstance(error, OSError) else str(error)
        echo(f"error: {message}", err=True)
        if not (isinstance(error, OSError) and error.errno == errno.ENOSPC):
            _emit_errors(words, error.errors if isinstance(error, ConfigError) else [message])
        if isinstance(error, PolicyStop):
            return int(error.code or EXIT_ERROR)
        return EXIT_BAD_CONFIG if isinstance(error, ConfigError) else EXIT_ERROR
    except _UsageError as error:
        usage = io.StringIO()
        error.show(usage)
        for line in usage.getvalue().splitlines():
            echo(line, err=True)
        _emit_errors(words, [error.format_message()])
        return int(error.exit_code)


def _emit_errors(words: list[str], errors: list[str]) -> None:
    if "--json" in words:  # the command line may not have parsed, so look at the words
        emit({"ok": False, "errors": errors})
