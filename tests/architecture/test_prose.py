"""Docstrings, comments, messages and docs use plain English: none of the phrases below."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Phrases with a plain replacement: "log" or "report", "resumes from", "again", "is", "process", "if".
BANNED = re.compile(
    r"\b(nobody|somebody|whoever|(?:is|are|was|were)\s+(?:said|told)|(?:go|goes|went|gone|going) on from|anew"
    r"|how-manieth|(?:earlier|later|next|first|second|other) (?:life|lives)|whose doing|a word of|the word of)\b",
    re.IGNORECASE,
)
CLEAN = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs",
    "src",
    "tests",
    "benchmarks",
    "examples",
]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of everything in a file that a person reads."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def banned_phrases(path: Path) -> list[str]:
    """Return each banned phrase in a file, as `line: phrase`."""
    return sorted({f"{line}: {' '.join(m.group().split())}" for line, t in prose(path) for m in BANNED.finditer(t)})


def files_below(name: str) -> list[Path]:
    place = ROOT / name
    return [place] if place.is_file() else sorted([*place.rglob("*.py"), *place.rglob("*.md")])


@pytest.mark.parametrize("name", CLEAN)
def test_clean_files_stay_clean(name):
    paths = [path for path in files_below(name) if path != Path(__file__)]
    assert paths, f"{name} does not exist"
    assert {str(path.relative_to(ROOT)): found for path in paths if (found := banned_phrases(path))} == {}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""Nobody reads this."""', ["1: Nobody"]),
        ("x = 1  # it is told\n", ["1: is told"]),
        ('x = f"step {1} can be gone on from"', ["1: gone on from"]),
        ('x = "the run is\\nsaid to end"', ["1: is said"]),
        ("nobody = told = 1", []),
        ('x = {"anew": 1}', []),  # a key, not prose
    ],
)
def test_checker_reads_docstrings_comments_and_messages(tmp_path, source, expected):
    (tmp_path / "a.py").write_text(source)
    assert banned_phrases(tmp_path / "a.py") == expected


def test_the_tests_that_security_md_names_exist():
    named = set(re.findall(r"tests/[\w/]+(?:\.py)?", (ROOT / "SECURITY.md").read_text()))
    assert named and [name for name in sorted(named) if not (ROOT / name).exists()] == []
