"""The run directory: its file names, its lock, and atomic replacement of files."""

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

    When this returns, the new file survives a power loss. Raises RunDirError if it cannot be written.
    """
    try:
        durable.replace_file(path, content.encode())
    except OSError as error:
        raise RunDirError(f"{path} cannot be written: {error.strerror}") from None


def to_json(value: Any) -> str:
    return json.dumps(plain(value), default=text, indent=2) + "\n"


class RunDir:
    """The folder of one run, locked by one live process at a time.

    The lock is a POSIX record lock: the kernel releases it however the process dies, and forked loader workers do not
    inherit it. Such a lock does not exclude a second Guard in the same process, so `_held` lists the folders that this
    process has locked.
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
        """Make the folder and lock it. Raise RunDirError if it is not writable or another live process has it."""
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
                raise RunDirError(f"{self.path} is a file or inside one; run_dir must be a folder") from None
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
            with contextlib.suppress(OSError):  # a full disk: the lock holds, only the owner's name is missing
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
        """Return the folder of an incident. It is made with its first file."""
        return self.incidents / f"{number:04d}"
