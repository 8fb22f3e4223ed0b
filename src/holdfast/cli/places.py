"""What the `checkpoints` commands are pointed at: a run directory or a checkpoint, found, held, or refused with the cure."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from holdfast.core.base.errors import RunDirError
from holdfast.core.checkpoints.manifest import MANIFEST, is_name
from holdfast.core.checkpoints.resume import CHECKPOINTS
from holdfast.core.record import facts, journal
from holdfast.core.record.rundir import RunDir
from holdfast.reports.clean import clean

BY = "holdfast checkpoints"
"""who wrote an event that no life of the run did"""


def run_at(text: str) -> RunDir:
    """The run directory; its checkpoints folder will do. RunDirError, and nothing made, where there is none."""
    path, shown = Path(text), clean(text)
    if not path.exists():
        raise RunDirError(f"{shown}: no such folder; name the run_dir that was given to the Guard")
    if not path.is_dir():
        raise RunDirError(f"{shown} is a file; name the run directory, the folder that holds {CHECKPOINTS}")
    if is_checkpoint(path):
        raise RunDirError(f"{shown} is one checkpoint; name the run directory it is in: {_home(path)}")
    folder = RunDir(path.parent if path.resolve().name == CHECKPOINTS else path)
    if not is_run(folder):
        inside = sorted(child.parent.name for child in path.glob(f"*/{folder.journal.name}"))
        cure = f"did you mean {clean(str(path / inside[0]))}?" if inside else "name the run_dir of a Guard"
        raise RunDirError(
            f"{shown} is not a run directory: it has no {CHECKPOINTS}, no {folder.run.name} and no {folder.journal.name}; "
            f"{cure}"
        )
    return folder


def is_run(folder: RunDir) -> bool:
    return os.path.isdir(folder.path / CHECKPOINTS) or folder.journal.is_file() or folder.run.is_file()


def is_checkpoint(path: Path) -> bool:
    return is_name(path.resolve().name) or os.path.lexists(path / MANIFEST)


def home_of(checkpoint: Path) -> RunDir | None:
    """The run directory a checkpoint is in; None where it was copied elsewhere."""
    above = checkpoint.resolve().parent
    return RunDir(above.parent) if above.name == CHECKPOINTS else None


def _home(checkpoint: Path) -> str:
    home = home_of(checkpoint)
    return "none that can be seen from here" if home is None else clean(str(home.path))


@contextlib.contextmanager
def held(run: RunDir) -> Iterator[None]:
    """While no live process has it. RunDirError, with the process, where one does."""
    run.acquire()
    try:
        yield
    finally:
        run.release()


@contextlib.contextmanager
def noting(run: RunDir) -> Iterator[journal.Journal]:
    """The run's journal, to be written to while it is held."""
    log = journal.Journal(run.journal)
    try:
        yield log
    finally:
        log.close()


def settings(run: RunDir) -> dict[str, Any]:
    """[checkpoint] as the latest life of the run had it; empty where that is not on record."""
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


def size_of(folder: Path) -> int:
    """Bytes of the files in a checkpoint as they are on disk; what cannot be seen counts as nothing."""
    total = 0
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                found = os.lstat(folder / name)
                total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total


def in_the_making(run: RunDir) -> list[str]:
    """What is being written or removed, or was when a process was killed. The next start of the run removes what is left."""
    with contextlib.suppress(OSError):
        return sorted(n for n in os.listdir(run.path / CHECKPOINTS) if n.startswith((".tmp-", ".gone-")))
    return []


def console() -> Console:
    """For the answer. Marks that a stream in an old encoding cannot take become question marks."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return Console(highlight=False)


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
