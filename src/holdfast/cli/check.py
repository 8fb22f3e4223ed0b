"""`holdfast check`: every error of a policy file, or of the trainer's, at once, or what it changes."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.cli import overrides
from holdfast.cli.output import Json, emit
from holdfast.core.base.config import Config, override, parse, read_toml, section_types
from holdfast.core.base.errors import ConfigError
from holdfast.reference import config as trainers

# typer hands over what it does not know in `context.args`, which is where --section.key=value arrives.
CONTEXT_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
OPTIONS_METAVAR = "[OPTIONS] [--section.key=value ...]"


def check(
    context: typer.Context,
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="The policy file, or one for `holdfast train`.")],
    as_json: Json = False,
) -> None:
    """Check a policy file, or one for `holdfast train`: every error, or what it changes.

    A file with a section of the trainer's ([model], [train] ...) is checked as `holdfast train` would.
    Any key can be overridden with --section.key=value; the value is read as TOML, a bare word as a string.
    Exit status: 0 the file is right, 78 it is not.

    \b
    Examples:
      holdfast check holdfast.toml
      holdfast check holdfast.toml --recover.mode=observe --detect.loss_z=10
      holdfast check configs/tiny.toml --json
    """
    # An override typed before CONFIG takes its place, so the words are sorted together.
    source, policy = _load([config, *context.args])
    changed = changes(policy)
    if as_json:
        emit({"ok": True, "config": source, "changed": changed})
        return
    if not changed:
        typer.echo(f"ok: {source}; every key has its default")
        return
    typer.echo(f"ok: {source}; {len(changed)} key{'s' if len(changed) > 1 else ''} not at the default")
    _print_table(changed)


def _load(words: list[str]) -> tuple[str, Config]:
    source, assignments, errors = overrides.sort(words)
    if source is None:
        raise ConfigError([*errors, "no file named; write: holdfast check CONFIG [--section.key=value ...]"], "check")
    try:
        data = override(read_toml(source), assignments)
        policy = trainers.parse(data, source) if trainers.is_trainers(data) else parse(data, source)
    except ConfigError as error:
        raise ConfigError([*errors, *error.errors], source) from None
    if errors:
        raise ConfigError(errors, source)
    return source, policy


def changes(policy: Config) -> dict[str, dict[str, Any]]:
    """The keys that differ from the defaults, as `section.key`, each with its value and the default."""
    defaults = msgspec.to_builtins(type(policy)())
    values = msgspec.to_builtins(policy)
    return {
        f"{section}.{key}": {"value": values[section][key], "default": defaults[section][key]}
        for section, kind in section_types(type(policy)).items()
        for key in kind.__struct_fields__
        if values[section][key] != defaults[section][key]
    }


def _print_table(changed: dict[str, dict[str, Any]]) -> None:
    table = Table()
    for title in ("key", "value", "default"):
        table.add_column(title, overflow="fold")
    for key, entry in changed.items():
        table.add_row(key, Text(json.dumps(entry["value"])), Text(json.dumps(entry["default"])))
    Console().print(table)
