"""Defines a format of text logs: how its lines are parsed, and how a file becomes a table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from holdfast.core.base.errors import LogRefused
from holdfast.core.detectors.out_of_memory import explain, parse
from holdfast.diagnosis.importers.reading.column_blocks import Floats
from holdfast.diagnosis.importers.reading.column_names import (
    NoSuchColumn,
    is_part_of_loss,
    is_perplexity,
    pick_customary_losses,
)
from holdfast.diagnosis.importers.reading.described_line import (
    ANY,
    CUSTOMARY,
    HEADING,
    NAMED,
    LogDescription,
    line_parser,
)
from holdfast.diagnosis.importers.reading.log_source import LogSource
from holdfast.diagnosis.importers.reading.normalize import add_source_limits, normalize, restore_hidden_nan
from holdfast.diagnosis.importers.reading.parsed_line import LineParser
from holdfast.diagnosis.importers.reading.rewriting import find_rewriter, find_rows_in_text
from holdfast.diagnosis.importers.reading.steps import arrange_steps
from holdfast.diagnosis.importers.reading.text_reader import RECORD_INDEX, LineMerger, TextReader
from holdfast.diagnosis.model.table import Event, Series, Table, cut_event_text

_DECIDING_BYTES = 256 << 10
_MIN_CUSTOMARY = 3
_SCALE = re.compile(r"(?:reducing|dynamic loss scale from [\d.]+) to (\d[\d.]*\d|\d)", re.IGNORECASE)


@dataclass(frozen=True)
class TextFormat:
    """One format of text logs, ready to read: the parser of its lines."""

    description: LogDescription
    parse: LineParser
    rewrite: LineMerger | None
    accept: str = NAMED
    """which lines are records if the format does not say"""
    mapping: Mapping[str, str] = field(default_factory=dict)
    """the user's: signal -> name in the log"""
    met: set[str] = field(default_factory=set)
    """the names that were found"""

    def count_records(self, sample: bytes) -> tuple[int, int]:
        """Return how many records with a loss, and how many records and evaluations, a sample holds."""
        reader = TextReader(self.parse, self.rewrite).read([sample])
        losses = 0
        if reader.records.blocks:
            block = reader.records.merge()
            is_loss = [name for name in block.columns if name == "loss" or is_part_of_loss(name)]
            is_loss += [name for name in block.columns if is_perplexity(name) or name == "reward"]
            is_loss += pick_customary_losses(block.columns) if self.accept == CUSTOMARY else []
            losses = int(np.any([block.is_present(name) for name in is_loss], axis=0).sum()) if is_loss else 0
        found = {name: parts for name, parts in reader.evals.items() if not name.startswith(HEADING)}
        counts = {name: sum(len(steps) for steps, _ in parts) for name, parts in found.items()}
        return losses, reader.records.added + sum(counts.values())

    def read(self, source: LogSource) -> list[Table]:
        """Read a file into one table. Raises LogRefused if it holds no metric."""
        reader = TextReader(self.parse, self.rewrite).read(source.chunks())
        table = Table(source.name, self.description.name, np.empty(0))
        if reader.records.blocks:
            block = reader.records.merge()
            table.step = block.columns.pop("step")
            for name in list(block.columns):
                table.present[name] = block.is_present(name)
                table.columns[name] = block.columns.pop(name)
        for name, parts in reader.evals.items():
            steps, values = zip(*parts, strict=True)
            table.evals[name] = Series(np.concatenate(steps), np.concatenate(values))
        table.events = [Event(before, kind, cut_event_text(kind, text)) for before, kind, text in reader.events]
        table.dropped = reader.unreadable_lines
        if self.description.first_step:
            _compare_with_bar(table, table.evals.pop(HEADING + "step", None))
        arrange_steps(table)
        self._add_limits(table, reader, source)
        if not len(table) and not table.evals:
            raise LogRefused(source.name, describe_no_metrics(reader, source))
        restore_hidden_nan(table)
        customary = pick_customary_losses(table.columns) if self.accept == CUSTOMARY else []
        normalize(table, unfold_epochs=self.description.counts_within_epoch, parts=tuple(customary))
        _assign_steps(table, reader.evals_without_step)
        _add_loss_scale(table)
        known = {*self.met, *table.columns, *table.evals}
        for signal, column in self.mapping.items():
            if column not in known:
                raise NoSuchColumn(signal, column, [*table.columns, *table.evals])
        return [table]

    def _add_limits(self, table: Table, reader: TextReader, source: LogSource) -> None:
        records = reader.records
        if table.unit == "record":
            table.step = table.step + self.description.first_step
            table.add_limit(
                "no_step", f"the records have no step; they are numbered from {self.description.first_step}"
            )
        if self.description.averaged and table.step_interval() > 1:
            text = f"the loss is the mean of {self.description.averaged}: a spike of one step is diluted"
            table.add_limit("averaged", text)
        if records.kept < records.added:
            text = f"{records.kept} of {records.added} records are kept, including the lowest and highest loss, the highest "
            table.add_limit(
                "downsampled_on_import", text + "gradient norm and the first non-finite value of each stretch"
            )
        if reader.unreadable_lines:
            table.add_limit("lines_lost", f"{reader.unreadable_lines} lines that look like records cannot be read")
        if records.dropped_columns:
            table.add_limit("columns_lost", f"{len(records.dropped_columns)} more columns are not read")
        if reader.dropped_events:
            table.add_limit("events_lost", f"{reader.dropped_events} more events are not kept")
        add_source_limits(table, source)


def described_format(
    description: LogDescription, mapping: Mapping[str, str] | None = None, sample: bytes = b""
) -> TextFormat:
    """Return the format of a description. The sample tells whether records take several lines."""

    rewriter = find_rewriter(description, sample)

    def build(accept: str) -> TextFormat:
        met: set[str] = set()
        parse = line_parser(description, mapping, accept, met, sample)
        return TextFormat(description, parse, rewriter, accept, mapping or {}, met)

    named = build(NAMED)
    if description.record or mapping or not sample or named.count_records(sample[:_DECIDING_BYTES])[0]:
        return named
    losses, records = named.count_records(sample)
    customary, anything = build(CUSTOMARY), build(ANY)
    if not losses and customary.count_records(sample)[0] >= _MIN_CUSTOMARY:
        return customary
    if not records and (rows := find_rows_in_text(sample)) is not None:
        return replace(named, rewrite=rows)
    return named if records else anything


def _assign_steps(table: Table, evals_without_step: set[str]) -> None:
    """Give events, and evaluations without a step, the step of the record before them."""
    index = table.columns.pop(RECORD_INDEX, np.empty(0))
    table.present.pop(RECORD_INDEX, None)
    known = np.flatnonzero(np.isfinite(index))
    index, steps = index[known], table.step[known]

    def step_before(counts: Floats) -> Floats:
        if not len(steps):
            return np.full(len(counts), np.nan)
        before = np.searchsorted(index, counts, side="left") - 1
        return np.where(before >= 0, steps[np.maximum(before, 0)], np.nan)

    for name in evals_without_step & set(table.evals):
        at = step_before(table.evals[name].step)
        first = steps[0] if len(steps) else 0.0
        table.evals[name] = Series(np.where(np.isnan(at), first, at), table.evals[name].value)
    event_steps = step_before(np.array([event.step for event in table.events], dtype=np.float64)).tolist()
    table.events = [
        event._replace(step=int(step) if np.isfinite(step) and abs(step) < 2**62 else None)
        for event, step in zip(table.events, event_steps, strict=True)
    ]


def _compare_with_bar(table: Table, bar: Series | None) -> None:
    """Record that lines are missing, if the progress bar counts far more steps than there are records, unevenly."""
    if bar is None or not len(table):
        return
    at = np.searchsorted(bar.step, table.columns[RECORD_INDEX], side="right") - 1
    gaps = np.diff(bar.value[at[at >= 0]])
    gaps = gaps[gaps > 0]
    reached = float(bar.value.max())
    if reached > 1.5 * len(table) and len(gaps) and np.mean(np.abs(gaps - np.median(gaps)) > 1) > 0.1:
        text = f"most lines are missing: the progress bar reached {reached:g}, with {len(table)} records at uneven distances"
        table.add_limit("lines_lost", text + "; the number of a record is not its step")


def _add_loss_scale(table: Table) -> None:
    """Read the loss scale from the messages about overflows."""
    if table.has("loss_scale"):
        return
    found = [(e.step, match) for e in table.events if e.kind == "overflow" and (match := _SCALE.search(e.text))]
    pairs = [(float(step), float(match[1])) for step, match in found if step is not None]
    if pairs:
        table.evals["loss_scale"] = Series(*np.array(pairs).T)


def describe_no_metrics(reader: TextReader, source: LogSource) -> str:
    """Return the reason for refusing a file without a metric, with the events that it holds."""
    lines = source.sample.count(b"\n") + 1
    reason = f"no step, loss or other metric found in {lines} sampled lines"
    if reader.events:
        counts = Counter(kind for _, kind, _ in reader.events)
        listed = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        reason += f", only events ({listed}); the last: {reader.events[-1][2][:160]}"
        failed = next((found for _, kind, text in reader.events if kind == "oom" and (found := parse(text))), None)
        if failed is not None:
            verdict = explain(failed)
            reason += f". Out of memory, {verdict.kind.replace('_', ' ')}: {verdict.text}. {verdict.cure}".rstrip(". ")
    return reason + ". If the log names its loss differently, try --map loss=NAME"
