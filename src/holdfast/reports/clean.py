"""Makes text from logs and file names safe to show: it can control neither a terminal nor a markdown reader."""

from __future__ import annotations

import re

# Control characters, escape sequences, and marks that reverse the text direction.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]"
)
_BLANK = re.compile(r"[\t\n\u2028\u2029]+")
_MARKDOWN = re.compile(r"([\\`*\[\]<>|~])")
_LEADING = re.compile(r"^(\s*)([#+=-]|\d+[.)](?=\s))")


def clean(text: str) -> str:
    """Return the text as one line of visible characters."""
    text = _BLANK.sub(" ", _CONTROL.sub("", text))
    return text.encode("utf-8", "replace").decode("utf-8")


def escape_markdown(text: str) -> str:
    """Return the text as one line that markdown shows unchanged."""
    text = _MARKDOWN.sub(r"\\\1", clean(text))
    return _LEADING.sub(
        lambda m: f"{m[1]}\\{m[2]}" if not m[2][0].isdigit() else f"{m[1]}{m[2][:-1]}\\{m[2][-1]}", text
    )


def escape_code(text: str) -> str:
    """Return the text for a code block. It cannot end the block."""
    return clean(text).replace("```", "'''")
