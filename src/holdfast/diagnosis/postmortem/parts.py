"""What a post-mortem is made of. How it looks is up to whoever renders it."""

from __future__ import annotations

import math

import msgspec

from holdfast.diagnosis.model.answers import number
from holdfast.diagnosis.model.own_journal import MISSING


class Paragraph(msgspec.Struct, frozen=True, tag="paragraph"):
    text: str


class Bullets(msgspec.Struct, frozen=True, tag="bullets"):
    items: list[str]


class Grid(msgspec.Struct, frozen=True, tag="grid"):
    head: list[str]
    rows: list[list[str]]


class Command(msgspec.Struct, frozen=True, tag="command"):
    """Something to type, or to run by hand."""

    text: str


Block = Paragraph | Bullets | Grid | Command


class Section(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    title: str
    blocks: list[Block]


class PostMortem(msgspec.Struct, frozen=True, kw_only=True):
    """Sixteen sections; what the record does not hold is said to be missing."""

    path: str
    title: str
    sections: list[Section]


def bullets(items: list[str], otherwise: str = MISSING) -> Block:
    return Bullets(items) if items else Paragraph(otherwise)


def grid(head: list[str], rows: list[list[str]], otherwise: str = MISSING) -> Block:
    return Grid(head, rows) if rows else Paragraph(otherwise)


def shown(value: float | None) -> str:
    """A number, or that there is none."""
    return MISSING if value is None else number(value)


def span(start: float, end: float) -> str:
    return f"step {number(start)}" if math.isclose(start, end) else f"steps {number(start)} to {number(end)}"
