"""A post-mortem as markdown."""

from __future__ import annotations

from holdfast.diagnosis.postmortem.parts import Block, Bullets, Command, Grid, Paragraph, PostMortem
from holdfast.reports.clean import code, markdown


def postmortem(found: PostMortem) -> str:
    """All sixteen sections, ready for a file."""
    parts = [f"# {markdown(found.title)}"]
    for section in found.sections:
        parts.append(f"## {section.number}. {markdown(section.title)}")
        parts += [_block(block) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> str:
    if isinstance(block, Paragraph):
        return markdown(block.text)
    if isinstance(block, Bullets):
        return "\n".join(f"- {markdown(item)}" for item in block.items)
    if isinstance(block, Command):
        return f"```\n{code(block.text)}\n```"
    assert isinstance(block, Grid)
    lines = [_row(block.head), "|" + "---|" * len(block.head), *(_row(row) for row in block.rows)]
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(markdown(cell) for cell in cells) + " |"
