"""How a command answers: text for a person, or with `--json` one JSON object on stdout."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
import typer

Json = Annotated[bool, typer.Option("--json", help="Answer with one JSON object on stdout.")]


def emit(answer: dict[str, Any]) -> None:
    """Print a command's whole answer as JSON; to be called once a command."""
    typer.echo(json.dumps(msgspec.to_builtins(answer), indent=2))
