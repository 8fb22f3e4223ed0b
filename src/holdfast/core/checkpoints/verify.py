"""Verification: whether a checkpoint is, byte by byte, what was saved.

Rejected, with the file and the difference: a file that is missing, shorter, longer, of another checksum, a link or
otherwise not a regular file; a file that the manifest does not list; a manifest or health file that was edited or
belongs elsewhere; a world-writable folder or file, or one with a foreign owner (see TrustedOwners). Hidden files are
ignored, since nothing reads them: temporary files of a killed process, or files of the file system (.nfs*, .DS_Store).
The health itself is not judged here.
"""

from __future__ import annotations

import hashlib
import os
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from holdfast.core.base import durable
from holdfast.core.checkpoints.entry import CheckpointEntry, TrustedOwners, read_entry
from holdfast.core.checkpoints.manifest import HEALTH, MANIFEST, FileSum, Manifest, is_name

Progress = Callable[[int, int], None]


class Checksum(Protocol):
    """A checksum that is updated piece by piece."""

    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


class Crc32:
    """CRC-32 with the interface of hashlib."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


CHECKSUMS: dict[str, Callable[[], Checksum]] = {"crc32": Crc32, "sha256": hashlib.sha256}


def checksum_file(path: Path, algorithm: str = "crc32") -> FileSum:
    """Return the length and checksum of a regular file. Raise OSError if it cannot be read."""
    length, digest = _read(path, CHECKSUMS[algorithm](), lambda count: None)
    return FileSum(bytes=length, sum=f"{algorithm}:{digest}")


def verify(
    checkpoint: CheckpointEntry | str | os.PathLike[str], *, progress: Progress | None = None, contents: bool = True
) -> str | None:
    """Return why the checkpoint cannot be trusted, or None. Reads every byte and calls progress(done, total) in bytes.

    contents: False skips the checksums of the files, for a caller that compares them when it reads them.
    """
    path = checkpoint.path if isinstance(checkpoint, CheckpointEntry) else Path(checkpoint)
    try:
        return _verify(path, checkpoint.digest if isinstance(checkpoint, CheckpointEntry) else None, progress, contents)
    except FileNotFoundError as error:
        return f"{_file_in(path, error)} is missing"
    except OSError as error:
        return f"{_file_in(path, error)} cannot be read: {error.strerror}"


def verify_except_contents(entry: CheckpointEntry) -> str | None:
    """Verify all but the file contents. Raise OSError if the disk does not answer: that is not damage."""
    try:
        return _verify(entry.path, entry.digest, None, contents=False)
    except FileNotFoundError as error:
        return f"{_file_in(entry.path, error)} is missing"


def _verify(path: Path, listed: str | None, progress: Progress | None, contents: bool) -> str | None:
    if not is_name(path.name):
        return f"{path.name} is not the name of a checkpoint, such as step_00001000"
    entry = read_entry(path)
    if entry is None:
        return "there is no such folder"
    if entry.damage is not None:
        return entry.damage
    if listed is not None and entry.digest != listed:
        return f"{MANIFEST} is not the one that was listed: it was replaced since"
    assert entry.manifest is not None  # else it is damaged
    trust = TrustedOwners(path)
    folder = durable.retry_interrupted(os.lstat, path)
    problem = trust.distrust_folders() or trust.distrust("the folder", folder)
    problem = problem or _check_files(path, entry.manifest, trust)
    if problem is not None or not contents:
        return problem
    return _compare_contents(path, entry.manifest, progress)


def _check_files(path: Path, manifest: Manifest, trust: TrustedOwners) -> str | None:
    """Return the first file that is extra, missing, not regular, of another length, or not to be trusted."""
    names = [n for n in sorted(durable.retry_interrupted(os.listdir, path)) if not n.startswith(".")]
    extra = next((n for n in names if n not in manifest.files and n not in (MANIFEST, HEALTH)), None)
    if extra is not None:
        return f"{extra} is not part of the checkpoint: the manifest does not list it; move it out of the folder"
    for name in (MANIFEST, HEALTH, *manifest.files):
        try:
            status = durable.retry_interrupted(os.lstat, path / name)
        except FileNotFoundError:
            return f"{name} is missing"
        if stat.S_ISLNK(status.st_mode):
            return f"{name} is a symbolic link, not a file"
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is not a regular file"
        if distrust := trust.distrust(name, status):
            return distrust
        if name in manifest.files and (difference := _compare_length(name, status.st_size, manifest.files[name].bytes)):
            return difference
    return None


def _compare_length(name: str, length: int, expected: int) -> str | None:
    if length == expected:
        return None
    how = "it was cut short" if length < expected else "something was added"
    return f"{name} has {length:,} bytes, not {expected:,}: {how}"


def _compare_contents(path: Path, manifest: Manifest, progress: Progress | None) -> str | None:
    done, total = 0, sum(f.bytes for f in manifest.files.values())

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    differences = (_compare_file(path / name, expected, advance) for name, expected in manifest.files.items())
    return next((difference for difference in differences if difference is not None), None)


def compare_file(path: Path, expected: FileSum) -> str | None:
    """Return how a file differs from what was saved, or None."""
    try:
        return _compare_file(path, expected, lambda count: None)
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"


def _compare_file(path: Path, expected: FileSum, advance: Callable[[int], None]) -> str | None:
    name, algorithm = path.name, expected.sum.partition(":")[0]
    if algorithm not in CHECKSUMS:
        known = ", ".join(CHECKSUMS)
        return f"{name} has a checksum that this version cannot compute: {algorithm[:20]!r}; it has {known}"
    length, digest = _read(path, CHECKSUMS[algorithm](), advance)
    if difference := _compare_length(name, length, expected.bytes):
        return difference
    actual = f"{algorithm}:{digest}"
    if actual != expected.sum:
        return f"{name} is not what was saved: its checksum is {actual}, the manifest says {expected.sum[:80]}"
    return None


def _read(path: Path, checksum: Checksum, advance: Callable[[int], None]) -> tuple[int, str]:
    descriptor = durable.open_regular(path)
    try:
        length = 0
        while data := durable.retry_interrupted(os.read, descriptor, durable.CHUNK):
            checksum.update(data)
            length += len(data)
            advance(len(data))
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        durable.close(descriptor)
    return length, checksum.hexdigest()


def _file_in(path: Path, error: OSError) -> str:
    """Return the name of the file that an error is about, or "the folder"."""
    name = Path(os.fsdecode(error.filename)).name if isinstance(error.filename, str | bytes | os.PathLike) else ""
    return "the folder" if name in ("", path.name) else name
