"""Finds the process that holds a lock on a file. The kernel knows it; the text in the file may be of a dead process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import struct
import sys
from typing import NamedTuple

_LAYOUT = "qqihh" if sys.platform == "darwin" else "hhqqi4x"
"""struct flock: (start, length, pid, type, whence) or (type, whence, start, length, pid)"""


class LockHolder(NamedTuple):
    """A process that has locked a file; `pid` is 0 if it is on another machine or cannot be seen from here."""

    pid: int = 0
    is_shared: bool = False

    def describe(self, recorded: str) -> str:
        """Return the process in words. `recorded`: what the last run that had the lock wrote about itself."""
        if not recorded:
            return "an unknown process" if self.pid == 0 else f"process {self.pid}{self._user()}"
        if self.pid in (0, _pid_in(recorded)):
            return recorded
        return f"process {self.pid}{self._user()}, which is not the run that had it last ({recorded})"

    def _user(self) -> str:
        with contextlib.suppress(OSError, KeyError):
            return f" of user {pwd.getpwuid(os.stat(f'/proc/{self.pid}').st_uid).pw_name}"
        return ""


def find(descriptor: int) -> LockHolder:
    """Return a process that keeps this one from locking the whole file alone."""
    if sys.platform == "darwin":
        request = struct.pack(_LAYOUT, 0, 0, 0, fcntl.F_WRLCK, os.SEEK_SET)
    else:
        request = struct.pack(_LAYOUT, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        answer = struct.unpack(_LAYOUT, fcntl.fcntl(descriptor, fcntl.F_GETLK, request))
    except (OSError, struct.error):  # a platform with another layout
        return LockHolder()
    kind, pid = (answer[3], answer[2]) if sys.platform == "darwin" else (answer[0], answer[4])
    return LockHolder(max(pid, 0) if kind != fcntl.F_UNLCK else 0, kind == fcntl.F_RDLCK)


def _pid_in(recorded: str) -> int | None:
    words = recorded.split()
    return int(words[1]) if len(words) > 1 and words[1].isascii() and words[1].isdigit() else None
