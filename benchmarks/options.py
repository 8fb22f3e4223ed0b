"""What a benchmark may be told on the command line: refused before anything is measured, not after."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from pathlib import Path


def count(text: str) -> int:
    """1, 2, ..."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def count_or_zero(text: str) -> int:
    return 0 if text == "0" else count(text)


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def writable(text: str) -> str:
    """A file that can be written; its folder is made."""
    path = Path(text)
    if path.is_dir():
        raise ArgumentTypeError(f"{text} is a folder; name a file in it")
    there = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from None
    return text
