"""Reads the commands and the code blocks that README.md and docs/*.md print."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELLS = ("sh", "bash", "console", "shell")
COMMAND = re.compile(
    r"(?:\$ )?((?:\w+=\S+ )*(?:(?:holdfast|python3?|torchrun|make|pip|git|pytest)(?= |$)|\w+=\"\$\().*)"
)


class Block(NamedTuple):
    """One indented or fenced block of a page, without its indentation."""

    page: str
    line: int
    language: str
    """what the fence says; "" if it says nothing, or if the block is indented"""
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(pages: list[Path] | None = None) -> Iterator[Block]:
    """Yield every block of the pages, in order."""
    for page in PAGES if pages is None else pages:
        lines = [*page.read_text(encoding="utf-8").split("\n"), ""]
        number = 0
        while number < len(lines):
            fence = re.match(r"(\s*)(```+)\s*(\w*)", lines[number])
            first = number + 1 if fence else number
            if fence:
                number = next(n for n in range(first, len(lines)) if lines[n].strip() == fence[2])
                yield _block(page, first, fence[3], lines[first:number])
            elif lines[number].startswith("    ") and (number == 0 or not lines[number - 1].strip()):
                while lines[number].startswith("    ") or (
                    not lines[number].strip() and number + 1 < len(lines) and lines[number + 1].startswith("    ")
                ):
                    number += 1
                yield _block(page, first, "", lines[first:number])
            number += 1


def _block(page: Path, first: int, language: str, lines: list[str]) -> Block:
    return Block(page.name, first + 1, language, textwrap.dedent("\n".join(lines)) + "\n")


def commands(block: Block) -> list[str]:
    """Return the commands of a block, without the explanation after two spaces or in a comment.

    In a block with `$ ` only the lines that begin so are commands; the others are what is printed.
    """
    if block.language not in ("", *SHELLS):
        return []
    lines = re.sub(r"\s*\\\n\s*", " ", block.text).splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line for line in lines if line.startswith("$ ")]
    found = [match[1] for line in lines if (match := COMMAND.fullmatch(line.rstrip()))]
    return [re.split(r"\s{2,}|\s+#\s", command)[0].strip() for command in found]


def is_python(block: Block) -> bool:
    """Whether a block is Python: its fence says so, or it has none, is valid Python and uses holdfast."""
    if block.language or commands(block):
        return block.language == "python"
    try:
        ast.parse(block.text)
    except SyntaxError:
        return False
    return bool(
        re.search(r"^(?:import holdfast|from holdfast|.*\b(?:holdfast|guard)\.\w+\()", block.text, re.MULTILINE)
    )
