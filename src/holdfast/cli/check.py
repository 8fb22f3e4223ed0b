"""`holdfast check`: reports every error in a policy file or a trainer file, or the keys that are not at their default."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from holdfast.cli.output import Json, echo, emit
from holdfast.cli.overrides import load_config
from holdfast.core.base.config import Config, override, parse, read_toml, section_types
from holdfast.reference import config as trainer_config
from holdfast.reports.console import console


def check(
    context: typer.Context,
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A policy file, or a file for `holdfast train`.")],
    as_json: Json = False,
) -> None:
    """List every error in a policy file or a trainer file.

    If there is none, list the keys that are not at their default.
    A file with a trainer section ([model], [train] ...) is checked as `holdfast train` would.
    --section.key=value overrides any key; the value is read as TOML, a bare word as a string.
    Exit status: 0 the file is valid, 78 it is not.

    \b
    Examples:
      holdfast check holdfast.toml
      holdfast check holdfast.toml --recover.mode=observe --detect.loss_z=10
      holdfast check configs/tiny.toml --json
    """
    # An override typed before CONFIG arrives as `config`, so all words are parsed together.
    source, policy = load_config("check", [config, *context.args], _load)
    changed = changed_keys(policy)
    if as_json:
        emit({"ok": True, "config": source, "changed": changed})
    elif not changed:
        echo(f"ok: {source}; every key has its default")
    else:
        echo(f"ok: {source}; {len(changed)} key{'s' if len(changed) > 1 else ''} not at the default")
        table = Table()
        for title in ("key", "value", "default"):
            table.add_column(title, overflow="fold")
        for key, entry in changed.items():
            table.add_row(key, Text(json.dumps(entry["value"])), Text(json.dumps(entry["default"])))
        console().print(table)


def _load(source: str, assignments: list[str]) -> Config:
    data = override(read_toml(source), assignments)
    if trainer_config.has_trainer_sections(data):
        return trainer_config.parse(data, source)
    return parse(data, source)


def changed_keys(policy: Config) -> dict[str, dict[str, Any]]:
    """Return the keys that differ from their defaults, as `section.key`, each with its value and default."""
    defaults = msgspec.to_builtins(type(policy)())
    values = msgspec.to_builtins(policy)
    return {
        f"{section}.{key}": {"value": values[section][key], "default": defaults[section][key]}
        for section, section_type in section_types(type(policy)).items()
        for key in section_type.__struct_fields__
        if values[section][key] != defaults[section][key]
    }
