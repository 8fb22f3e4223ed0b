"""Scores how logs are read: the records of the index, formats without their description, fragments of quiet logs.

    python -m benchmarks.diagnosis.reading [--fragments 500] [--seed 0]

A log is read right if its number of records with a loss is that of the index within 2%, and unit, first and last step
agree. The index numbers the records of some logs instead of reading their steps; then the number of records decides. A
format is left out by removing its description, so that the generic readers must do. A fragment is 5 to 20 consecutive
records of a quiet log.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.detectors.corpus import CONFIDENT, folder, lines
from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis import importers
from holdfast.diagnosis.diagnose import diagnose
from holdfast.diagnosis.importers.reading.runs import select_rows
from holdfast.diagnosis.model.table import Table

_UNITS = {"iter": "step", "record": "step"}
_QUIET_LABELS = {"healthy", "noisy"}
_GENERIC = {"generic_text", "generic_csv", "generic_jsonl", "json_array"}


def read_all(corpus: Path) -> dict[str, list[Table]]:
    """Return the tables of each file of the index; none for a file that is refused."""
    tables = {}
    for entry in lines(corpus / "INDEX.jsonl"):
        try:
            tables[entry["file"]] = importers.read(corpus / entry["file"])
        except LogRefused:
            tables[entry["file"]] = []
    return tables


def has_curve(entry: dict[str, Any]) -> bool:
    return entry["n_points"] > 0 and bool(set(entry["columns"]) - {"lr", "loss_scale", "skipped", "time"})


def is_read_right(entry: dict[str, Any], tables: list[Table]) -> bool:
    """Return whether the runs of a file together, or one of them, are those of the index."""
    return _agrees(entry, tables) or any(_agrees(entry, [table]) for table in tables)


def _agrees(entry: dict[str, Any], tables: list[Table]) -> bool:
    series = [max((t.series("loss"), t.series("reward")), key=lambda s: len(s.step)) for t in tables]
    count = sum(len(s.step) for s in series)
    wanted = entry["n_points"]
    if not count or abs(count - wanted) > max(1, 0.02 * wanted):
        return False
    unit = entry.get("step_unit")
    if unit and _UNITS.get(unit, unit) not in {_UNITS.get(t.unit, t.unit) for t in tables}:
        return False
    first, last, interval = entry["first_step"], entry["last_step"], entry["log_interval"] or 1.0
    if last - first + 1 == wanted and interval == 1:
        return True
    low, high = min(s.step[0] for s in series if len(s.step)), max(s.step[-1] for s in series if len(s.step))
    return bool(abs(low - first) <= interval and abs(high - last) <= interval)


@contextmanager
def without_format(name: str) -> Iterator[None]:
    """Remove one format for a while."""
    registries = (importers._DESCRIBED_FORMATS, importers._TABLE_FORMATS)
    kept = [dict(registry) for registry in registries]
    for registry in registries:
        registry.pop(name, None)
    try:
        yield
    finally:
        for registry, content in zip(registries, kept, strict=True):
            registry.clear()
            registry.update(content)


def leave_one_out(corpus: Path, tables: dict[str, list[Table]]) -> dict[str, list[bool]]:
    """Return for each format which of its logs are still read right without its description."""
    index = {entry["file"]: entry for entry in lines(corpus / "INDEX.jsonl")}
    outcomes: dict[str, list[bool]] = {}
    removable = {*importers._DESCRIBED_FORMATS, *importers._TABLE_FORMATS} - _GENERIC
    for file, read_tables in tables.items():
        name = read_tables[0].format if read_tables else ""
        if name not in removable or not has_curve(index[file]) or not is_read_right(index[file], read_tables):
            continue
        with without_format(name):
            try:
                again = importers.read(corpus / file)
            except LogRefused:
                again = []
        outcomes.setdefault(name, []).append(is_read_right(index[file], again))
    return outcomes


def cut_fragments(corpus: Path, tables: dict[str, list[Table]], count: int, seed: int) -> Iterator[tuple[str, Table]]:
    """Yield random fragments of the quiet logs, as many of each log."""
    rng = random.Random(seed)
    quiet = [
        label["file"]
        for label in lines(corpus / "LABELS.jsonl")
        if label["label"] in _QUIET_LABELS and label["label_confidence"] >= CONFIDENT and not label["events"]
    ]
    longest = {file: max(tables[file], key=len) for file in quiet if tables.get(file)}
    files = [file for file, table in longest.items() if len(table.series("loss").step) >= 20]
    for number in range(count):
        table = longest[files[number % len(files)]]
        rows = np.flatnonzero(table.present["loss"])
        length = rng.randint(5, 20)
        at = rng.randrange(0, max(1, len(rows) - length))
        fragment = select_rows(table, int(rows[at]), int(rows[min(len(rows) - 1, at + length - 1)]) + 1)
        fragment.events, fragment.evals = [], {}
        yield files[number % len(files)], fragment


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fragments", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    corpus = folder()
    if corpus is None:
        print("corpus not found; set HOLDFAST_CORPUS")
        return 1
    tables = read_all(corpus)
    entries = [entry for entry in lines(corpus / "INDEX.jsonl") if has_curve(entry)]
    wrong = [entry["file"] for entry in entries if not is_read_right(entry, tables[entry["file"]])]
    print(f"read right: {len(entries) - len(wrong)} of {len(entries)} = {1 - len(wrong) / len(entries):.3f}")
    for file in wrong:
        print(f"  misread: {file}")
    reassured = [
        file
        for file, runs in tables.items()
        for table in runs
        if not (table.has("loss") or table.has("reward")) and diagnose(table).is_judged
    ]
    print(f"reassured without a judgement: {len(reassured)} {reassured}")
    outcomes = leave_one_out(corpus, tables)
    shares = {name: sum(read) / len(read) for name, read in outcomes.items()}
    print(f"without its own description, mean share read right: {np.mean(list(shares.values())):.2f}")
    for name, read in sorted(outcomes.items()):
        print(f"  {name:<18} {sum(read)} of {len(read)}")
    loud: dict[str, int] = {}
    for file, fragment in cut_fragments(corpus, tables, options.fragments, options.seed):
        if diagnose(fragment).verdicts:
            loud[file] = loud.get(file, 0) + 1
    print(f"fragments with an incident: {sum(loud.values())} of {options.fragments}")
    for file, times in sorted(loud.items(), key=lambda item: -item[1])[:12]:
        print(f"  {times} {file}")
    return int(len(wrong) > 0.05 * len(entries) or bool(reassured) or sum(loud.values()) >= 0.01 * options.fragments)


if __name__ == "__main__":
    raise SystemExit(main())
