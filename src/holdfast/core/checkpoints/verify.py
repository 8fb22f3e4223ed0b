"""Whether a checkpoint is, byte by byte, what was saved.

Refused, with the file and what differs: a file that is missing, shorter, longer, of another checksum, a link or anything
else that is not a regular file; a file that the manifest does not name; a manifest or health that was edited or
belongs elsewhere; a folder or file that every user may write or that a stranger owns. Hidden files are left alone, as
nothing ever reads them: what a killed process left aside, or what a file system keeps for itself (.nfs*, .DS_Store).
A group may be allowed to write (see TrustedOwners). What the health says is not judged here.
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
    """A checksum that takes the bytes as they come."""

    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


class Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


CHECKSUMS: dict[str, Callable[[], Checksum]] = {"crc32": Crc32, "sha256": hashlib.sha256}


def checksum_file(path: Path, kind: str = "crc32") -> FileSum:
    """A regular file's length and checksum as they are now, for the manifest. OSError where it cannot be read."""
    length, digest = _read(path, CHECKSUMS[kind](), lambda count: None)
    return FileSum(bytes=length, sum=f"{kind}:{digest}")


def verify(
    checkpoint: CheckpointEntry | str | os.PathLike[str], *, progress: Progress | None = None, contents: bool = True
) -> str | None:
    """Why the checkpoint cannot be trusted, or None. Reads every byte; progress(done, total) follows, in bytes.

    contents: False leaves the bytes of the files to who reads them anyway, and looks at all else."""
    path = checkpoint.path if isinstance(checkpoint, CheckpointEntry) else Path(checkpoint)
    try:
        return _verify(path, checkpoint.digest if isinstance(checkpoint, CheckpointEntry) else None, progress, contents)
    except FileNotFoundError as error:
        return f"{_within(path, error)} is missing"
    except OSError as error:
        return f"{_within(path, error)} cannot be read: {error.strerror}"


def verify_except_contents(entry: CheckpointEntry) -> str | None:
    """`verify` without the contents, for who has to tell damage from a disk that does not answer: OSError for that."""
    try:
        return _verify(entry.path, entry.digest, None, contents=False)
    except FileNotFoundError as error:
        return f"{_within(entry.path, error)} is missing"


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
    doubt = trust.doubt("the folder", durable.retry_interrupted(os.lstat, path)) or _strange(
        path, entry.manifest, trust
    )
    if doubt is not None or not contents:
        return doubt
    return _compare(path, entry.manifest, progress)


def _strange(path: Path, manifest: Manifest, trust: TrustedOwners) -> str | None:
    """The first file that should not be there, is not there, is no file, has another length or is not to be trusted."""
    names = [n for n in sorted(durable.retry_interrupted(os.listdir, path)) if not n.startswith(".")]
    extra = next((n for n in names if n not in manifest.files and n not in (MANIFEST, HEALTH)), None)
    if extra is not None:
        return f"{extra} is not part of it: the manifest does not name it; move it out of the folder"
    for name in (MANIFEST, HEALTH, *manifest.files):
        try:
            found = durable.retry_interrupted(os.lstat, path / name)
        except FileNotFoundError:
            return f"{name} is missing"
        if stat.S_ISLNK(found.st_mode):
            return f"{name} is a symbolic link, not a file"
        if not stat.S_ISREG(found.st_mode):
            return f"{name} is not a regular file"
        if doubt := trust.doubt(name, found):
            return doubt
        if name in manifest.files and (differs := _length(name, found.st_size, manifest.files[name].bytes)):
            return differs
    return None


def _length(name: str, found: int, expected: int) -> str | None:
    if found == expected:
        return None
    how = "it was cut short" if found < expected else "something was added"
    return f"{name} has {found:,} bytes, not {expected:,}: {how}"


def _compare(path: Path, manifest: Manifest, progress: Progress | None) -> str | None:
    done, total = 0, sum(f.bytes for f in manifest.files.values())

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    for name, expected in manifest.files.items():
        kind = expected.sum.partition(":")[0]
        if kind not in CHECKSUMS:
            return (
                f"{name} has a checksum that this version cannot compute: {kind[:20]!r}; it has {', '.join(CHECKSUMS)}"
            )
        length, digest = _read(path / name, CHECKSUMS[kind](), advance)
        if differs := _length(name, length, expected.bytes):
            return differs
        if f"{kind}:{digest}" != expected.sum:
            return (
                f"{name} is not what was saved: its checksum is {kind}:{digest}, the manifest says {expected.sum[:80]}"
            )
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


def _within(path: Path, error: OSError) -> str:
    """The file an error is about, as a person would name it."""
    name = Path(os.fsdecode(error.filename)).name if isinstance(error.filename, str | bytes | os.PathLike) else ""
    return "the folder" if name in ("", path.name) else name
