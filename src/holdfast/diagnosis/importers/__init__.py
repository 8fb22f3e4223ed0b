"""Importers: one file for each format. Content in, tables out.

    read(path)    every run the file or folder holds, as tables
    sniff(path)   the name of its format
    FORMATS       every format by name, with what it is

A format is told by what a file holds, never by its name alone. What holds no curve is refused (`LogRefused`), and the
reason says what it holds instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis.importers.formats import (
    composer,
    deepspeed,
    fairseq,
    generic_csv,
    generic_jsonl,
    generic_text,
    hf_console,
    hf_trainer_state,
    kempnerforge,
    lightning_csv,
    llamafactory,
    measurements_csv,
    megatron,
    mlperf,
    nanogpt,
    rundir,
    tensorboard,
    torchtitan,
    wandb_csv,
    wandb_history,
)
from holdfast.diagnosis.importers.reading import csv_file as csvfile
from holdfast.diagnosis.importers.reading.column_names import NoSuchColumn
from holdfast.diagnosis.importers.reading.json_lines import looks_like as json_lines
from holdfast.diagnosis.importers.reading.normalize import limit
from holdfast.diagnosis.importers.reading.source import Source
from holdfast.diagnosis.importers.reading.text_format import TextFormat, nothing
from holdfast.diagnosis.importers.reading.text_log import TextLog
from holdfast.diagnosis.model.table import Event, Table

Read = Callable[[Source, Mapping[str, str] | None], list[Table]]

TEXT: dict[str, TextFormat] = {
    module.FORMAT.name: module.FORMAT
    for module in (
        megatron,
        nanogpt,
        hf_console,
        torchtitan,
        kempnerforge,
        composer,
        fairseq,
        mlperf,
        deepspeed,
        generic_text,
    )
}
_TABLES = (measurements_csv, wandb_csv, lightning_csv)
_FILES: dict[str, tuple[str, Read]] = {
    module.NAME: (module.DESCRIPTION, module.read)
    for module in (
        hf_trainer_state, tensorboard, lightning_csv, measurements_csv, wandb_csv, wandb_history, llamafactory, generic_csv,
        generic_jsonl,
    )
}  # fmt: skip

FORMATS: dict[str, str] = {
    rundir.NAME: rundir.DESCRIPTION,
    **{name: description for name, (description, _) in _FILES.items()},
    **{name: form.description for name, form in TEXT.items()},
}
"""every format, and what it is"""

MOST_FILES = 5000
MOST_TRIED = 40


def text_format(name: str, mapping: Mapping[str, str] | None = None) -> TextFormat:
    """A format of text logs by name; the generic one reads with the user's names for columns."""
    return generic_text.form(mapping) if name == "generic_text" and mapping else TEXT[name]


def read(
    path: str | os.PathLike[str], *, mapping: Mapping[str, str] | None = None, format: str | None = None
) -> list[Table]:
    """Every run in a file or folder. LogRefused if there is none, with what is there instead.

    `mapping` says what our columns are called in the log: {"loss": "train_nll", "step": "global_step"}. `format` is a name
    from FORMATS; without it the content decides.
    """
    if format is not None and format not in FORMATS:
        raise LogRefused(str(path), f"there is no format {format!r}; there are: {', '.join(FORMATS)}")
    place = Path(path)
    try:
        tables = _read_folder(place, mapping, format) if _is_folder(place) else _read_file(place, mapping, format)
        for table in tables:
            _rename(table, mapping)
    except NoSuchColumn as error:
        raise LogRefused(str(path), str(error)) from None
    return tables


def _read_file(path: Path, mapping: Mapping[str, str] | None, format: str | None) -> list[Table]:
    source = Source(path)
    name = format or _sniff(source, mapping)
    if name == rundir.NAME:
        if not rundir.is_run(path.parent):
            raise LogRefused(str(path), "is not in a run directory: no metrics.jsonl or journal.jsonl beside it")
        return rundir.read(path.parent)
    if name in TEXT:
        return text_format(name, mapping).read(source)
    return _FILES[name][1](source, mapping)


def sniff(path: str | os.PathLike[str]) -> str:
    """The format of a file or folder, by what it holds. LogRefused if it holds no log."""
    place = Path(path)
    if _is_folder(place):
        return _kind_of_folder(place)[0]
    return _sniff(Source(path), None)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError) as error:
        raise LogRefused(str(path), f"cannot be read: {error}") from None


def _sniff(source: Source, mapping: Mapping[str, str] | None) -> str:
    head = source.head(64)
    if tensorboard.looks_like(head):
        return tensorboard.NAME
    if source.magic == b"PAR1":
        return wandb_history.NAME
    sample = source.sample
    if not sample.strip():
        why = f"; {source.broken}" if source.broken else ""
        raise LogRefused(source.name, f"{source.size} bytes of nothing but blanks{why}")
    if source.path.name == "metrics.jsonl" and rundir.is_run(source.path.parent):
        return rundir.NAME
    if hf_trainer_state.looks_like(sample):
        return hf_trainer_state.NAME
    for lines in (llamafactory, generic_jsonl):
        if lines.looks_like(sample):
            found = wandb_history.NAME if wandb_history.looks_like(sample, head[:4]) else lines.NAME
            return lines.NAME if lines is llamafactory else found
    names = csvfile.looks_like(sample)
    if names:
        return next((table.NAME for table in _TABLES if table.looks_like(names)), generic_csv.NAME)
    return _sniff_text(source, sample, mapping)


def _sniff_text(source: Source, sample: bytes, mapping: Mapping[str, str] | None) -> str:
    """The wording that gives the most records with a loss; failing a loss, the most records."""
    counts = {name: text_format(name, mapping).count(sample) for name in TEXT}
    loose = counts.pop(generic_text.FORMAT.name)
    best = max(counts, key=lambda name: counts[name])
    if mapping and loose[0]:
        return generic_text.FORMAT.name
    if counts[best] >= (1, 1) and counts[best][0] * 2 >= loose[0]:
        return best
    if loose[0]:
        return generic_text.FORMAT.name
    if counts[best][1] and counts[best][1] >= loose[1]:
        return best
    if loose[1]:
        return generic_text.FORMAT.name
    raise LogRefused(source.name, _instead(source, sample))


def _instead(source: Source, sample: bytes) -> str:
    """What a file holds that is no log."""
    head = source.head(4096)
    strange = sum(byte < 9 or 13 < byte < 27 for byte in head)
    if strange * 20 > len(head) and source.encoding is None:
        return f"{source.size} bytes that are not text, and of no format that is known"
    if sample.lstrip()[:1] in (b"{", b"[") and not json_lines(sample):
        return "JSON, but neither a trainer_state.json nor one object a line"
    said = TextLog(lambda line: None).feed([sample]).events
    return nothing([Event(None, kind, text) for _, kind, text in said], source)


def _kind_of_folder(folder: Path) -> tuple[str, list[Path]]:
    if rundir.is_run(folder):
        return rundir.NAME, []
    states, events, others = [], [], []
    try:
        os.scandir(folder).close()  # os.walk passes over what it may not read
        for count, (root, folders, files) in enumerate(os.walk(folder)):
            folders.sort()
            if count > MOST_FILES:
                break
            if root == str(folder):
                others += [run for run in (folder / name for name in folders[:MOST_FILES]) if rundir.is_run(run)]
            for name in sorted(files):
                file = Path(root, name)
                if name == "trainer_state.json":
                    states.append(file)
                elif "tfevents" in name:
                    events.append(file)
                elif root == str(folder) and not name.startswith("."):
                    others.append(file)
    except OSError as error:
        raise LogRefused(str(folder), f"cannot be read: {error.strerror}") from None
    if states:
        return hf_trainer_state.NAME, states[:MOST_FILES]
    if events:
        return tensorboard.NAME, events[:MOST_FILES]
    if not others:
        raise LogRefused(str(folder), "a folder without a file in it that could be a log")
    return "files", others


def _read_folder(folder: Path, mapping: Mapping[str, str] | None, format: str | None) -> list[Table]:
    kind, files = _kind_of_folder(folder)
    if kind == rundir.NAME:
        return rundir.read(folder)
    if kind == hf_trainer_state.NAME and format in (None, kind):
        return hf_trainer_state.read_folder(folder, files, mapping)
    if kind == tensorboard.NAME and format in (None, kind):
        try:
            return tensorboard.read_folder(folder, files, mapping)
        except LogRefused:
            # Event files without a scalar beside a log that has them.
            beside = [p for p in sorted(folder.iterdir()) if p.is_file() and p not in files and p.name[:1] != "."]
            if not beside:
                raise
            files = beside
    tables: list[Table] = []
    reasons: list[str] = []
    for file in files[:MOST_TRIED]:
        try:
            tables += read(file, mapping=mapping, format=format)
        except LogRefused as error:
            reasons.append(f"{file.name}: {error.reason}")
    if not tables:
        raise LogRefused(str(folder), f"none of its {len(files)} files is a log; {'; '.join(reasons[:3])}"[:800])
    if len(files) > MOST_TRIED:
        limit(
            tables[-1],
            "files_left",
            f"of the {len(files)} files in {folder.name} only the first {MOST_TRIED} were read",
        )
    return tables


def _rename(table: Table, mapping: Mapping[str, str] | None) -> None:
    """The user's word on what a column is, where the format did not know it."""
    for ours, theirs in (mapping or {}).items():
        if ours != "step" and theirs in table.columns and theirs != ours:
            table.columns[ours] = table.columns.pop(theirs)
            table.present[ours] = table.present.pop(theirs)
        elif ours != "step" and ours not in table.columns and theirs != ours and table.columns:
            raise NoSuchColumn(ours, theirs, table.columns)
