"""Text out of logs and file names, made safe to show: nothing in it can steer a terminal or a markdown reader."""

from __future__ import annotations

import re

# Control characters, escape sequences among them, and marks that turn the direction of writing around.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]"
)
_BLANK = re.compile(r"[\t\n\u2028\u2029]+")
_MARKDOWN = re.compile(r"([\\`*\[\]<>|~])")
_LEADING = re.compile(r"^(\s*)([#+=-]|\d+[.)](?=\s))")


def clean(text: str) -> str:
    """One line, without anything that is not to be seen."""
    text = _BLANK.sub(" ", _CONTROL.sub("", text))
    return text.encode("utf-8", "replace").decode("utf-8")


def markdown(text: str) -> str:
    """One line that markdown shows as it is."""
    text = _MARKDOWN.sub(r"\\\1", clean(text))
    return _LEADING.sub(
        lambda m: f"{m[1]}\\{m[2]}" if not m[2][0].isdigit() else f"{m[1]}{m[2][:-1]}\\{m[2][-1]}", text
    )


def code(text: str) -> str:
    """Fit for a block of code: it cannot end the block."""
    return clean(text).replace("```", "'''")
