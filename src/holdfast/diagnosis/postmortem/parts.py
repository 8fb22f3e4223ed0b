"""The building blocks of a post-mortem. Renderers decide how they look."""

from __future__ import annotations

import msgspec

from holdfast.diagnosis.model.answers import fmt
from holdfast.diagnosis.model.run_journal import MISSING


class Paragraph(msgspec.Struct, frozen=True, tag="paragraph"):
    text: str


class Bullets(msgspec.Struct, frozen=True, tag="bullets"):
    items: list[str]


class Grid(msgspec.Struct, frozen=True, tag="grid"):
    head: list[str]
    rows: list[list[str]]


class Command(msgspec.Struct, frozen=True, tag="command"):
    """Holds a command, or a check to run by hand."""

    text: str


Part = Paragraph | Bullets | Grid | Command


class PostmortemSection(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    title: str
    parts: list[Part]


class Postmortem(msgspec.Struct, frozen=True, kw_only=True):
    """Holds sixteen sections. A value that the log lacks is marked as missing."""

    path: str
    title: str
    sections: list[PostmortemSection]


def bullets(items: list[str], otherwise: str = MISSING) -> Part:
    return Bullets(items) if items else Paragraph(otherwise)


def grid(head: list[str], rows: list[list[str]], otherwise: str = MISSING) -> Part:
    return Grid(head, rows) if rows else Paragraph(otherwise)


def fmt_or_missing(value: float | None) -> str:
    return MISSING if value is None else fmt(value)
