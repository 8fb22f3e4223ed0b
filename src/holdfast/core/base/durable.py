"""The one way to open, make, replace and remove what is in a run directory.

Nothing follows a link, waits for a pipe or reads a device; reads are bounded; no mode lets other users write, whatever
the umask. What a call has written is complete and on disk when it returns. Every call goes through an attribute of `os`
that is looked up when it runs, so that a test can make any one of them fail. Errors are the OSError of the kernel;
`run_dir_error` turns one into a RunDirError with a cure.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
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
_FILE_MODE, _FOLDER_MODE = 0o644, 0o755
_IS_LINK, _NOT_REGULAR = "it is a symbolic link", "it is not a regular file"
_MAX_DEPTH = 50
_MAX_HOLLOW_BYTES = 64 << 20
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
        retry_interrupted(os.mkdir, path, _FOLDER_MODE)
    except FileNotFoundError:
        make_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            retry_interrupted(os.mkdir, path, _FOLDER_MODE)
    except FileExistsError:
        if not stat.S_ISDIR(retry_interrupted(os.stat, path).st_mode):
            raise


def make_new_folder(path: Path) -> None:
    """Make a folder in an existing one. Raise FileExistsError if there is anything of that name."""
    retry_interrupted(os.mkdir, path, _FOLDER_MODE)


def make_private_folder(path: Path) -> None:
    """Make a folder that only its owner can list or write, in a folder that every user can write to.

    Raises OSError if there is a link of that name, or anything but a private folder of this user.
    """
    with contextlib.suppress(FileExistsError):
        retry_interrupted(os.mkdir, path, 0o700)
    check_private_folder(path)


def check_private_folder(path: Path) -> None:
    """Raise OSError if `path` is not a folder of this user that no other user can write to."""
    refuse_links(path.parent, path)
    status = retry_interrupted(os.lstat, path)
    if status.st_uid != os.geteuid():
        raise OSError(errno.EPERM, f"it belongs to user {status.st_uid}", str(path))
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(errno.EPERM, f"other users can write to it (mode {stat.S_IMODE(status.st_mode):04o})", str(path))


def make_folder_inside(root: Path, path: Path) -> None:
    """Make the folder `path` somewhere below the existing folder `root`. No folder between them may be a link."""
    for folder in _below(root, path):
        with contextlib.suppress(FileExistsError):
            make_new_folder(folder)
    refuse_links(root, path)


def refuse_links(root: Path, path: Path) -> None:
    """Raise OSError if a folder from below `root` to `path` is a link or not a folder."""
    for folder in _below(root, path):
        mode = retry_interrupted(os.lstat, folder).st_mode
        if not stat.S_ISDIR(mode):
            what = "a symbolic link" if stat.S_ISLNK(mode) else "not a folder"
            raise OSError(errno.ELOOP, f"{folder.name} is {what}", str(folder))


def _below(root: Path, path: Path) -> list[Path]:
    """Return the folders from below `root` to `path`, the highest first."""
    parts = path.relative_to(root).parts
    return [root.joinpath(*parts[: n + 1]) for n in range(len(parts))]


def forbid_others_to_write(folder: Path) -> None:
    """Take the right to write in a folder from users outside its group. Does nothing if it is not this user's folder."""
    mode = stat.S_IMODE(retry_interrupted(os.stat, folder).st_mode)
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        with contextlib.suppress(OSError):
            os.chmod(folder, mode & ~stat.S_IWOTH)


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


def write_file(path: Path, data: Bytes) -> None:
    """Make the file `path`, write `data` and sync it. Its name is on disk only after `fsync_folder`.

    Raises FileExistsError if there is anything of that name.
    """
    descriptor = create_file(path)
    try:
        write_all(descriptor, data)
        retry_interrupted(os.fsync, descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            close(descriptor)
        raise
    close(descriptor)  # some network file systems report a full disk only here


def create_file(path: Path) -> int:
    """Make a file and return a descriptor to write it. Raise FileExistsError if there is anything of that name."""
    return _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE)


def open_to_append(path: Path) -> int:
    """Open or make a regular file, to read it and to write at its end. Return the descriptor."""
    return _open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, _FILE_MODE)


def open_lock_file(path: Path) -> int:
    """Open or make a file that only its owner can open, so that no other user can lock it. Return the descriptor."""
    descriptor = _open(path, os.O_RDWR | os.O_CREAT, 0o600)
    with contextlib.suppress(OSError):  # the file of another owner
        os.fchmod(descriptor, 0o600)
    return descriptor


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return the descriptor."""
    return _open(path, os.O_RDONLY)


def _open(path: Path, flags: int, mode: int = 0) -> int:
    """Open a regular file. Follows no link at its name and waits for no pipe or device."""
    try:
        descriptor = retry_interrupted(os.open, path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, _IS_LINK, str(path)) from None
        if error.errno == errno.ENXIO:  # a socket, or a device that is not there
            raise OSError(errno.EINVAL, _NOT_REGULAR, str(path)) from None
        raise
    try:
        if not stat.S_ISREG(retry_interrupted(os.fstat, descriptor).st_mode):
            raise OSError(errno.EINVAL, _NOT_REGULAR, str(path))
    except BaseException:
        close(descriptor)
        raise
    return descriptor


def is_regular(path: Path) -> bool:
    """Return whether `path` is a regular file, and not a link to one."""
    try:
        return stat.S_ISREG(retry_interrupted(os.lstat, path).st_mode)
    except OSError:
        return False


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
        raise OSError(errno.EFBIG, f"it is longer than {max_bytes:,} bytes", str(path))
    return b"".join(pieces)


def check_readable(path: Path) -> None:
    """Raise OSError if `path` is not a regular file, or one that would take long to read and holds next to nothing."""
    descriptor = open_regular(path)
    try:
        _refuse_hollow(path, os.fstat(descriptor))
    finally:
        close(descriptor)


def _refuse_hollow(path: Path, status: os.stat_result) -> None:
    """Raise OSError for a large file that is nearly all hole, which takes no room and is read as zeros."""
    stored = status.st_blocks * 512  # 0 on file systems that do not tell
    if status.st_size > _MAX_HOLLOW_BYTES and 0 < stored < status.st_size / 100:
        raise OSError(errno.EINVAL, f"it has {status.st_size:,} bytes, but only {stored:,} are on disk", str(path))


def read_lines(path: Path, max_bytes: int, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the bytes of every line of a regular file. Of a longer line, only the beginning.

    Raises OSError if the file is longer than `max_bytes`.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        status = os.fstat(file.fileno())
        _refuse_hollow(path, status)
        if status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes, more than {max_bytes:,}", str(path))
        offset = 0
        while line := file.readline(max_line_bytes):
            yield offset, line
            offset += len(line)
            while line and not line.endswith(b"\n"):
                line = file.readline(CHUNK)
                offset += len(line)


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


def replace_file(path: Path, data: Bytes) -> None:
    """Replace `path` with `data`: after a crash at any instant it is the old file or the new one.

    The data goes to a temporary file first. Temporary files of killed processes are removed once they are ten minutes
    old by the clock of the file system. If the last step, syncing the folder, fails, the new file is in place but may
    not survive a power loss.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.aside")
    try:
        write_file(temporary, data)
        retry_interrupted(os.replace, temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            retry_interrupted(os.unlink, temporary)
        raise
    fsync_folder(path.parent)
    with contextlib.suppress(OSError):
        _remove_stale(path)


def rename(path: Path, new: Path) -> None:
    """Give a folder another name. An existing empty folder of that name is replaced."""
    retry_interrupted(os.rename, path, new)


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
    _remove(path, None, _MAX_DEPTH)


def _remove(name: Path | str, within: int | None, depth: int) -> None:
    """Remove by descriptors, so that no other process can replace a folder by a link meanwhile."""
    if depth == 0:
        raise OSError(errno.ENAMETOOLONG, f"its folders are more than {_MAX_DEPTH} deep", str(name))
    with contextlib.suppress(FileNotFoundError):
        status = retry_interrupted(os.stat, name, dir_fd=within, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            retry_interrupted(os.unlink, name, dir_fd=within)
            return
        descriptor = retry_interrupted(os.open, name, _READ | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=within)
        try:
            for inside in retry_interrupted(os.listdir, descriptor):
                _remove(inside, descriptor, depth - 1)
        finally:
            close(descriptor)
        retry_interrupted(os.rmdir, name, dir_fd=within)


def run_dir_error(path: Path, operation: str, error: OSError) -> RunDirError:
    """Return an error with the path, the failed operation, the reason and the cure."""
    cure = _cure_of_foreign(error) if operation == "read" else None
    message = f"{path} cannot be {operation}: {error.strerror or type(error).__name__}; {cure or _cure(path, error)}"
    return (
        UnreadableError(message) if operation == "read" and error.errno not in _DAMAGE_ERRORS else RunDirError(message)
    )


def _cure_of_foreign(error: OSError) -> str | None:
    """Return the cure for a file that a run cannot have written."""
    foreign = (errno.ELOOP, errno.EINVAL, errno.EFBIG, errno.EISDIR)
    return "a run does not make such a file: move it away, or restore a copy" if error.errno in foreign else None


def _cure(path: Path, error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return f"{_free(path)}; free some, keep fewer checkpoints, or choose another run_dir"
    if error.errno == errno.EDQUOT:
        return "the quota is used up: free some, keep fewer checkpoints, or choose another run_dir"
    if error.errno == errno.EFBIG:
        return "the limit on the size of a file is reached: raise it (ulimit -f), or choose another run_dir"
    if error.errno in (errno.ELOOP, errno.EINVAL):
        return "a run does not make such a file: move it away, or choose another run_dir"
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
