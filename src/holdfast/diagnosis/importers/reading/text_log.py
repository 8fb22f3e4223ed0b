"""Any text log, a chunk at a time: records through their format's `parse`, everything else through the scanner of events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from holdfast.diagnosis.importers.reading import events
from holdfast.diagnosis.importers.reading.blocks import Block, Rows
from holdfast.diagnosis.importers.reading.line import EVAL, TRAIN, Parse, Reading
from holdfast.diagnosis.importers.reading.vectorized import LONGEST, Template, learn, skeletons

WORTH_A_TEMPLATE = 24
MOST_SHAPES, LONGEST_SHAPE = 8_000, 8_192
MOST_EVENTS = 10_000
MOST_EVALS = 2_000_000
ROW = "_row"
"""a column of the log's own: the running number of a record, by which events find their step in the end"""
Indices = NDArray[np.int64]
Prepare = Callable[[Iterable[bytes]], Iterator[bytes]]
"""brings the parts of a record that stands on several lines together on one"""


@dataclass
class Piece:
    """Records of one shape within a chunk: their lines, and a column of numbers for each name."""

    kind: str
    lines: Indices
    names: list[str]
    values: NDArray[np.float64]


@dataclass
class TextLog:
    """What a stretch of a text log holds."""

    parse: Parse
    prepare: Prepare | None = None
    rows: Rows = field(default_factory=Rows)
    evals: dict[str, list[tuple[NDArray[np.float64], NDArray[np.float64]]]] = field(default_factory=dict)
    """steps and values; of the names in `carried`, in place of the step, how many records came before"""
    carried: set[str] = field(default_factory=set)
    events: list[tuple[int, str, str]] = field(default_factory=list)
    """how many records came before, kind, text"""
    events_lost: int = 0
    unreadable: int = 0
    """lines that have the shape of a record, and a number that cannot be read"""
    without_step: int = 0
    _shapes: dict[bytes, Template | Reading | None] = field(default_factory=dict)
    _evals: int = 0

    def feed(self, chunks: Iterable[bytes]) -> TextLog:
        for chunk in chunks if self.prepare is None else self.prepare(chunks):
            self.add(chunk)
        return self

    def add(self, chunk: bytes) -> None:
        shapes = skeletons(chunk)
        if len(shapes) >= WORTH_A_TEMPLATE and len(set(shapes)) == 1 and self._uniform(chunk, shapes):
            return
        lines = chunk.split(b"\n")
        groups: dict[bytes, list[int]] = {}
        for i, shape in enumerate(shapes):
            group = groups.get(shape)
            if group is None:
                groups[shape] = [i]
            else:
                group.append(i)
        pieces: list[Piece] = []
        others: list[int] = []
        for shape, members in groups.items():
            if not self._group(shape, members, lines, pieces):
                others += members
        before = self.rows.seen
        at = self._train([piece for piece in pieces if piece.kind == TRAIN])
        self._evaluations([piece for piece in pieces if piece.kind == EVAL], before, at)
        self._say(lines, others, before, at)

    def _uniform(self, chunk: bytes, shapes: list[bytes]) -> bool:
        """A chunk of records of one shape, taken whole; False if it has to be looked at closer."""
        known = self._known(shapes[0], chunk[: max(0, chunk.find(b"\n"))], len(shapes))
        if not isinstance(known, Template) or known.reading.kind != TRAIN:
            return False
        values = known.take(chunk, len(shapes))
        if values is None:
            return False
        self._train([Piece(TRAIN, np.arange(len(shapes)), [f.name for f in known.reading.fields], values)])
        return True

    def _known(self, shape: bytes, first: bytes, count: int) -> Template | Reading | None:
        """How lines of a shape read, from memory or from the first of them."""
        if shape in self._shapes:
            known = self._shapes[shape]
        else:
            known = self.parse(first) if 0 < len(first) <= LONGEST else None
        if isinstance(known, Reading) and count >= WORTH_A_TEMPLATE:
            known = learn(first, known) or known
        if len(self._shapes) < MOST_SHAPES and len(shape) <= LONGEST_SHAPE:
            self._shapes[shape] = known
        return known

    def _group(self, shape: bytes, members: list[int], lines: list[bytes], pieces: list[Piece]) -> bool:
        """Read the lines of one shape; False if they are no records."""
        known = self._known(shape, lines[members[0]], len(members))
        if known is None:
            return False
        if isinstance(known, Template) and len(members) >= WORTH_A_TEMPLATE:
            values = known.take(b"\n".join([lines[i] for i in members]), len(members))
            if values is not None:
                names = [f.name for f in known.reading.fields]
                pieces.append(Piece(known.reading.kind, np.array(members), names, values))
                return True
        self._one_by_one(members, lines, pieces)
        return True

    def _one_by_one(self, members: list[int], lines: list[bytes], pieces: list[Piece]) -> None:
        found: dict[tuple[str, tuple[str, ...]], tuple[list[int], list[list[float]]]] = {}
        for i in members:
            reading = self.parse(lines[i])
            values = reading.values(lines[i]) if reading is not None else {}
            if reading is None or not values or (reading.has("step") and "step" not in values):
                self.unreadable += 1
                continue
            where, table = found.setdefault((reading.kind, tuple(values)), ([], []))
            where.append(i)
            table.append(list(values.values()))
        for (kind, names), (where, table) in found.items():
            pieces.append(Piece(kind, np.array(where), list(names), np.array(table)))

    def _train(self, pieces: list[Piece]) -> Indices:
        """Put the records into the order of the file; gives the lines they stand in."""
        if not pieces:
            return np.empty(0, dtype=np.int64)
        where = np.concatenate([piece.lines for piece in pieces])
        order = np.argsort(where, kind="stable")
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        block = Block(len(where))
        begin = 0
        for piece in pieces:
            at = place[begin : begin + len(piece.lines)]
            begin += len(piece.lines)
            for i, name in enumerate(piece.names):
                if len(pieces) == 1:
                    block.columns[name] = np.ascontiguousarray(piece.values[order, i])
                    continue
                if name not in block.columns:
                    block.columns[name] = np.full(block.length, np.nan)
                    block.present[name] = np.zeros(block.length, dtype=bool)
                block.columns[name][at] = piece.values[:, i]
                block.present[name][at] = True
        self._number(block)
        for name in [name for name, there in block.present.items() if there.all()]:
            del block.present[name]
        self.rows.add(block)
        return where[order]

    def _number(self, block: Block) -> None:
        """Count the records. One without a step gets its running number."""
        block.columns[ROW] = self.rows.seen + np.arange(block.length, dtype=np.float64)
        there = block.there("step")
        if not there.all():
            self.without_step += int((~there).sum())
            block.columns["step"] = np.where(there, block.columns.get("step", np.nan), block.columns[ROW])
            block.present.pop("step", None)

    def _evaluations(self, pieces: list[Piece], before: int, at: Indices) -> None:
        for piece in pieces:
            stepped = "step" in piece.names
            step = piece.values[:, piece.names.index("step")] if stepped else before + np.searchsorted(at, piece.lines)
            for i, name in enumerate(piece.names):
                if name == "step" or self._evals >= MOST_EVALS:
                    continue
                if not stepped:
                    self.carried.add(name)
                self._evals += len(step)
                self.evals.setdefault(name, []).append((step.astype(np.float64), piece.values[:, i].copy()))

    def _say(self, lines: list[bytes], others: list[int], before: int, at: Indices) -> None:
        others.sort()
        found, lost = events.scan([lines[i] for i in others])
        self.events_lost += lost
        for event in found:
            if len(self.events) >= MOST_EVENTS:
                self.events_lost += 1
                continue
            self.events.append((before + int(np.searchsorted(at, others[event.line])), event.kind, event.text))
