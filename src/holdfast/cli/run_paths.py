"""Finds the run directory or checkpoint that a command line names, and locks and inspects it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.cli.output import echo
from holdfast.core.base.clean import clean
from holdfast.core.base.errors import RunDirError
from holdfast.core.checkpoints.folder import Folder, is_unfinished
from holdfast.core.checkpoints.manifest import MANIFEST, is_name
from holdfast.core.checkpoints.resume import CHECKPOINTS
from holdfast.core.record import facts, journal
from holdfast.core.record.rundir import RunDir, suggest_run

WRITER = "holdfast checkpoints"
"""`by` of journal events that a command wrote, not the run"""


def find_run(text: str, *, needs_journal: bool = False) -> RunDir:
    """Return the run directory named by itself or by its checkpoints folder; raise RunDirError if it is not one.

    Creates nothing.
    """
    path, shown = Path(text), clean(text)
    held = RunDir(path).journal.name if needs_journal else CHECKPOINTS
    if not path.exists():
        raise RunDirError(f"{shown}: no such folder; name the run_dir that was given to the Guard")
    if not path.is_dir():
        raise RunDirError(f"{shown} is a file; name the run directory, the folder that holds {held}")
    if is_checkpoint(path):
        home = run_of(path)
        cure = "name its run directory" if home is None else f"name the run directory it is in: {clean(str(home.path))}"
        raise RunDirError(f"{shown} is one checkpoint; {cure}")
    run = RunDir(path.parent if path.resolve().name == CHECKPOINTS else path)
    if not (os.path.lexists(run.journal) if needs_journal else is_run(run)):
        missing = "" if needs_journal else f"no {CHECKPOINTS}, no {run.run.name} and "
        cure = suggest_run(path, "name the run_dir of a Guard")
        raise RunDirError(f"{shown} is not a run directory: it has {missing}no {run.journal.name}; {cure}")
    _report_skipped_events(run)
    return run


def _report_skipped_events(run: RunDir) -> None:
    with contextlib.suppress(OSError):
        if (skipped := journal.read(run.journal).describe_skipped()) is not None:
            echo(f"holdfast: {run.journal}: {skipped}", err=True)


def is_run(run: RunDir) -> bool:
    return os.path.isdir(run.path / CHECKPOINTS) or os.path.lexists(run.journal) or os.path.lexists(run.run)


def is_checkpoint(path: Path) -> bool:
    return is_name(path.resolve().name) or os.path.lexists(path / MANIFEST)


def run_of(checkpoint: Path) -> RunDir | None:
    """Return the run directory that a checkpoint is in, or None if it was copied elsewhere."""
    named = Path(
        os.path.abspath(checkpoint)
    ).parent  # of a checkpoints folder that is a link, the run that has the link
    parent = named if named.name == CHECKPOINTS else checkpoint.resolve().parent
    return RunDir(parent.parent) if parent.name == CHECKPOINTS else None


@contextlib.contextmanager
def lock(run: RunDir) -> Iterator[None]:
    """Hold the run's lock; raise RunDirError, naming the process, if a live process holds it."""
    run.acquire()
    try:
        yield
    finally:
        run.release()


@contextlib.contextmanager
def open_journal(run: RunDir) -> Iterator[journal.Journal]:
    """Open the journal of a locked run for writing."""
    log = journal.Journal(run.journal, check=run.check_held)
    try:
        yield log
    finally:
        log.close()


def checkpoint_settings(run: RunDir) -> dict[str, Any]:
    """Return [checkpoint] as configured at the run's latest start, or {} if it is not on record."""
    about: dict[str, Any] = {}
    with contextlib.suppress(RunDirError):
        about = facts.read_run_json(run.run) or {}
    with contextlib.suppress(OSError):
        for event in journal.read(run.journal).events:
            if event.get("event") in ("run_begin", "restart") and isinstance(event.get("environment"), dict):
                about = {**about, **event["environment"]}
    config = about.get("config")
    section = config.get("checkpoint") if isinstance(config, dict) else None
    return section if isinstance(section, dict) else {}


def checkpoint_folder(run: RunDir) -> Folder:
    """Return the checkpoints of a locked run, to be changed."""
    identity = (facts.read_run_json(run.run) or {}).get("run")
    return Folder(run.path / CHECKPOINTS, identity if isinstance(identity, str) else None, run.check_held)


def checkpoint_bytes(checkpoint: Path) -> int:
    """Return the size of the files in a checkpoint; unreadable files count as 0."""
    total = 0
    with contextlib.suppress(OSError):
        for name in os.listdir(checkpoint):
            with contextlib.suppress(OSError):
                status = os.lstat(checkpoint / name)
                total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def unfinished_checkpoints(run: RunDir) -> list[str]:
    """Return the temporary folders of checkpoints that are being written or removed, or that a kill left behind."""
    with contextlib.suppress(OSError):
        return sorted(filter(is_unfinished, os.listdir(run.path / CHECKPOINTS)))
    return []
