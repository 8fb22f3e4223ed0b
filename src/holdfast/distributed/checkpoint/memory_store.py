"""The memory tier: checkpoints in shared memory, in the format of those on disk, for a restart on the same machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.core.base import durable
from holdfast.core.base.errors import RunDirError
from holdfast.core.checkpoints import memory_folder
from holdfast.core.checkpoints.entry import CheckpointEntry
from holdfast.core.checkpoints.folder import Folder
from holdfast.core.checkpoints.resume import CHECKPOINTS
from holdfast.distributed.checkpoint.disk_store import DiskCheckpointStore
from holdfast.distributed.world import World

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""containers of a machine have it in common"""
_MAX_RANK_TIMEOUT = 60.0
"""seconds; an end of the run waits so long at most for a rank that does not write its share"""


class MemoryCheckpointStore(DiskCheckpointStore):
    """Implements MemoryStore in shared memory. It has a thread of its own, so the disk never waits for it."""

    def __init__(self, run_dir: str | os.PathLike[str], world: World, rank_timeout_seconds: float) -> None:
        super().__init__(run_dir, world, min(rank_timeout_seconds, _MAX_RANK_TIMEOUT))
        self._of_run = self._run_dir
        self._path: Path | None = None
        self.kept_fraction = 1.0

    def attach(self, run: str, check: Callable[[], None], *, makes: bool) -> str | None:
        """Find the folder of the run, or make it if `makes`. Return why there is none, or None. All ranks call it.

        Rank 0 holds the lock of the run directory. Without `makes`, a missing folder is no problem.
        """
        path = memory_folder.path_of(self._of_run, run)
        found: list[Any] | None = None
        problem: str | None = None
        if self.is_rank_zero:
            try:
                found = self._find(path, makes)
            except OSError as error:
                problem = f"{error.filename or path}: {error.strerror}"
        found, problem = self._world.broadcast_object([found, problem])
        is_seen = problem is None and found is not None and identify(path) == found
        if problem is None and found is not None and not all(self._world.all_gather_object(is_seen)):
            found, problem = None, f"not every rank sees {path} of rank 0"
        if problem is not None or found is None:
            return problem
        self._use(path, run, check)
        return None

    def _use(self, path: Path, run: str, check: Callable[[], None]) -> None:
        self._path, self._run_dir, self._folder = path, path, Folder(path / CHECKPOINTS)
        self.open(run, lambda: self._check(check))

    def _find(self, path: Path, makes: bool) -> list[Any] | None:
        if makes:
            memory_folder.make(path, self._of_run)
        elif not os.path.lexists(path):
            return None
        memory_folder.check(path)
        memory_folder.remove_stale(path, self._of_run)
        return identify(path)

    def _check(self, check: Callable[[], None]) -> None:
        """Raise RunDirError if the folder is not what this process has found or made."""
        check()
        assert self._path is not None
        try:
            memory_folder.check(self._path)
        except OSError as error:
            raise durable.run_dir_error(self._path, "used", error) from None

    @property
    def is_attached(self) -> bool:
        return self._path is not None

    @property
    def is_busy(self) -> bool:
        return not all(request.done() for request in self._requests)

    def states(self) -> list[list[Any]]:
        return self._world.broadcast_object([[e.name, e.step, e.branch] for e in self.entries()])  # type: ignore[no-any-return]

    def entries(self) -> list[CheckpointEntry]:
        return [entry._replace(in_memory=True) for entry in super().entries()] if self.is_attached else []

    def room(self) -> tuple[int, int] | None:
        """Return the free and all bytes of the file system; None if the folder is gone."""
        try:
            status = os.statvfs(self._run_dir)
        except OSError:
            return None
        return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize

    def delete(self, run: str) -> None:
        """Remove the folder of the run, if there is one. No request may be under way."""
        if self.owns_folder:
            path = memory_folder.path_of(self._of_run, run)
            try:
                if os.path.lexists(path):
                    memory_folder.remove(path)
            except OSError as error:
                raise RunDirError(f"{path} cannot be removed: {error.strerror}; remove it by hand") from None


def identify(path: Path) -> list[Any] | None:
    """Return what tells one folder from another, of this machine or of others."""
    boot = b""
    with contextlib.suppress(OSError):
        boot = durable.read_file(_BOOT_ID, 100)
    try:
        status = os.stat(path)
    except OSError:
        return None
    return [status.st_dev, status.st_ino, boot.decode("ascii", "replace")]
