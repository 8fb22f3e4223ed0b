"""`holdfast prepare`: makes a token file from text or JSON lines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from holdfast.cli.output import Json, echo, emit
from holdfast.core.base.errors import ConfigError, DataError
from holdfast.reference.prepare import prepare as make_token_file
from holdfast.reports.console import console


def prepare(
    inputs: Annotated[
        list[Path], typer.Argument(metavar="INPUT...", help="Text files, or .jsonl with the text in a field.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The token file to write.")],
    tokenizer: Annotated[str, typer.Option(help="'bytes', or the path of a tokenizer.json file.")] = "bytes",
    field: Annotated[str, typer.Option(help="The JSON field that holds the text.")] = "text",
    as_json: Json = False,
) -> None:
    """Make a token file from text or JSON lines.

    `holdfast train` reads it through [[dataset.sources]].

    \b
    Examples:
      holdfast prepare book.txt notes.txt -o data/books.tokens
      holdfast prepare corpus.jsonl -o data/corpus.tokens --tokenizer tokenizer.json --field content
      holdfast prepare book.txt -o data/book.tokens --json
    """
    total = sum(path.stat().st_size for path in inputs if path.is_file())
    errors = console(stderr=True)
    try:
        with Progress(console=errors, disable=as_json or not errors.is_terminal) as bar:
            task = bar.add_task("tokens", total=total)
            report = make_token_file(
                inputs, output, tokenizer, field, lambda done, count: bar.update(task, completed=done)
            )
    except DataError as error:
        raise ConfigError([str(error)], "prepare") from None
    if as_json:
        emit({"ok": True, **report})
        return
    echo(f"{report['output']}: {report['tokens']:,} tokens, vocabulary {report['vocab_size']}")
    if report["skipped_lines"]:
        echo(f"{report['skipped_lines']} lines had no text under {field!r} and were skipped", err=True)
