"""Makes text safe to show: text from files, file names, command lines and other ranks cannot control a terminal.

Everything that a person reads goes through here: log lines, errors, warnings, summaries, commands and reports. JSON does
not; it escapes such characters itself, so that a program gets the true value.
"""

from __future__ import annotations

import logging
import re

_SHOWN_AS = "?"
_ESCAPE_SEQUENCE = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]")
_BLANK = re.compile(r"[\t-\r\x1c-\x1e\x85\u2028\u2029]+")
# Control characters, marks that reverse the text direction, characters without width, lone surrogates, tags.
_HIDDEN = re.compile(
    r"[\x00-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    r"\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e00ff]"
)
# Emoji and many scripts join their characters with these two; between Latin letters they only hide a difference.
_JOINED = r"[\u0590-\u1fff\u2190-\ud7ff\ufb1d-\ufe0f\ufe70-\ufefc\U00010000-\U000dffff]"
_JOINER = re.compile(rf"(?<!{_JOINED})[\u200c\u200d]|[\u200c\u200d](?!{_JOINED})")


def clean(text: str) -> str:
    """Return the text as one line of visible characters. A hidden character becomes a question mark."""
    if text.isascii() and text.isprintable():
        return text
    text = _BLANK.sub(" ", _ESCAPE_SEQUENCE.sub("", text))
    return _JOINER.sub(_SHOWN_AS, _HIDDEN.sub(_SHOWN_AS, text))


def clean_lines(text: str) -> str:
    """Clean each line of the text. Lines after the first are indented, so that none looks like a message of its own."""
    first, *rest = text.split("\n")
    indented = (line if line.startswith(" ") or not line else f"  {line}" for line in map(clean, rest))
    return "\n".join([clean(first), *indented])


class CleanRecords(logging.Filter):
    """Cleans log records: their arguments, which hold text from files, and their tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = clean_lines(str(record.msg))
        if isinstance(record.args, tuple):
            record.args = tuple(arg if isinstance(arg, int | float) else clean_lines(str(arg)) for arg in record.args)
        if record.exc_info and not record.exc_text:
            record.exc_text = clean_lines(logging.Formatter().formatException(record.exc_info))
        return True
