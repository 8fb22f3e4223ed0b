"""Separates the runs of one file: fenced blocks of a page, runs appended to one log. Also replaces steps and losses."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from holdfast.diagnosis.importers.reading.described_line import GENERIC
from holdfast.diagnosis.importers.reading.log_source import SAMPLE_BYTES, LogSource
from holdfast.diagnosis.importers.reading.normalize import starts_afresh
from holdfast.diagnosis.importers.reading.text_format import described_format
from holdfast.diagnosis.model.table import Series, Table

_FENCE = re.compile(rb"^(?:[ \t>]{0,8}```+[^\n`]*|~~~+ *\w*)$", re.MULTILINE)
_RECORD_IN_FENCE = re.compile(rb"`[^\n]*[:=] ?[-+]?[\d.]")
_RUN_HEADING = re.compile(
    rb"(?mi)^[^\w\n]*(?:(?:\w+ ){0,4}(?:fold|run|trial|seed|experiment|split|repeat)\b[ :=#_-]{0,3}\d{1,6}\b"
    rb"(?![^\n]*loss)[^\n]{0,60}$"
    rb"|=+ Training Loss \(|Namespace\(|(?:\$ )?python3? [^\n]{0,99}\.py\b)"
)
"""lines that begin a run: `=== Fold 2/5 ===`, the seed, the command, its options"""
_CLOCK = re.compile(rb"\d\d:\d\d:\d\d")
_OF_RECORDS = re.compile(rb"(?i)epoch|step|iter|batch|train|val|test|loss|save|saving|load|checkpoint")
"""words of lines that a run writes again and again; the first line of a log without them begins a run wherever it recurs"""
_MAX_RUNS = 200
_MIN_RECORDS = 3
_MAX_IN_PROSE = 4
"""sentences of a page that look like records"""


def fenced_blocks(source: LogSource) -> list[LogSource]:
    """Return the fenced blocks of a Markdown page, each as a source of its own; none if the file is no page.

    A log may hold fences too, in generated text. It is a page if most of its records are inside of them.
    """
    if source.size > SAMPLE_BYTES or source.is_gzipped or source.is_utf16 or source.end is not None:
        return []
    data = source.head(source.size)
    if b"```" not in data and b"~~~" not in data:
        return []
    fences = list(_FENCE.finditer(data.replace(b"\r\n", b" \n")))
    pairs = list(zip(fences[::2], [*fences[1::2], None], strict=False))
    outside = b"\n".join(data[a:b] for a, b in _gaps(pairs, len(data)))
    inside = b"\n".join(data[a.end() : b.start() if b is not None else len(data)] for a, b in pairs)
    generic = described_format(GENERIC)
    in_prose = generic.count_records(outside)[0]
    if not pairs or in_prose > max(_MAX_IN_PROSE, generic.count_records(inside)[0]):
        return []
    blocks = []
    for opening, closing in pairs:
        end = closing.start() if closing is not None else len(data)
        start = opening.end() + 1
        if _RECORD_IN_FENCE.search(opening[0]):  # text right behind the fence
            start = opening.start() + len(opening[0]) - len(opening[0].lstrip(b" \t>`"))
        if data[start:end].strip():
            line = data.count(b"\n", 0, start) + 1
            blocks.append(LogSource(source.path, start=start, end=end, line=line))
    return blocks


def cut_at_run_headings(source: LogSource) -> list[LogSource]:
    """Return the stretches between lines that begin a run, such as `Fold 2`; none unless several have records."""
    if source.size > SAMPLE_BYTES or source.is_gzipped or source.is_utf16 or source.end is not None:
        return []
    data = source.head(source.size)
    generic = described_format(GENERIC, None, data)
    first = data.lstrip().split(b"\n", 1)[0]
    is_heading = _CLOCK.search(first) is not None and _OF_RECORDS.search(first) is None and len(first) < 300
    again = re.sub(rb"\d+", rb"\\d+", re.escape(first)) if is_heading else rb"(?!)"
    starts = sorted(
        match.start() for found in (_RUN_HEADING, re.compile(b"(?m)^" + again)) for match in found.finditer(data)
    )
    sections: list[tuple[int, int]] = []
    begin = broken_off = 0
    for start, end in pairwise([*starts, len(data)]) if 1 < len(starts) <= _MAX_RUNS else ():
        if count := generic.count_records(data[start:end].replace(b"\r", b"\n"))[1]:
            sections.append((begin, end))
            begin, broken_off = end, broken_off + (count < _MIN_RECORDS)
    if 2 * broken_off > len(sections) or len(sections) < 2:
        return []
    sections[-1] = (sections[-1][0], len(data))
    return [LogSource(source.path, start=a, end=b, line=data.count(b"\n", 0, a) + 1) for a, b in sections]


def number_runs(runs: list[Table]) -> list[Table]:
    """Return the runs of a file without those that were broken off at once, if others were not."""
    long = [run for run in runs if len(run.series("loss").step) >= _MIN_RECORDS]
    if len(long) < len(runs) and long:
        long[0].add_limit(
            "runs_left", f"{len(runs) - len(long)} runs of fewer than {_MIN_RECORDS} records are left out"
        )
    runs = long or runs
    for number, run in enumerate(runs, 1):
        if len(runs) > 1:
            run.facts["run"] = f"run {number} of {len(runs)} in this file"
    return runs


def begin_alike(runs: list[Table]) -> bool:
    """Return whether the steps of all runs begin at about the same number: a run that was resumed begins later."""
    if not all(len(run) for run in runs) or len({run.unit for run in runs} - {"record"}) > 1:
        return False
    first = min(run.step[0] for run in runs)
    return all(run.step[0] - first <= 0.1 * max(np.ptp(other.step) for other in runs) for run in runs)


def _gaps(pairs: list[tuple[re.Match[bytes], re.Match[bytes] | None]], length: int) -> list[tuple[int, int]]:
    starts = [0, *(closing.end() if closing is not None else length for _, closing in pairs)]
    return list(zip(starts, [*(opening.start() for opening, _ in pairs), length], strict=True))


def split_runs(table: Table) -> list[Table]:
    """Return a table for each run that was appended to one log: its step and its loss begin again.

    A run with fewer than three losses was broken off; it is left out if a longer one exists.
    """
    starts = _starts_without_step(table) if table.unit == "record" else np.flatnonzero(np.diff(table.step) < 0) + 1
    if not len(starts) or any(event.kind in ("restart", "begin") for event in table.events):
        return [table]
    if table.unit != "record":
        starts = starts[starts_afresh(table, starts)]
    if not len(starts):
        return [table]
    bounds = [0, *starts.tolist(), len(table)]
    runs = [select_rows(table, first, stop) for first, stop in pairwise(bounds)]
    for name, series in table.evals.items():
        if table.unit == "record":
            parts = [0, *np.searchsorted(series.step, table.step[starts]).tolist(), len(series.step)]
        elif len(series.step) == len(table):
            parts = bounds
        else:
            parts = [0, *(np.flatnonzero(np.diff(series.step) < 0) + 1).tolist(), len(series.step)]
        if len(parts) == 2:  # one run has evaluations: the first that is as long
            at = next((i for i, run in enumerate(runs) if run.step[-1] >= series.step[-1]), len(runs) - 1)
            parts = [0] * (at + 1) + [len(series.step)] * (len(runs) - at)
        if len(parts) == len(bounds):
            for run, first, stop in zip(runs, parts, parts[1:], strict=False):
                run.evals[name] = Series(series.step[first:stop], series.value[first:stop])
    if table.unit == "record":
        for run in runs:
            run.evals = {name: Series(series.step - run.step[0], series.value) for name, series in run.evals.items()}
            run.step = run.step - run.step[0]
    for run in runs:
        run.evals = {name: series for name, series in run.evals.items() if len(series.step)}
    return number_runs(runs)


def _starts_without_step(table: Table) -> NDArray[np.intp]:
    """Return the records without a step at which the epoch is back at its first value."""
    epoch = table.columns.get("epoch")
    if epoch is None or not table.present["epoch"].all():
        return np.empty(0, dtype=np.intp)
    return np.flatnonzero((np.diff(epoch) < 0) & (epoch[1:] <= epoch[0])) + 1


def select_rows(table: Table, first: int, stop: int) -> Table:
    """Return the rows of a table as a run of its own. Evaluations and events follow by their steps, if they tell."""
    rows = slice(first, stop)
    columns = {name: values[rows] for name, values in table.columns.items()}
    present = {name: values[rows] for name, values in table.present.items()}
    steps = table.step[rows]
    is_last = stop == len(table)
    limits = [limit for limit in table.limits if limit.code not in ("steps_backwards", "mixed_interval")]
    return replace(
        table, step=steps, columns=columns, present=present, limits=limits, facts=dict(table.facts),
        events=list(table.events) if is_last else [], evals=dict(table.evals) if is_last else {},
    )  # fmt: skip


def use_as_step(table: Table, column: str) -> None:
    """Take the values of a column as the steps. Rows without a value keep the step before."""
    values, present = table.columns.pop(column), table.present.pop(column)
    known = np.flatnonzero(present & np.isfinite(values))
    if len(known):
        before = np.maximum(np.searchsorted(known, np.arange(len(values)), side="right") - 1, 0)
        table.step, table.unit = values[known[before]], "step"
        table.limits = [limit for limit in table.limits if limit.code != "no_step"]


def use_evaluation(table: Table, name: str) -> None:
    """Make the records of a series the training records: the user says that it is the loss."""
    series = table.evals.pop(name)
    table.step = series.step.copy()
    table.columns, table.present = {"loss": series.value.copy()}, {"loss": np.ones(len(series.step), dtype=bool)}
