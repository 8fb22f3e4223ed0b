"""A format of text logs: how its lines read, and how a file of it becomes a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis.importers.reading.line import Parse
from holdfast.diagnosis.importers.reading.normalize import finish, limit
from holdfast.diagnosis.importers.reading.source import Source
from holdfast.diagnosis.importers.reading.text_log import ROW, Prepare, TextLog
from holdfast.diagnosis.model.table import Event, Series, Table


@dataclass(frozen=True)
class TextFormat:
    """One wording. `markers`: without one of them a line, and so a file, is not of this format."""

    name: str
    description: str
    markers: tuple[bytes, ...]
    parse: Parse
    prepare: Prepare | None = None
    polish: Callable[[Table, bytes], None] | None = None
    """the format's own last touch: facts and limits; given the table and a sample of the file"""
    conclude: Callable[[Table], None] | None = None
    """done after everything else, when events have their steps"""
    means: str = ""
    """evaluations that become records where there is nothing finer"""
    first_number: int = 0
    """the number of the first record where records have no step"""
    unfold: bool = True

    def count(self, sample: bytes) -> tuple[int, int]:
        """Records with a loss, and records, in a sample."""
        if not any(marker in sample for marker in self.markers):
            return 0, 0
        log = TextLog(self.parse, self.prepare)
        log.feed([sample])
        block = log.rows.join() if log.rows.blocks else None
        losses = int(block.there("loss").sum()) if block is not None else 0
        losses += sum(len(step) for step, _ in log.evals.get(self.means, []))
        return losses, log.rows.seen + sum(len(step) for parts in log.evals.values() for step, _ in parts)

    def read(self, source: Source) -> list[Table]:
        log = TextLog(self.parse, self.prepare).feed(source.chunks())
        return [self.table(log, source)]

    def table(self, log: TextLog, source: Source) -> Table:
        table = Table(source.name, self.name, np.empty(0))
        if log.rows.blocks:
            block = log.rows.join()
            table.step = block.columns.pop("step")
            for name in list(block.columns):
                table.present[name] = block.there(name)
                table.columns[name] = block.columns.pop(name)
        for name, parts in log.evals.items():
            steps, values = zip(*parts, strict=True)
            table.evals[name] = Series(np.concatenate(steps), np.concatenate(values))
        table.events = [Event(row, kind, text[:300]) for row, kind, text in log.events]
        table.dropped = log.unreadable
        self._limits(table, log, source)
        if not len(table) and not table.evals:
            raise LogRefused(source.name, nothing(table.events, source))
        if self.polish is not None:
            self.polish(table, source.sample)
        finish(table, unfold=self.unfold)
        _place(table, log.carried)
        if self.conclude is not None:
            self.conclude(table)
        return table

    def _limits(self, table: Table, log: TextLog, source: Source) -> None:
        seen = log.rows.seen
        if log.without_step and log.without_step == seen:
            table.step = table.step + self.first_number
            limit(
                table,
                "no_step",
                f"the records carry no step; their running number, from {self.first_number}, stands for it",
            )
        elif log.without_step:
            limit(
                table,
                "no_step",
                f"{log.without_step} of {seen} records carry no step; their running number stands for it",
            )
        if log.rows.kept < seen:
            limit(
                table,
                "downsampled_on_import",
                f"{log.rows.kept} of {seen} records are kept: in every stretch those with the lowest and highest loss, the "
                "highest gradient norm, and the first that is not finite",
            )
        if log.unreadable:
            limit(table, "lines_lost", f"{log.unreadable} lines look like records and cannot be read")
        if log.rows.columns_lost:
            limit(table, "columns_lost", f"{len(log.rows.columns_lost)} further columns are not kept")
        if log.events_lost:
            limit(table, "events_lost", f"{log.events_lost} further events in words are not kept")
        if source.lines_cut:
            limit(table, "lines_cut", f"{source.lines_cut} lines are longer than 1 MB and were read up to there")
        if source.broken:
            limit(table, "truncated", source.broken)


def _place(table: Table, carried: set[str]) -> None:
    """Give events, and evaluations that carry none, the step of the record before them."""
    rows = table.columns.pop(ROW, np.empty(0))
    table.present.pop(ROW, None)
    known = np.flatnonzero(np.isfinite(rows))
    rows, steps = rows[known], table.step[known]

    def at(counts: NDArray[np.float64]) -> NDArray[np.float64]:
        before = np.searchsorted(rows, counts, side="left") - 1
        return (
            np.where(before >= 0, steps[np.maximum(before, 0)], np.nan) if len(steps) else np.full(len(counts), np.nan)
        )

    for name in carried & set(table.evals):
        found = at(table.evals[name].step)
        table.evals[name] = Series(
            np.where(np.isnan(found), steps[0] if len(steps) else 0.0, found), table.evals[name].value
        )
    where = at(np.array([event.step for event in table.events], dtype=np.float64))
    table.events = [event._replace(step=_step(step)) for event, step in zip(table.events, where.tolist(), strict=True)]


def _step(step: float) -> int | None:
    return int(step) if np.isfinite(step) and abs(step) < 2**62 else None


def nothing(events: Sequence[Event], source: Source) -> str:
    """What to say of a file without a curve: what is in it instead."""
    kinds: dict[str, int] = {}
    for event in events:
        kinds[event.kind] = kinds.get(event.kind, 0) + 1
    if kinds:
        said = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        last = events[-1].text[:160]
        return (
            f"no line holds a step with a loss or another metric; it holds events in words ({said}), the last: {last}"
        )
    lines = source.sample.count(b"\n") + 1
    return f"no line holds a step with a loss or another metric ({lines} lines of text were looked at)"
