"""The run directory: its names, its lock, and files that are replaced whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any, ClassVar

from holdfast.core.base import durable
from holdfast.core.base.errors import RunDirError
from holdfast.core.base.plain import plain, text


def write_atomically(path: Path, content: str) -> None:
    """Replace `path` with `content`: after a crash at any instant it is the old file or the new one.

    When this returns it is the new one, even after a power loss.
    """
    try:
        durable.replace_file(path, content.encode())
    except OSError as error:
        raise RunDirError(f"{path} cannot be written: {error.strerror}") from None


def to_json(value: Any) -> str:
    return json.dumps(plain(value), default=text, indent=2) + "\n"


class RunDir:
    """One run's folder, held by one live process at a time.

    The lock is a POSIX record lock: the kernel releases it when the process dies however it dies, and loader workers
    forked from the process do not inherit it. Such a lock does not keep a process from itself, so the folders this
    process holds are listed as well.
    """

    _held: ClassVar[set[Path]] = set()
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).resolve()
        self.journal = self.path / "journal.jsonl"
        self.metrics = self.path / "metrics.jsonl"
        self.run = self.path / "run.json"
        self.quarantine = self.path / "quarantine.json"
        self.incidents = self.path / "incidents"
        self._lock = self.path / ".lock"
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Make the folder and hold it; RunDirError if it cannot be written or another live process holds it."""
        with self._guard:
            if self.path in self._held:
                raise RunDirError(
                    f"{self.path} is in use by another Guard of this process; close that one, or choose another run_dir"
                )
            try:
                durable.make_folder(self.path)
                descriptor = durable.retry_interrupted(
                    os.open, self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
                )
            except (FileExistsError, NotADirectoryError):
                raise RunDirError(f"{self.path} is, or lies under, a file; run_dir must be a folder") from None
            except OSError as error:
                raise RunDirError(
                    f"{self.path} cannot be written: {error.strerror}; choose another run_dir or fix its permissions"
                ) from None
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "an unknown process"
                os.close(descriptor)
                raise RunDirError(
                    f"{self.path} is in use by {owner}; wait for it, stop it, or choose another run_dir"
                ) from None
            except OSError as error:
                os.close(descriptor)
                raise RunDirError(
                    f"{self.path} cannot be locked: {error.strerror}; choose a run_dir on a file system that has locks"
                ) from None
            with contextlib.suppress(OSError):  # a full disk: the lock holds all the same, only the name is missing
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            self._descriptor = descriptor
            self._held.add(self.path)

    def release(self) -> None:
        with self._guard:
            if self._descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(self._descriptor)
                self._descriptor = None
                self._held.discard(self.path)

    def incident(self, number: int) -> Path:
        folder = self.incidents / f"{number:04d}"
        try:
            durable.make_folder(folder)
        except OSError as error:
            raise durable.run_dir_error(folder, "made", error) from None
        return folder
