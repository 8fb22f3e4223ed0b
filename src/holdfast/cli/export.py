"""`holdfast checkpoints export`: writes a checkpoint's model and optimizers in a format that other tools read."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal
from rich.text import Text

from holdfast.cli.output import Json, emit, format_count
from holdfast.cli.run_paths import find_run, is_checkpoint
from holdfast.cli.verify import progress_bar
from holdfast.core.base.clean import clean
from holdfast.core.base.errors import RunDirError, needs_torch
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.entry import CheckpointEntry, read_entry
from holdfast.core.checkpoints.resume import survey
from holdfast.core.checkpoints.verify import verify as verify_bytes
from holdfast.reports.console import console

SCHEMA = "holdfast.checkpoints.export/1"
_SUFFIXES = {"safetensors": ".safetensors", "torch": ".pt", "dcp": ".dcp"}


class ExportFormat(StrEnum):
    """The formats that can be written."""

    safetensors = "safetensors"
    torch = "torch"
    dcp = "dcp"


def export(
    checkpoint: Annotated[
        str,
        typer.Argument(metavar="CHECKPOINT|RUN", help="A checkpoint, or a run for the one that a resume would use."),
    ],
    format: Annotated[
        ExportFormat,
        typer.Option("--format", help="safetensors: the model; torch, dcp: the model and the optimizers."),
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            metavar="PATH",
            help="The new file; for dcp, the new folder. Default: ./NAME.safetensors, .pt, .dcp.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the model of a checkpoint in a format that other tools read.

    Reads checkpoints of any number of ranks, needs no GPU, and compares every byte with its checksum.
    safetensors has the model; safetensors.torch.load_model reads it. torch has `step`, `model` and `optimizer`, for
    torch.load(PATH, weights_only=True). dcp has the same, for torch.distributed.checkpoint.load. Nothing is overwritten.
    Needs torch, and safetensors for that format. Exit status: 0 written; 1 not written.

    \b
    Examples:
      holdfast checkpoints export runs/a --format safetensors
      holdfast checkpoints export runs/a/checkpoints/step_00000000 --format torch -o model.pt
      holdfast checkpoints export runs/a --format dcp -o exported --json
    """
    entry = _find_checkpoint(checkpoint)
    path = Path(output if output is not None else f"{entry.name}{_SUFFIXES[format]}")
    _check_output(path)
    with needs_torch("holdfast checkpoints export"):
        from holdfast.distributed.checkpoint import export as exporting
    exporting.check_format(format)
    assert entry.manifest is not None
    with progress_bar(quiet=as_json) as bar:
        total = sum(file.bytes for name, file in entry.manifest.files.items() if name.endswith(".bin"))
        task = bar.add_task(f"reading {entry.name}", total=total)
        with_optimizers = format is not ExportFormat.safetensors
        state = exporting.read_state(
            entry, with_optimizers=with_optimizers, advance=lambda count: bar.update(task, advance=count)
        )
        bar.update(task, description=f"writing {path.name}")
        nbytes = exporting.write(state, format, path)
    notes = [*_health_notes(entry), *state.notes]
    if as_json:
        emit(_to_json(entry, state, format, path, nbytes, notes))
        return
    out = console()
    for note in notes:
        out.print(Text(clean(note), style="yellow"), soft_wrap=True)
    optimizers = f" and {format_count(len(state.optimizers), 'optimizer')}" if state.optimizers else ""
    what = f"{format_count(len(state.model), 'tensor')} of the model{optimizers}"
    text = f"exported {entry.name} to {clean(str(path))}: {what}, {decimal(nbytes)}"
    out.print(Text(text, style="bold green"), soft_wrap=True)


def _find_checkpoint(text: str) -> CheckpointEntry:
    """Return the checkpoint that a command line names, whose small files are intact."""
    path = Path(text)
    if not is_checkpoint(path):
        run = find_run(text)
        surveyed = survey(run.path, lambda entry: verify_bytes(entry, contents=False))
        if surveyed.chosen is None:
            raise RunDirError(
                f"{clean(text)} has no checkpoint that a resume would use; name one: holdfast checkpoints ls {clean(text)}"
            )
        return surveyed.chosen
    entry = read_entry(path.resolve())
    if entry is None:
        raise RunDirError(f"{clean(text)}: no such checkpoint; list them with: holdfast checkpoints ls RUN")
    if entry.damage is not None:
        raise RunDirError(f"{clean(text)} cannot be exported: {entry.damage}; name another checkpoint")
    if entry.health is Health.BAD:
        raise RunDirError(f"{clean(text)} is marked bad ({entry.why}); name another checkpoint")
    return entry


def _check_output(path: Path) -> None:
    shown = clean(str(path))
    if os.path.lexists(path):
        raise RunDirError(f"{shown} exists and is not overwritten; remove it, or name another file with -o")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise RunDirError(f"{shown}: there is no folder {clean(str(folder))}; make it first")
    inside = next((p for p in (folder.resolve(), *folder.resolve().parents) if is_checkpoint(p)), None)
    if inside is not None:
        raise RunDirError(
            f"{shown} is inside the checkpoint {inside.name}, which must not change; name another with -o"
        )


def _health_notes(entry: CheckpointEntry) -> list[str]:
    if entry.health is Health.GOOD or entry.handover:
        return []
    return [f"{entry.name} is {entry.health}{f' ({entry.why})' if entry.why else ''}: it is exported all the same"]


def _to_json(
    entry: CheckpointEntry, state: Any, format: str, path: Path, nbytes: int, notes: list[str]
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "ok": True,
        "checkpoint": str(entry.path),
        "step": entry.step,
        "health": str(entry.health),
        "format": str(format),
        "path": os.path.abspath(path),
        "bytes": nbytes,
        "tensors": len(state.model),
        "tied": state.tied,
        "optimizers": len(state.optimizers),
        "notes": notes,
    }
