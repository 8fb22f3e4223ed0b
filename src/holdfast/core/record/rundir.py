"""The run directory: its file names, its lock, and atomic replacement of files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from holdfast.core.base import durable
from holdfast.core.base.clean import clean
from holdfast.core.base.errors import RunDirError
from holdfast.core.base.masking import mask
from holdfast.core.base.plain import plain, text
from holdfast.core.record import lock_holder

_LOCK_TRIES = 5
_REMOVAL_SECONDS = 1.0
"""how long a folder may take to disappear after its lock, until the lock alone counts as removed"""


def write_atomically(path: Path, content: str) -> None:
    """Replace `path` with `content`: after a crash at any instant it is the old file or the new one.

    When this returns, the new file survives a power loss. Raises RunDirError if it cannot be written.
    """
    try:
        durable.replace_file(path, content.encode())
    except OSError as error:
        raise RunDirError(f"{path} cannot be written: {error.strerror}") from None


def suggest_run(folder: Path, otherwise: str) -> str:
    """Return a question that names a run directory inside `folder`; `otherwise` if it has none."""
    inside = sorted(folder.glob("*/journal.jsonl"))
    return f"did you mean {clean(str(inside[0].parent))}?" if inside else otherwise


def to_json(value: Any) -> str:
    return mask(json.dumps(plain(value), default=text, indent=2)) + "\n"


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
        self._locked: os.stat_result | None = None
        """of the file that this process has locked"""
        self._is_lost = False
        """the lock of this process is not at its path any more"""

    def acquire(self) -> None:
        """Make the folder and lock it. Raise RunDirError if it is not writable or another live process has it."""
        with self._guard:
            if self.path in self._held:
                raise RunDirError(
                    f"{self.path} is in use by another Guard of this process; close that one, or choose another run_dir"
                )
            try:
                durable.make_folder(self.path)
                durable.forbid_others_to_write(self.path)
                self._descriptor = self._lock_file()
                self._locked, self._is_lost = durable.retry_interrupted(os.fstat, self._descriptor), False
            except (FileExistsError, NotADirectoryError):
                raise RunDirError(f"{self.path} is a file or inside one; run_dir must be a folder") from None
            except OSError as error:
                place = Path(error.filename) if isinstance(error.filename, str | Path) else self.path
                raise durable.run_dir_error(place, "written", error) from None
            with contextlib.suppress(OSError):  # a full disk: the lock holds, only the owner's name is missing
                if self._locked.st_nlink == 1:  # not under a second name, which may be another program's file
                    os.ftruncate(self._descriptor, 0)
                    os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            self._held.add(self.path)

    def _lock_file(self) -> int:
        """Lock the file at the path of the lock, and return its descriptor."""
        for _ in range(_LOCK_TRIES):
            descriptor = durable.open_lock_file(self._lock)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_same(self._lock, durable.retry_interrupted(os.fstat, descriptor)):
                    return descriptor
            except FileNotFoundError:  # removed since it was opened: the next try makes another
                pass
            except (BlockingIOError, PermissionError):
                holder = lock_holder.find(descriptor)
                if not holder.is_shared:
                    owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                    durable.close(descriptor)
                    raise RunDirError(
                        f"{self.path} is in use by {holder.describe(owner)}; wait for it, stop it, or choose another run_dir"
                    ) from None
                # No run takes a shared lock, and while there is one no run has its own: a new file has neither.
                durable.remove_tree(self._lock)
            except OSError as error:
                durable.close(descriptor)
                raise RunDirError(
                    f"{self.path} cannot be locked: {error.strerror}; choose a run_dir on a file system that has locks"
                ) from None
            durable.close(descriptor)
        raise RunDirError(f"{self._lock} is replaced again and again by another process; stop it, then start this run")

    def check_held(self) -> None:
        """Raise RunDirError if the lock of this process is gone or replaced; FileNotFoundError if the folder is gone."""
        if self._locked is None:
            return
        try:
            if not self._is_lost and _is_same(self._lock, self._locked):
                return
        except FileNotFoundError:
            ends = time.monotonic() + _REMOVAL_SECONDS
            while os.path.isdir(self.path) and time.monotonic() < ends:  # the lock may only be the first to be removed
                time.sleep(0.01)
            if not os.path.isdir(self.path):
                raise FileNotFoundError(errno.ENOENT, "the run directory was removed", str(self.path)) from None
        self._is_lost = True
        raise RunDirError(
            f"{self._lock} was removed or replaced while this process held it: another process may write this run. Nothing "
            f"more is written to {self.path}; make sure that no other process uses it, then start this one again"
        )

    def release(self) -> None:
        with self._guard:
            if self._descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(self._descriptor)
                self._descriptor = self._locked = None
                self._held.discard(self.path)

    def incident(self, number: int) -> Path:
        """Return the folder of an incident. It is made with its first file."""
        return self.incidents / f"{number:04d}"


def _is_same(path: Path, status: os.stat_result) -> bool:
    return os.path.samestat(durable.retry_interrupted(os.lstat, path), status)
