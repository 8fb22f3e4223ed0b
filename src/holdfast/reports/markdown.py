"""Renders a post-mortem as markdown."""

from __future__ import annotations

import re

from holdfast.core.base.clean import clean
from holdfast.diagnosis.postmortem.parts import Bullets, Command, Grid, Paragraph, Part, Postmortem

_MARKDOWN = re.compile(r"([\\`*\[\]<>|~])")
_LEADING = re.compile(r"^(\s*)([#+=-]|\d+[.)](?=\s))")


def render_postmortem(postmortem: Postmortem) -> str:
    """Return all sixteen sections as the text of a file."""
    texts = [f"# {escape_markdown(postmortem.title)}"]
    for section in postmortem.sections:
        texts.append(f"## {section.number}. {escape_markdown(section.title)}")
        texts += [render_part(part) for part in section.parts]
    return "\n\n".join(texts) + "\n"


def render_part(part: Part) -> str:
    """Return one building block of a post-mortem or a report."""
    if isinstance(part, Paragraph):
        return escape_markdown(part.text)
    if isinstance(part, Bullets):
        return "\n".join(f"- {escape_markdown(item)}" for item in part.items)
    if isinstance(part, Command):
        return f"```\n{escape_code(part.text)}\n```"
    assert isinstance(part, Grid)
    lines = [_row(part.head), "|" + "---|" * len(part.head), *(_row(row) for row in part.rows)]
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(escape_markdown(cell) for cell in cells) + " |"


def escape_markdown(text: str) -> str:
    """Return the text as one line that markdown shows unchanged."""
    text = _MARKDOWN.sub(r"\\\1", clean(text))
    return _LEADING.sub(
        lambda m: f"{m[1]}\\{m[2]}" if not m[2][0].isdigit() else f"{m[1]}{m[2][:-1]}\\{m[2][-1]}", text
    )


def escape_code(text: str) -> str:
    """Return the text for a code block. It cannot end the block."""
    return clean(text).replace("```", "'''")
