"""Tells `--section.key=value` apart from what else stands on a command line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_OVERRIDE = re.compile(r"--[^\s.=-][^\s.=]*\.[^\s=]+=.*", re.DOTALL)
_NO_VALUE = re.compile(r"--[^\s.=-][^\s.=]*\.[^\s=]+")


class Words(NamedTuple):
    """The words of a command line, sorted. `errors` says of each word that fits nowhere what to write instead."""

    config: str | None
    overrides: list[str]
    errors: list[str]


def sort(words: Iterable[str]) -> Words:
    """The config file, the overrides and the rest, in whatever order they were typed."""
    config: str | None = None
    overrides: list[str] = []
    errors: list[str] = []
    valueless: str | None = None
    for word in words:
        if _OVERRIDE.fullmatch(word):
            overrides.append(word)
        elif word.startswith("-"):
            valueless = word if _NO_VALUE.fullmatch(word) else None
            errors.append(_stray_option(word))
            continue
        elif config is not None and valueless is not None:  # --section.key value: one mistake, said once
            errors[-1] = (
                f"{valueless + ' ' + word!r}: write it as {valueless}={word}, with the equals sign and no space"
            )
        elif config is None:
            config = word
        else:
            errors.append(f"{word!r}: one file at a time; write an override as --section.key=value")
        valueless = None
    return Words(config, overrides, errors)


def _stray_option(word: str) -> str:
    if _NO_VALUE.fullmatch(word):
        return f"{word!r}: the value is missing; write {word}=VALUE, with the equals sign and no space"
    return f"{word!r}: no such option; write an override as --section.key=value, such as --recover.mode=observe"
