"""Writes the one page of reports: markup, style, program and data in a single file that loads nothing else.

The data is JSON in a block that no browser runs. The program writes it with textContent only. The content-security policy
allows this program and this style by their checksums, and no request; a live page may ask its own server.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.base.clean import clean
from holdfast.core.record.rundir import write_atomically
from holdfast.reports.report_page import ReportPage

_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


@cache
def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def policy(*, is_live: bool) -> str:
    """Return the content-security policy of the page."""
    style, program = (_checksum(_file(name)) for name in ("page.css", "page.js"))
    connect = "; connect-src 'self'" if is_live else ""
    return (
        f"default-src 'none'; script-src {program}; style-src {style}; img-src data:{connect}; "
        "base-uri 'none'; form-action 'none'"
    )


def _checksum(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def render_page(content: Any, *, title: str, note: str = "", is_live: bool = False) -> str:
    """Return the page. `content` is a ReportPage, or what the program needs to ask for one; `note` is for no-script."""
    head, note = html.escape(clean(title)), html.escape(clean(note))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy(is_live=is_live)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{head} - Holdfast</title>
<link rel="icon" href="data:,">
<style>{_file("page.css")}</style>
</head>
<body>
<main id="page"><noscript><h1>{head}</h1><p>{note}</p><p>The curves need JavaScript.</p></noscript></main>
<script type="application/json" id="data">{encode(content)}</script>
<script>{_file("page.js")}</script>
</body>
</html>
"""


def write_page(page: ReportPage, output: Path) -> None:
    """Write the page of a run or of a comparison to a file."""
    write_atomically(output, render_page(page, title=page.title, note=page.verdict.text))


def encode(content: Any) -> str:
    """Return content as JSON that can stand in a page: all text is cleaned, and no character can end its block."""
    text = json.dumps(_plain(msgspec.to_builtins(content)), separators=(",", ":"), allow_nan=False)
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return text


def _plain(value: Any) -> Any:
    """Return the value with clean text, and with null for numbers that JSON lacks."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {clean(str(key)): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
