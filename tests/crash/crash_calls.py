"""The file-system calls of a process; chosen calls fail, are cut short, or kill the process.

All of Holdfast goes through functions of `os` looked up when they are called. Only calls on the run directory count, by path
or by a descriptor opened there. A site is a call and what it is made on, such as "write /checkpoints/STEP/health.json":
the calls of two threads come in no fixed order, but the third fsync of the journal is always the third.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = (
    *(
        "open",
        "close",
        "write",
        "pwrite",
        "fsync",
        "fdatasync",
        "ftruncate",
        "rename",
        "replace",
        "mkdir",
        "unlink",
        "rmdir",
    ),
    *("read", "pread", "listdir", "scandir", "stat", "lstat", "fstat"),
)
CUT = ("write", "pwrite")
FILLS = ("create", "write", "pwrite", "fsync", "ftruncate", "mkdir", "rename", "replace", "close")
"""what a full disk may refuse"""
INTERRUPTED = ("rename", "replace", "mkdir", "unlink", "rmdir", "listdir", "scandir", "stat", "lstat")
"""where Python hands EINTR on; the others it makes again by itself"""
ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EINTR": errno.EINTR}
_CREATES = os.O_CREAT | os.O_TRUNC
_FORMS = (
    (re.compile(r"step_\d+(\.b\d+)?"), "STEP"),
    (re.compile(r"\.[0-9a-f]{8}\.aside"), ".aside"),
    (re.compile(r"incidents/\d+"), "incidents/N"),
)


def applies(how: str, site: str) -> bool:
    """Whether the call at `site` could meet with this."""
    name = site.split(" ")[0]
    if how in ("SHORT", "KILL_HALF"):
        return name in CUT
    if how == "EINTR":
        return name in INTERRUPTED
    return name in FILLS if how == "ENOSPC" else True


class Calls:
    """From `install` on every call on the run directory is counted by its site.

    how: an error by name; SHORT, a write that takes half of it; KILL, the process dies before the call; KILL_AFTER, after
    it; KILL_HALF, after half of a write; FULL, nothing more can be written under checkpoints/.
    It happens to the `nth` call at `site`; without a site to the nth of all calls it applies to, and with `every` again at
    every so many of them. FULL holds from the nth of all calls on.
    """

    def __init__(
        self, run_dir: Path, tell: Callable[[str], None], *, how: str, site: str, nth: int, every: int
    ) -> None:
        self._home, self._tell = str(run_dir), tell
        self._how, self._site, self._nth, self._every = how, site, nth, every
        self._applied = 0
        self._lock = threading.RLock()
        self._descriptors: dict[int, str] = {}
        self.sites: Counter[str] = Counter()

    def install(self) -> None:
        for name in NAMES:
            setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            path = self._path_of(args[0] if args else ".", kwargs.get("dir_fd"))
            if path is None:
                return call(*args, **kwargs)
            with self._lock:
                site = self._site_of(name, path, args)
                self.sites[site] += 1
                if hit := self._hits(site):
                    self._tell(f"{site}, number {self.sites[site]}")
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
        path = os.fsdecode(target)
        if within is not None:
            above = self._descriptors.get(within)
            return None if above is None else f"{above}/{path}"
        return path if path.startswith(self._home) else None

    def _site_of(self, name: str, path: str, args: tuple[Any, ...]) -> str:
        if name == "open" and args[1] & _CREATES:
            name = "create"
        place = path.removeprefix(self._home) or "/"
        for form, plain in _FORMS:
            place = form.sub(plain, place)
        return f"{name} {place}"

    def _hits(self, site: str) -> bool:
        if self._how == "FULL":
            self._applied += 1
            full = "/checkpoints" in site and site.split(" ")[0] in FILLS and not site.startswith(("close", "rename"))
            return self._applied >= self._nth and full
        if not self._how or not applies(self._how, site) or self._site not in ("", site):
            return False
        self._applied += 1
        past = self._applied - self._nth
        return past == 0 or (self._every > 0 and past > 0 and past % self._every == 0)

    def _act(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        how = self._how
        if how == "KILL":
            _die()
        if how in ("SHORT", "KILL_HALF"):
            args = (args[0], memoryview(args[1])[: max(1, len(args[1]) // 2)], *args[2:])
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
