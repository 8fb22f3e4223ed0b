"""The file-system calls of a life, counted, and one of them made to fail, to be cut short, or to be the last.

All of Holdfast goes through functions of `os` looked up when they are called. Only calls on the run directory count, by path
or by a descriptor opened there.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

WRITES = ("write", "pwrite", "fsync", "fdatasync", "ftruncate", "rename", "replace", "mkdir", "unlink", "rmdir", "close")
READS = ("read", "pread", "listdir", "scandir", "stat", "lstat", "fstat")
CUT = ("write", "pwrite")
NAMES = ("open", *WRITES, *READS)
ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EINTR": errno.EINTR}
SILENT = ("EINTR", "SHORT")
"""what must make no difference at all"""
_FILLS = ("write", "pwrite", "mkdir", "fsync", "ftruncate")
_CREATES = os.O_CREAT | os.O_TRUNC


class Calls:
    """From `install` on every call on the run directory is counted; the one numbered `at`, or the first after it to
    which `how` applies, does what `how` says.

    how: an error by name; SHORT, a write that takes half; KILL, the process dies before the call; KILL_AFTER, after it;
    KILL_HALF, after half of a write; FULL: from there on nothing more can be written under checkpoints/.
    """

    def __init__(self, run_dir: Path, tell: Callable[[int, str], None], at: int = 0, how: str = "") -> None:
        self._home = str(run_dir)
        self._tell, self._at, self._how = tell, at, how
        self._count, self._done = 0, False
        self._lock = threading.RLock()
        self._descriptors: dict[int, str] = {}

    def install(self) -> None:
        for name in NAMES:
            setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            path = self._path_of(args[0] if args else ".", kwargs.get("dir_fd"))
            if path is None:
                return call(*args, **kwargs)
            with self._lock:
                self._count += 1
                hit = self._hits(name, path, args)
                self._done = self._done or hit
                self._tell(self._count, f"{name} {path.removeprefix(self._home)}" if hit else "")
            result = self._act(name, call, args, kwargs) if hit else call(*args, **kwargs)
            if name == "open":
                self._descriptors[result] = path
            elif name == "close":
                self._descriptors.pop(args[0], None)
            return result

        return wrapper

    def _path_of(self, target: Any, within: int | None) -> str | None:
        """Where in the run directory it is, or None."""
        if isinstance(target, int):
            return self._descriptors.get(target)
        path = os.fspath(target)
        path = path.decode() if isinstance(path, bytes) else path
        if within is not None:
            above = self._descriptors.get(within)
            return None if above is None else f"{above}/{path}"
        return path if path.startswith(self._home) else None

    def _hits(self, name: str, path: str, args: tuple[Any, ...]) -> bool:
        if self._at == 0 or self._count < self._at:
            return False
        if self._how == "FULL":
            filling = name in _FILLS or (name == "open" and bool(args[1] & _CREATES))
            return filling and "/checkpoints" in path
        if self._done:
            return False
        if self._how in ("SHORT", "KILL_HALF"):
            return name in CUT and len(args[1]) > 1
        if self._how == "ENOSPC":
            return name in WRITES and name not in ("unlink", "rmdir") or name == "open" and bool(args[1] & _CREATES)
        return True

    def _act(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        how = self._how
        if how == "KILL":
            _die()
        if how in ("SHORT", "KILL_HALF"):
            args = (args[0], memoryview(args[1])[: len(args[1]) // 2], *args[2:])
        if how in ("SHORT", "KILL_HALF", "KILL_AFTER"):
            result = call(*args, **kwargs)
            if how != "SHORT":
                _die()
            return result
        if name == "close":
            self._descriptors.pop(args[0], None)
            call(*args)  # the descriptor is gone, whatever close says
        error = errno.ENOSPC if how == "FULL" else ERRORS[how]
        raise OSError(error, os.strerror(error))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
