"""How commands answer: text for a person, or one JSON object on stdout with `--json`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from holdfast.core.base.clean import clean_lines

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def emit(answer: dict[str, Any]) -> None:
    """Print a command's whole answer as JSON. Call it once per command."""
    # json escapes every control character but this one.
    typer.echo(json.dumps(msgspec.to_builtins(answer), indent=2).replace("\x7f", "\\u007f"))


def echo(text: str, *, err: bool = False) -> None:
    """Print a message after cleaning it."""
    typer.echo(clean_lines(text), err=err)


def titled_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_edge=False)
    for n, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=n == 0)
    return table


def format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_duration(seconds: float) -> str:
    """Return the duration in the unit that a person would use."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 or seconds == 0 else f"{seconds * 1e3:.3g} ms"
