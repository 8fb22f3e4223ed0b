"""Reads the logs of training runs into tables.

    read(path)            every run in a file or folder, as tables
    detect_format(path)   the name of its format
    FORMATS               every format by name, with a description

The content of a file decides its format, never its name alone. A file without a metric is refused: LogRefused gives the
reason. formats/ holds a module for each format; reading/ holds what they share.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis.importers.formats import (
    described,
    hf_trainer_state,
    rundir,
    tables,
    tensorboard,
    wandb_csv,
    wandb_history,
)
from holdfast.diagnosis.importers.reading.column_names import NoSuchColumn
from holdfast.diagnosis.importers.reading.csv_file import detect_header
from holdfast.diagnosis.importers.reading.described_line import GENERIC
from holdfast.diagnosis.importers.reading.described_table import CSV, JSON_LINES, JSON_VALUE, MAX_JSON_BYTES, find_rows
from holdfast.diagnosis.importers.reading.json_lines import load_json, sample_objects
from holdfast.diagnosis.importers.reading.log_source import LogSource
from holdfast.diagnosis.importers.reading.normalize import rename_column
from holdfast.diagnosis.importers.reading.runs import (
    begin_alike,
    cut_at_run_headings,
    fenced_blocks,
    number_runs,
    split_runs,
    use_as_step,
    use_evaluation,
)
from holdfast.diagnosis.importers.reading.text_format import describe_no_metrics, described_format
from holdfast.diagnosis.importers.reading.text_reader import TextReader
from holdfast.diagnosis.model.table import Table

Mapped = Mapping[str, str] | None
"""The user's --map options: Holdfast's name of a signal -> its column in the log."""

_DESCRIBED_FORMATS = {description.name: description for description in described.all_descriptions()}
_TABLE_FORMATS = {description.name: description for description in tables.DESCRIPTIONS}
_FILE_FORMATS: dict[str, tuple[str, Callable[[LogSource, Mapped], list[Table]]]] = {
    **{
        module.NAME: (module.DESCRIPTION, module.read)
        for module in (hf_trainer_state, tensorboard, wandb_csv, wandb_history)
    },
    **{name: (table_format.description, table_format.read) for name, table_format in _TABLE_FORMATS.items()},
}
FORMATS: dict[str, str] = {
    rundir.NAME: rundir.DESCRIPTION,
    **{name: description for name, (description, _) in _FILE_FORMATS.items()},
    **{name: text_format.description for name, text_format in _DESCRIBED_FORMATS.items()},
}
"""Every format by name, with a description."""

_JSON_START = re.compile(rb"""\s*(\{\s*["}]|\[\s*[\[{"\]])""")
_STATEMENT = re.compile(
    rb"(?m)^[ \t]*(?:(?:def|class|if|for|while|with) .+:|import \w+|from [\w.]+ import .+|return\b.*|@\w+.*)[ \t]*$"
)
"""a line of a program; many of them, and hardly a loss, are no log"""
DETECTION_BYTES = 256 << 10
"""bytes at each end of a sample of a text log that decide its format"""
MAX_FILES = 5000
MAX_FILES_READ = 40


def read(path: str | os.PathLike[str], *, mapping: Mapped = None, format: str | None = None) -> list[Table]:
    """Return every run in a file or folder. Raises LogRefused if there is none.

    `mapping` gives the log's name for a signal: {"loss": "train_nll", "step": "global_step"}. `format` is a name from
    FORMATS; without it the content decides.
    """
    if format is not None and format not in FORMATS:
        raise LogRefused(str(path), f"there is no format {format!r}. Formats: {', '.join(FORMATS)}")
    try:
        reader = _read_folder if _is_folder(Path(path)) else _read_file
        tables = reader(Path(path), mapping, format)
        for table in tables:
            _apply_mapping(table, mapping)
    except NoSuchColumn as error:
        raise LogRefused(str(path), str(error)) from None
    return [run for table in tables for run in split_runs(table)]


def detect_format(path: str | os.PathLike[str]) -> str:
    """Return the format of a file or folder. Raises LogRefused if it is not a log."""
    return _list_folder(Path(path))[0] if _is_folder(Path(path)) else _detect_file_format(LogSource(path), None)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError) as error:
        raise LogRefused(str(path), f"cannot be read: {error}") from None


def _read_file(path: Path, mapping: Mapped, format: str | None) -> list[Table]:
    source = LogSource(path)
    blocks = fenced_blocks(source)
    if not blocks:
        return _read_headed_runs(source, path, mapping, format) or _read_source(source, path, mapping, format)
    found: list[Table] = []
    for block in blocks:
        with contextlib.suppress(LogRefused):
            tables = [table for table in _read_source(block, path, mapping, format) if len(table) or table.evals]
            for table in tables:
                table.facts["line"] = block.line
            found += tables
    if not found:
        raise LogRefused(str(path), f"Markdown with {len(blocks)} fenced blocks, none of which is a log")
    return found


def _read_headed_runs(source: LogSource, path: Path, mapping: Mapped, format: str | None) -> list[Table]:
    """Return the runs of a file with a heading before each; none if one continues the one before."""
    tables: list[Table] = []
    for part in cut_at_run_headings(source):
        with contextlib.suppress(LogRefused):
            tables.append(_read_source(part, path, mapping, format)[0])
    return number_runs(tables) if tables and begin_alike(tables) else []


def _read_source(source: LogSource, path: Path, mapping: Mapped, format: str | None) -> list[Table]:
    name = format or _detect_file_format(source, mapping)
    if name == rundir.NAME:
        if not rundir.is_run_directory(path.parent):
            raise LogRefused(str(path), "not in a run directory: no metrics.jsonl or journal.jsonl next to it")
        return rundir.read(path.parent)
    if name in _FILE_FORMATS:
        return _FILE_FORMATS[name][1](source, mapping)
    tables = described_format(_DESCRIBED_FORMATS[name], mapping, source.sample).read(source)
    if name == GENERIC.name and mapping is None and format is None and all(map(_is_one_value, tables)):
        raise LogRefused(str(path), "one value of a loss, without a step or another metric: a sentence, or too little")
    return tables


def _is_one_value(table: Table) -> bool:
    is_alone = len(table) == 1 and table.unit == "record" and list(table.columns) == ["loss"] and not table.evals
    return is_alone and bool(np.isfinite(table.columns["loss"]).all())


def _detect_file_format(source: LogSource, mapping: Mapped) -> str:
    if tensorboard.looks_like(source.head(64)):
        return tensorboard.NAME
    if wandb_history.is_parquet(source):
        return wandb_history.NAME
    sample = source.sample
    if not sample.strip():
        reason = f"; {source.read_error}" if source.read_error else ""
        raise LogRefused(source.name, f"{source.size} bytes of blanks only{reason}")
    if source.path.name == "metrics.jsonl" and rundir.is_run_directory(source.path.parent):
        return rundir.NAME
    if hf_trainer_state.looks_like(sample):
        return hf_trainer_state.NAME
    if wandb_history.looks_like(sample):
        return wandb_history.NAME
    if _JSON_START.match(sample) and _is_json_of_records(source):
        return _table_format(JSON_VALUE, [])
    if objects := sample_objects(sample):
        return _table_format(JSON_LINES, list(dict.fromkeys(name for row in objects for name in row)))
    if header := detect_header(sample, source.path.stem):
        return wandb_csv.NAME if wandb_csv.looks_like(header) else _table_format(CSV, header)
    return _detect_text_format(source, sample, mapping)


def _table_format(kind: str, names: list[str]) -> str:
    return next(name for name, table_format in _TABLE_FORMATS.items() if table_format.fits(kind, names))


def _is_json_of_records(source: LogSource) -> bool:
    """Return whether the file is one JSON value that holds records."""
    if source.size > MAX_JSON_BYTES:
        return False
    try:
        return bool(find_rows(load_json(source.text(MAX_JSON_BYTES))))
    except (ValueError, LogRefused):
        return False


def _detect_text_format(source: LogSource, sample: bytes, mapping: Mapped) -> str:
    """Return the format with a pattern for its records that finds the most losses, else the format whose signature fits."""
    start, end = sample[:DETECTION_BYTES], sample[-DETECTION_BYTES:]
    sample = start + b"\n" + end if len(sample) > 2 * DETECTION_BYTES else sample
    generic_losses, generic_records = described_format(GENERIC, mapping, sample).count_records(sample)
    patterned = {name: d for name, d in _DESCRIBED_FORMATS.items() if d.record}
    losses = {name: described_format(d, mapping, sample).count_records(sample)[0] for name, d in patterned.items()}
    best = max(losses, key=lambda name: losses[name], default=GENERIC.name)
    if losses and losses[best] and losses[best] * 4 >= generic_losses:
        return best
    is_program = generic_losses < 3 and len(_STATEMENT.findall(sample)) > 0.1 * sample.count(b"\n")
    if is_program or (not generic_losses and not generic_records):
        raise LogRefused(source.name, _describe_content(source, sample))
    signed = (name for name, d in _DESCRIBED_FORMATS.items() if d.signature and re.search(d.signature.encode(), sample))
    return next(signed, GENERIC.name)


def _describe_content(source: LogSource, sample: bytes) -> str:
    """Return the reason for refusing a file that is not a log, with a description of its content."""
    head = source.head(4096)
    control_bytes = sum(byte < 9 or 13 < byte < 27 for byte in head)
    if control_bytes * 20 > len(head) and not source.is_utf16:
        return (
            f"{source.size} bytes that are not text, and not in a known format; `holdfast diagnose --help` lists them"
        )
    if _JSON_START.match(sample) and not sample_objects(sample):
        return "JSON, but neither a trainer_state.json nor one object on each line; export the log as JSON lines or CSV"
    return describe_no_metrics(TextReader(lambda line: None).read([sample]), source)


def _list_folder(folder: Path) -> tuple[str, list[Path]]:
    """Return the format of a folder and its files: a run directory, checkpoints, event files, or single "files"."""
    if rundir.is_run_directory(folder):
        return rundir.NAME, []
    states, event_files, others = [], [], []
    try:
        os.scandir(folder).close()  # os.walk hides errors, so check that the folder can be read
        for count, (root, subfolders, files) in enumerate(os.walk(folder)):
            subfolders.sort()
            if count > MAX_FILES:
                break
            is_top = root == str(folder)
            if is_top:
                others += [run for name in subfolders[:MAX_FILES] if rundir.is_run_directory(run := folder / name)]
            for name in sorted(files):
                file = Path(root, name)
                if name == "trainer_state.json":
                    states.append(file)
                elif "tfevents" in name:
                    event_files.append(file)
                elif is_top and not name.startswith("."):
                    others.append(file)
    except OSError as error:
        raise LogRefused(str(folder), f"cannot be read: {error.strerror}") from None
    if states:
        return hf_trainer_state.NAME, states[:MAX_FILES]
    if event_files:
        return tensorboard.NAME, event_files[:MAX_FILES]
    if not others:
        raise LogRefused(str(folder), "no file in this folder can be a log; name the log, or a run directory")
    return "files", others


def _read_folder(folder: Path, mapping: Mapped, format: str | None) -> list[Table]:
    folder_format, files = _list_folder(folder)
    if folder_format == rundir.NAME:
        return rundir.read(folder)
    if folder_format == hf_trainer_state.NAME and format in (None, folder_format):
        return hf_trainer_state.read_folder(folder, files, mapping)
    if folder_format == tensorboard.NAME and format in (None, folder_format):
        try:
            return tensorboard.read_folder(folder, files, mapping)
        except LogRefused:
            # Event files without a scalar may be next to a log.
            others = [p for p in sorted(folder.iterdir()) if p.is_file() and p not in files and p.name[:1] != "."]
            if not others:
                raise
            files = others
    tables: list[Table] = []
    reasons: list[str] = []
    for file in files[:MAX_FILES_READ]:
        try:
            tables += read(file, mapping=mapping, format=format)
        except LogRefused as error:
            reasons.append(f"{file.name}: {error.reason}")
    if not tables:
        raise LogRefused(str(folder), f"none of its {len(files)} files is a log; {'; '.join(reasons[:3])}"[:800])
    if len(files) > MAX_FILES_READ:
        text = f"only the first {MAX_FILES_READ} of the {len(files)} files in {folder.name} are read"
        tables[-1].add_limit("files_left", text)
    return tables


def _apply_mapping(table: Table, mapping: Mapped) -> None:
    """Rename the columns that the user mapped and the format did not. Raises NoSuchColumn for a missing column."""
    for signal, column in (mapping or {}).items():
        if signal == column or not (table.columns or table.evals):
            continue
        if column in table.columns:
            if signal == "step":
                use_as_step(table, column)
            else:
                rename_column(table, column, signal)
        elif column in table.evals:
            if signal == "loss":
                use_evaluation(table, column)
        elif signal != "step" and (signal not in table.columns or table.format == rundir.NAME):
            raise NoSuchColumn(signal, column, [*table.columns, *table.evals])
    if mapping and table.has("loss"):
        table.limits = [limit for limit in table.limits if limit.code != "no_loss"]
