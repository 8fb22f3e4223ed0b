"""Command lines of the form CONFIG [--section.key=value ...]."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from holdfast.cli.output import echo
from holdfast.core.base.errors import ConfigError
from holdfast.reference.config import find_config

# typer passes unknown options on in `context.args`, which is where --section.key=value arrives.
CONTEXT_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
OPTIONS_METAVAR = "[OPTIONS] [--section.key=value ...]"
_OVERRIDE = re.compile(r"--[^\s.=-][^\s.=]*\.[^\s=]+=.*", re.DOTALL)
_NO_VALUE = re.compile(r"--[^\s.=-][^\s.=]*\.[^\s=]+")
_Loaded = TypeVar("_Loaded")


class ParsedWords(NamedTuple):
    """Holds the config file, the overrides, and an error with the cure for each other word."""

    config: str | None
    overrides: list[str]
    errors: list[str]


def load_config(command: str, words: list[str], load: Callable[[str, list[str]], _Loaded]) -> tuple[str, _Loaded]:
    """Return the config file and what `load(file, overrides)` makes of it; raise one ConfigError with every problem.

    `configs/NAME.toml` means the packaged file if there is none in the working folder.
    """
    named, assignments, errors = parse_words(words)
    if named is None:
        usage = f"holdfast {command} CONFIG [--section.key=value ...]"
        raise ConfigError([*errors, f"no file named; write: {usage}"], command)
    source = find_config(named)
    if source != named and os.environ.get("RANK", "0") == "0":
        echo(f"{named}: not in this folder; using the file that ships with holdfast: {source}", err=True)
    try:
        config = load(source, assignments)
    except ConfigError as error:
        raise ConfigError([*errors, *error.errors], source) from None
    if errors:
        raise ConfigError(errors, source)
    return source, config


def parse_words(words: Iterable[str]) -> ParsedWords:
    """Separate the words, which may come in any order."""
    config: str | None = None
    overrides: list[str] = []
    errors: list[str] = []
    valueless: str | None = None
    for word in words:
        if _OVERRIDE.fullmatch(word):
            overrides.append(word)
        elif word.startswith("-"):
            valueless = word if _NO_VALUE.fullmatch(word) else None
            if valueless:
                cure = f"the value is missing; write {word}=VALUE, with an equals sign and no space"
            else:
                cure = "no such option; write an override as --section.key=value, such as --recover.mode=observe"
            errors.append(f"{word!r}: {cure}")
            continue
        elif config is not None and valueless is not None:  # `--section.key value` is one mistake: one error
            errors[-1] = f"{valueless + ' ' + word!r}: write {valueless}={word}, with an equals sign and no space"
        elif config is None:
            config = word
        else:
            errors.append(f"{word!r}: only one file can be named; write an override as --section.key=value")
        valueless = None
    return ParsedWords(config, overrides, errors)
