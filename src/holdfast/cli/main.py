"""The `holdfast` command: puts the commands together, and turns errors into messages and exit statuses.

Exit statuses: 0 done; 2 the command line is wrong, or a person would have to be asked; 3 `diagnose --fail-on` found it,
or there is no checkpoint (`checkpoints resume-path`, `verify`); 70 stopped by policy; 75 stopped early and resumable; 78 bad
configuration or input; 130 ended by Ctrl-C; 1 anything else, a damaged checkpoint too.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

import holdfast
from holdfast.cli import ack, check, checkpoints, demo, diagnose, diff, init, plan, prepare, train
from holdfast.cli.output import emit
from holdfast.core.base.errors import ConfigError, HoldfastError, PolicyStop

EXIT_ERROR = 1
EXIT_BAD_CONFIG = 78
EXIT_INTERRUPTED = 130

# Newer typer carries its own click and older typer imports it; the parent of BadParameter is UsageError in both.
_UsageError: Any = typer.BadParameter.__bases__[0]

# Plain help: rich would take the [brackets] of a usage line for markup and reflow the examples.
app = typer.Typer(name="holdfast", add_completion=False, rich_markup_mode=None)
app.command()(demo.demo)
app.command(context_settings=train.CONTEXT_SETTINGS, options_metavar=train.OPTIONS_METAVAR)(train.train)
app.command()(prepare.prepare)
app.command()(init.init)
app.command(context_settings=check.CONTEXT_SETTINGS, options_metavar=check.OPTIONS_METAVAR)(check.check)
app.command()(ack.ack)
app.command()(diagnose.diagnose)
app.command()(diff.diff)
app.command()(plan.plan)
app.add_typer(checkpoints.app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"holdfast {holdfast.__version__}")
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
      holdfast demo                    a small model through a storm, with and without the guard
      holdfast train configs/tiny.toml the reference trainer
      holdfast prepare a.txt -o a.tok  text into a token file for it
      holdfast init                    write a policy file with comments
      holdfast check holdfast.toml     every error in it at once
      holdfast ack runs/a              a person has looked: budgets start anew
      holdfast diagnose runs/a         what happened to a run, from any tool's log
      holdfast diff runs/a runs/b      what differs between two runs, ranked as suspects
      holdfast plan runs/a             how often to save, and the goodput to expect
      holdfast checkpoints ls runs/a   what was saved, and what a resume would take
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and end the process with its status; `arguments` defaults to the process's own.

    A HoldfastError, or an OSError that names a file, is one message on stderr and, with --json, an object on stdout
    too. Any other exception is a bug of Holdfast's and leaves its traceback.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(_status(words))


def _status(words: list[str]) -> int:
    try:
        # Not standalone, so that errors arrive here; typer then returns the status of --help and --version.
        return typer.main.get_command(app).main(args=words, prog_name="holdfast", standalone_mode=False) or 0
    except typer.Abort:
        return EXIT_INTERRUPTED
    except (HoldfastError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None and error.errno != errno.ENOSPC:
            raise
        message = f"{error.filename or 'output'}: {error.strerror}" if isinstance(error, OSError) else str(error)
        typer.echo(f"error: {message}", err=True)
        if not (isinstance(error, OSError) and error.errno == errno.ENOSPC):
            _answer(words, error.errors if isinstance(error, ConfigError) else [message])
        return _status_of(error)
    except _UsageError as error:
        error.show()
        _answer(words, [error.format_message()])
        return int(error.exit_code)


def _answer(words: list[str], errors: list[str]) -> None:
    # Looked up in the words themselves: where the command line does not parse there is nothing else to ask.
    if "--json" in words:
        emit({"ok": False, "errors": errors})


def _status_of(error: Exception) -> int:
    if isinstance(error, ConfigError):
        return EXIT_BAD_CONFIG
    if isinstance(error, PolicyStop):
        return int(error.code or EXIT_ERROR)
    return EXIT_ERROR
