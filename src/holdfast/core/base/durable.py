"""File operations that are complete and on disk when they return.

They finish short writes, retry interrupted calls and sync folders. Every call goes through an attribute of `os` that is
looked up when it runs, so that a test can make any one of them fail. Errors are the OSError of the kernel;
`run_dir_error` turns one into a RunDirError with a cure.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeAlias, TypeVar

from holdfast.core.base.errors import RunDirError, UnreadableError

P = ParamSpec("P")
T = TypeVar("T")
Bytes: TypeAlias = bytes | bytearray | memoryview

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.aside")
_STALE_SECONDS = 600
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)
_DAMAGE_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG)
_READ = os.O_RDONLY | os.O_CLOEXEC
CHUNK = 4 << 20


def retry_interrupted(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Repeat a call for as long as a signal interrupts it. Python does this for some calls, but not for rename."""
    while True:
        try:
            return call(*args, **kwargs)
        except InterruptedError:
            continue


def close(descriptor: int) -> None:
    """Close a descriptor, never twice: after EINTR it is closed, and another thread may have its number by now."""
    with contextlib.suppress(InterruptedError):
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make the folder and its missing parents."""
    try:
        retry_interrupted(os.mkdir, path)
    except FileNotFoundError:
        make_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            retry_interrupted(os.mkdir, path)
    except FileExistsError:
        if not stat.S_ISDIR(retry_interrupted(os.stat, path).st_mode):
            raise


def write_some(descriptor: int, data: Bytes) -> int:
    """Write some of `data`, which is not empty, and return the number of bytes written: at least one."""
    written = retry_interrupted(os.write, descriptor, data)
    if written <= 0:
        raise OSError(errno.EIO, "the file system wrote no byte and gave no reason")
    return written


def write_all(descriptor: int, data: Bytes) -> None:
    """Write all of `data`, in as many writes as it takes."""
    view = memoryview(data).cast("B")
    while view:
        view = view[write_some(descriptor, view) :]


def write_file(path: Path, data: Bytes, mode: int = 0o644, *, exclusive: bool = False) -> None:
    """Make or empty the file `path`, write `data` and sync it. Its name is on disk only after `fsync_folder`.

    exclusive: the file must not exist yet. A symbolic link is never followed.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_EXCL if exclusive else os.O_TRUNC)
    descriptor = retry_interrupted(os.open, path, flags, mode)
    try:
        write_all(descriptor, data)
        retry_interrupted(os.fsync, descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            close(descriptor)
        raise
    close(descriptor)  # some network file systems report a full disk only here


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return the descriptor. Follows no link and waits for no pipe or device."""
    try:
        descriptor = retry_interrupted(os.open, path, _READ | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from None
        raise
    try:
        if not stat.S_ISREG(retry_interrupted(os.fstat, descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    except BaseException:
        close(descriptor)
        raise
    return descriptor


def read_file(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file. Raise OSError if it is longer than `max_bytes`."""
    descriptor = open_regular(path)
    try:
        pieces, left = [], max_bytes + 1
        while left > 0 and (piece := retry_interrupted(os.read, descriptor, min(left, CHUNK))):
            pieces.append(piece)
            left -= len(piece)
    finally:
        close(descriptor)
    if left <= 0:
        raise OSError(errno.EFBIG, f"it is longer than {max_bytes:,} bytes")
    return b"".join(pieces)


def fsync_file(path: Path) -> None:
    """Force everything that any process has written to the file to disk."""
    descriptor = open_regular(path)
    try:
        retry_interrupted(os.fsync, descriptor)
    finally:
        close(descriptor)


def fsync_folder(path: Path) -> None:
    """Force the names in the folder to disk. Does nothing if the file system has no such call or forbids it."""
    try:
        descriptor = retry_interrupted(os.open, path, _READ | os.O_DIRECTORY)
    except PermissionError:  # the folder is writable but not readable
        return
    try:
        retry_interrupted(os.fsync, descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        close(descriptor)


def replace_file(path: Path, data: Bytes, mode: int = 0o644) -> None:
    """Replace `path` with `data`: after a crash at any instant it is the old file or the new one.

    The data goes to a temporary file first. Temporary files of killed processes are removed once they are ten minutes
    old by the clock of the file system. If the last step, syncing the folder, fails, the new file is in place but may
    not survive a power loss.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.aside")
    try:
        write_file(temporary, data, mode, exclusive=True)
        retry_interrupted(os.replace, temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            retry_interrupted(os.unlink, temporary)
        raise
    fsync_folder(path.parent)
    with contextlib.suppress(OSError):
        _remove_stale(path)


def _remove_stale(path: Path) -> None:
    now = os.stat(path).st_mtime
    for name in os.listdir(path.parent):
        if is_temporary(name) and name.startswith(f".{path.name}."):
            leftover = path.with_name(name)
            if os.lstat(leftover).st_mtime < now - _STALE_SECONDS:
                retry_interrupted(os.unlink, leftover)


def is_temporary(name: str) -> bool:
    """Return whether a name is that of a temporary file of `replace_file`."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_tree(path: Path) -> None:
    """Remove a folder with its content, a file, or a symbolic link but not its target. A missing path is no error.

    shutil.rmtree is not used: if a close is interrupted, it closes the descriptor again, which may be another thread's.
    """
    _remove(path, None)


def _remove(name: Path | str, within: int | None) -> None:
    """Remove by descriptors, so that no other process can replace a folder by a link meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        status = retry_interrupted(os.stat, name, dir_fd=within, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            retry_interrupted(os.unlink, name, dir_fd=within)
            return
        descriptor = retry_interrupted(os.open, name, _READ | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=within)
        try:
            for inside in retry_interrupted(os.listdir, descriptor):
                _remove(inside, descriptor)
        finally:
            close(descriptor)
        retry_interrupted(os.rmdir, name, dir_fd=within)


def run_dir_error(path: Path, operation: str, error: OSError) -> RunDirError:
    """Return an error with the path, the failed operation, the reason and the cure."""
    message = f"{path} cannot be {operation}: {error.strerror or type(error).__name__}; {_cure(path, error)}"
    return (
        UnreadableError(message) if operation == "read" and error.errno not in _DAMAGE_ERRORS else RunDirError(message)
    )


def _cure(path: Path, error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return f"{_free(path)}; free some, keep fewer checkpoints, or choose another run_dir"
    if error.errno == errno.EDQUOT:
        return "the quota is used up: free some, keep fewer checkpoints, or choose another run_dir"
    if error.errno == errno.EFBIG:
        return "the limit on the size of a file is reached: raise it (ulimit -f), or choose another run_dir"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "fix its permissions, or choose another run_dir"
    if error.errno == errno.EROFS:
        return "choose a run_dir that can be written"
    if error.errno in (errno.EIO, errno.ESTALE):
        return "the disk or the network is failing: see the kernel's log, or choose another run_dir"
    return "check that it and its parent folders exist and are unchanged, or choose another run_dir"


def _free(path: Path) -> str:
    """Return the free space of the file system of `path`, in words."""
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):
            status = os.statvfs(folder)
            return f"{status.f_bavail * status.f_frsize / 1e9:,.2f} GB and {status.f_favail:,} files are free"
    return "the free space is unknown"
