"""Reads a text log chunk by chunk: the parser of the format reads the records, all other lines are scanned for events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from holdfast.diagnosis.importers.reading.column_blocks import ColumnBlock, Floats, RecordStore
from holdfast.diagnosis.importers.reading.events import find_events
from holdfast.diagnosis.importers.reading.parsed_line import EVAL, TRAIN, LineParser, ParsedLine
from holdfast.diagnosis.importers.reading.vectorized import LineTemplate, learn_template, line_shapes
from holdfast.diagnosis.model.table import MAX_EVENTS

MIN_LINES_FOR_TEMPLATE = 24
MAX_CACHED_SHAPES, MAX_CACHED_SHAPE_BYTES = 8_000, 8_192
MAX_EVAL_VALUES = 2_000_000
RECORD_INDEX = "_row"
"""A column with the running number of each record. Events and evaluations without a step are placed by it."""
STEPLESS = "_stepless"
"""A column that is present in records whose step is their number."""
Indices = NDArray[np.int64]
LineMerger = Callable[[Iterable[bytes]], Iterator[bytes]]
"""Rewrites chunks so that a record printed on several lines is on one."""


@dataclass
class RecordGroup:
    """Records of one shape in a chunk: the indices of their lines, and a column of values for each name."""

    kind: str
    lines: Indices
    names: list[str]
    values: Floats


@dataclass
class TextReader:
    """Collects the records, evaluations and events of a text log."""

    parse: LineParser
    merge_lines: LineMerger | None = None
    records: RecordStore = field(default_factory=RecordStore)
    evals: dict[str, list[tuple[Floats, Floats]]] = field(default_factory=dict)
    """steps and values; for a name in `evals_without_step`, the number of records before it instead of the step"""
    evals_without_step: set[str] = field(default_factory=set)
    events: list[tuple[int, str, str]] = field(default_factory=list)
    """number of records before the event, kind, text"""
    dropped_events: int = 0
    unreadable_lines: int = 0
    """lines with the shape of a record and a number that cannot be read"""
    _known_shapes: dict[bytes, LineTemplate | ParsedLine | None] = field(default_factory=dict)
    _eval_values: int = 0

    def read(self, chunks: Iterable[bytes]) -> TextReader:
        for chunk in chunks if self.merge_lines is None else self.merge_lines(chunks):
            self._read_chunk(chunk)
        return self

    def _read_chunk(self, chunk: bytes) -> None:
        shapes = line_shapes(chunk)
        if len(shapes) >= MIN_LINES_FOR_TEMPLATE and len(set(shapes)) == 1 and self._read_uniform(chunk, shapes):
            return
        lines = chunk.split(b"\n")
        lines_by_shape: defaultdict[bytes, list[int]] = defaultdict(list)
        for i, shape in enumerate(shapes):
            lines_by_shape[shape].append(i)
        groups: list[RecordGroup] = []
        other_lines: list[int] = []
        for shape, members in lines_by_shape.items():
            known = self._lookup(shape, lines[members[0]], len(members))
            parsed = known.parsed if isinstance(known, LineTemplate) else known
            if parsed is None or parsed.fields[0].name.startswith("_"):  # a heading may report an event
                other_lines += members
            if known is None:
                continue
            values = None
            if isinstance(known, LineTemplate) and len(members) >= MIN_LINES_FOR_TEMPLATE:
                values = known.extract(b"\n".join([lines[i] for i in members]), len(members))
                if values is not None:
                    names = [field.name for field in known.parsed.fields]
                    groups.append(RecordGroup(known.parsed.kind, np.array(members), names, values))
            if values is None:
                groups += self._read_line_by_line(members, lines)
        before = self.records.added
        record_lines = self._add_records([group for group in groups if group.kind == TRAIN])
        self._add_evals([group for group in groups if group.kind == EVAL], before, record_lines)
        self._add_events(lines, sorted(other_lines), before, record_lines)

    def _read_uniform(self, chunk: bytes, shapes: list[bytes]) -> bool:
        """Read a chunk whose lines all have one shape, without splitting it. Returns False if that is not possible."""
        known = self._lookup(shapes[0], chunk[: max(0, chunk.find(b"\n"))], len(shapes))
        if not isinstance(known, LineTemplate) or known.parsed.kind != TRAIN:
            return False
        values = known.extract(chunk, len(shapes))
        if values is None:
            return False
        names = [field.name for field in known.parsed.fields]
        self._add_records([RecordGroup(TRAIN, np.arange(len(shapes)), names, values)])
        return True

    def _lookup(self, shape: bytes, first_line: bytes, count: int) -> LineTemplate | ParsedLine | None:
        """Return how to read lines of a shape, from the cache or from the first of them; None if they are no records."""
        if shape in self._known_shapes:
            known = self._known_shapes[shape]
        else:
            known = self.parse(first_line) if first_line else None
        if isinstance(known, ParsedLine) and count >= MIN_LINES_FOR_TEMPLATE:
            known = learn_template(first_line, known) or known
        if len(self._known_shapes) < MAX_CACHED_SHAPES and len(shape) <= MAX_CACHED_SHAPE_BYTES:
            self._known_shapes[shape] = known
        return known

    def _read_line_by_line(self, members: list[int], lines: list[bytes]) -> list[RecordGroup]:
        by_names: dict[tuple[str, tuple[str, ...]], tuple[list[int], list[list[float]]]] = {}
        for i in members:
            parsed = self.parse(lines[i])
            values = parsed.values(lines[i]) if parsed is not None else {}
            if parsed is None or not values or (parsed.has("step") and "step" not in values):
                self.unreadable_lines += 1
                continue
            indices, rows = by_names.setdefault((parsed.kind, tuple(values)), ([], []))
            indices.append(i)
            rows.append(list(values.values()))
        return [
            RecordGroup(kind, np.array(indices), list(names), np.array(rows))
            for (kind, names), (indices, rows) in by_names.items()
        ]

    def _add_records(self, groups: list[RecordGroup]) -> Indices:
        """Store the records in the order of the file. Returns the indices of their lines."""
        if not groups:
            return np.empty(0, dtype=np.int64)
        lines = np.concatenate([group.lines for group in groups])
        order = np.argsort(lines, kind="stable")
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        block = ColumnBlock(len(lines))
        start = 0
        for group in groups:
            at = rank[start : start + len(group.lines)]
            start += len(group.lines)
            for i, name in enumerate(group.names):
                if len(groups) == 1:
                    block.columns[name] = np.ascontiguousarray(group.values[order, i])
                    continue
                if name not in block.columns:
                    block.columns[name] = np.full(block.length, np.nan)
                    block.present[name] = np.zeros(block.length, dtype=bool)
                block.columns[name][at] = group.values[:, i]
                block.present[name][at] = True
        index = block.columns[RECORD_INDEX] = self.records.added + np.arange(block.length, dtype=np.float64)
        has_step = block.is_present("step")
        if not has_step.all():
            block.columns["step"] = np.where(has_step, block.columns.get("step", np.nan), index)
            block.columns[STEPLESS], block.present[STEPLESS] = index, ~has_step
            block.present.pop("step", None)
        for name in [name for name, present in block.present.items() if present.all()]:
            del block.present[name]
        self.records.add(block)
        return lines[order]

    def _add_evals(self, groups: list[RecordGroup], before: int, record_lines: Indices) -> None:
        for group in groups:
            has_step = "step" in group.names
            if has_step:
                steps = group.values[:, group.names.index("step")]
            else:
                steps = (before + np.searchsorted(record_lines, group.lines)).astype(np.float64)
            for i, name in enumerate(group.names):
                if name == "step" or self._eval_values >= MAX_EVAL_VALUES:
                    continue
                if not has_step:
                    self.evals_without_step.add(name)
                self._eval_values += len(steps)
                self.evals.setdefault(name, []).append((steps.copy(), group.values[:, i].copy()))

    def _add_events(self, lines: list[bytes], other_lines: list[int], before: int, record_lines: Indices) -> None:
        events, dropped = find_events([lines[i] for i in other_lines])
        room = max(0, MAX_EVENTS - len(self.events))
        self.dropped_events += dropped + len(events[room:])
        for event in events[:room]:
            at = before + int(np.searchsorted(record_lines, other_lines[event.line]))
            self.events.append((at, event.kind, event.text))
