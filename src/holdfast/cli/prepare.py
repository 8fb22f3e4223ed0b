"""`holdfast prepare`: text or JSON lines into a token file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from holdfast.cli.output import Json, emit
from holdfast.core.base.errors import ConfigError, DataError
from holdfast.reference.prepare import prepare as make


def prepare(
    inputs: Annotated[
        list[Path], typer.Argument(metavar="INPUT...", help="Text files, or .jsonl with the text in a field.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The token file to write.")],
    tokenizer: Annotated[str, typer.Option(help="'bytes', or the path of a tokenizer.json.")] = "bytes",
    field: Annotated[str, typer.Option(help="Where the text is in a line of JSON.")] = "text",
    as_json: Json = False,
) -> None:
    """Turn text or JSON lines into a token file for `holdfast train`.

    \b
    Examples:
      holdfast prepare book.txt notes.txt -o data/books.tokens
      holdfast prepare corpus.jsonl -o data/corpus.tokens --tokenizer tokenizer.json --field content
    """
    total = sum(path.stat().st_size for path in inputs if path.is_file())
    console = Console(stderr=True)
    try:
        with Progress(console=console, disable=as_json or not console.is_terminal) as bar:
            task = bar.add_task("tokens", total=total)
            report = make(inputs, output, tokenizer, field, lambda done, count: bar.update(task, completed=done))
    except DataError as error:
        raise ConfigError([str(error)], "prepare") from None
    if as_json:
        emit({"ok": True, **report})
        return
    typer.echo(f"{report['output']}: {report['tokens']:,} tokens, vocabulary {report['vocab_size']}")
    if report["skipped_lines"]:
        typer.echo(f"{report['skipped_lines']} lines had no text under {field!r} and were left out", err=True)
