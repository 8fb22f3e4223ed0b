"""Files that are on disk when a call returns: short writes are finished, interrupted calls made again, folders synced.

Everything goes through functions of `os`, looked up when they are called, so that a test can make any one of them fail.
Errors are OSError, as the kernel gave them; `refused` turns one into the RunDirError a person reads.
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

_ASIDE = re.compile(r"\..+\.[0-9a-f]{8}\.aside")
_STALE_SECONDS = 600
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG)
_READ = os.O_RDONLY | os.O_CLOEXEC
CHUNK = 4 << 20


def retry_interrupted(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The call, made again for as long as a signal interrupts it. Python does this for some calls, not for rename."""
    while True:
        try:
            return call(*args, **kwargs)
        except InterruptedError:
            continue


def close(descriptor: int) -> None:
    """Never made again: after EINTR the descriptor is gone, and its number may be another thread's by now."""
    with contextlib.suppress(InterruptedError):
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """The folder, and those above it, where they are not there yet."""
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
    """How many bytes of `data`, which is not empty, the kernel took: at least one."""
    taken = retry_interrupted(os.write, descriptor, data)
    if taken <= 0:
        raise OSError(errno.EIO, "the file system took no byte and gave no reason")
    return taken


def write_all(descriptor: int, data: Bytes) -> None:
    """All of `data`, in as many writes as it takes."""
    view = memoryview(data).cast("B")
    while view:
        view = view[write_some(descriptor, view) :]


def write_file(path: Path, data: Bytes, mode: int = 0o644, *, exclusive: bool = False) -> None:
    """Make `path`, or empty it, and write `data`; on disk when this returns, though its name may not be: see fsync_folder.

    exclusive: it must not exist yet. A symbolic link is never followed.
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
    close(descriptor)  # some network file systems tell of a full disk only here


def open_regular(path: Path) -> int:
    """A descriptor to read a regular file by. Links are not followed, and no pipe or device is waited for."""
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


def read_file(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes."""
    descriptor = open_regular(path)
    try:
        pieces, left = [], most + 1
        while left > 0 and (piece := retry_interrupted(os.read, descriptor, min(left, CHUNK))):
            pieces.append(piece)
            left -= len(piece)
    finally:
        close(descriptor)
    if left <= 0:
        raise OSError(errno.EFBIG, f"it is longer than {most:,} bytes")
    return b"".join(pieces)


def fsync_file(path: Path) -> None:
    """What any process has written to the file so far is on disk."""
    descriptor = open_regular(path)
    try:
        retry_interrupted(os.fsync, descriptor)
    finally:
        close(descriptor)


def fsync_folder(path: Path) -> None:
    """The names in the folder are on disk. Nothing is done where the file system has no such call, or forbids it."""
    try:
        descriptor = retry_interrupted(os.open, path, _READ | os.O_DIRECTORY)
    except PermissionError:  # a folder that may be written and not read
        return
    try:
        retry_interrupted(os.fsync, descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        close(descriptor)


def replace_file(path: Path, data: Bytes, mode: int = 0o644) -> None:
    """Replace `path` with `data`: after a crash at any instant it is the old file or the new one; then it is the new one.

    It is written aside first. What a killed process left aside is removed here once it is ten minutes old by the file
    system's own clock. If the last step fails, syncing the folder, the new file is there and may not survive a power loss.
    """
    aside = path.with_name(f".{path.name}.{os.urandom(4).hex()}.aside")
    try:
        write_file(aside, data, mode, exclusive=True)
        retry_interrupted(os.replace, aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            retry_interrupted(os.unlink, aside)
        raise
    fsync_folder(path.parent)
    with contextlib.suppress(OSError):
        _remove_stale(path)


def _remove_stale(path: Path) -> None:
    now = os.stat(path).st_mtime
    for name in os.listdir(path.parent):
        if is_temporary(name) and name.startswith(f".{path.name}."):
            left = path.with_name(name)
            if os.lstat(left).st_mtime < now - _STALE_SECONDS:
                retry_interrupted(os.unlink, left)


def is_temporary(name: str) -> bool:
    """Whether it is the name of a file in the making, or of what a killed process left of one."""
    return _ASIDE.fullmatch(name) is not None


def remove_tree(path: Path) -> None:
    """Remove a folder and what is in it, or a file. Of a symbolic link, only the link. Nothing there: nothing to do.

    Not shutil's: where a close is interrupted, that closes the number a second time, and another thread may have it.
    """
    _remove(path, None)


def _remove(name: Path | str, within: int | None) -> None:
    """By descriptors, so that nobody can put a link in the place of a folder while it is being emptied."""
    with contextlib.suppress(FileNotFoundError):
        found = retry_interrupted(os.stat, name, dir_fd=within, follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            retry_interrupted(os.unlink, name, dir_fd=within)
            return
        descriptor = retry_interrupted(os.open, name, _READ | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=within)
        try:
            for inside in retry_interrupted(os.listdir, descriptor):
                _remove(inside, descriptor)
        finally:
            close(descriptor)
        retry_interrupted(os.rmdir, name, dir_fd=within)


def run_dir_error(path: Path, doing: str, error: OSError) -> RunDirError:
    """What a person is told: the path, what could not be done with it, why, and the cure."""
    said = f"{path} cannot be {doing}: {error.strerror or type(error).__name__}; {_cure(path, error)}"
    return UnreadableError(said) if doing == "read" and error.errno not in _DAMAGE else RunDirError(said)


def _cure(path: Path, error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return f"{_free(path)}; free some, keep fewer checkpoints, or choose another run_dir"
    if error.errno == errno.EDQUOT:
        return "the quota is used up: free some, keep fewer checkpoints, or choose another run_dir"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "fix its permissions, or choose another run_dir"
    if error.errno == errno.EROFS:
        return "choose a run_dir that can be written"
    if error.errno in (errno.EIO, errno.ESTALE):
        return "the disk or the network is failing: see the kernel's log, or choose another run_dir"
    return "see that it and the folders above it are as they were, or choose another run_dir"


def _free(path: Path) -> str:
    """How much is free where `path` is, or would be."""
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):
            found = os.statvfs(folder)
            return f"{found.f_bavail * found.f_frsize / 1e9:,.2f} GB and {found.f_favail:,} files are free"
    return "nothing is known of what is free"
