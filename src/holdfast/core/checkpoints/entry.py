"""A checkpoint as it is listed: what its two small files say of it, and whether its owner and modes can be trusted."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

from holdfast.core.base import durable
from holdfast.core.base.errors import RunDirError
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.manifest import HEALTH, MANIFEST, Manifest, is_name, unseal_health, unseal_manifest

_MOST_BYTES = 256 << 20


class CheckpointEntry(NamedTuple):
    """A checkpoint folder. Where `damage` says what is wrong with its small files, it is bad whatever they say."""

    name: str
    path: Path
    manifest: Manifest | None
    digest: str
    """the checksum of the manifest; empty without one"""
    health: Health
    why: str
    damage: str | None = None
    handover: bool = False
    """saved at an orderly stop: the next life goes on from here, a candidate as it is"""

    @property
    def step(self) -> int:
        """By its name, which a damaged one has too."""
        return int(self.name.split(".")[0].removeprefix("step_"))

    @property
    def branch(self) -> int:
        return int(self.name.partition(".b")[2] or 0)


def read_entry(path: Path) -> CheckpointEntry | None:
    """The checkpoint in a folder of such a name; None where there is no folder. Raises nothing: damage is in the entry."""
    if not is_name(path.name):
        return None
    try:
        found = durable.retry_interrupted(os.lstat, path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return _damaged(path, f"it cannot be read: {error.strerror}")
    if stat.S_ISLNK(found.st_mode):
        return _damaged(path, "it is a symbolic link; put the folder itself here") if os.path.isdir(path) else None
    if not stat.S_ISDIR(found.st_mode):
        return None
    entry = _read(path)
    if entry.damage is not None and not os.path.lexists(path):
        return None  # removed while it was being read
    return entry


def _read(path: Path) -> CheckpointEntry:
    try:
        manifest, digest = unseal_manifest(_content(path / MANIFEST))
    except RunDirError as error:
        return _damaged(path, str(error))
    if manifest.name != path.name:
        return _damaged(
            path, f"{MANIFEST} is that of {manifest.name}: the folder was copied or renamed", manifest, digest
        )
    try:
        record = unseal_health(_content(path / HEALTH))
    except RunDirError as error:
        return _damaged(path, str(error), manifest, digest)
    if record.manifest != digest:
        return _damaged(path, f"{HEALTH} belongs to another {MANIFEST}: one of them was replaced", manifest, digest)
    return CheckpointEntry(path.name, path, manifest, digest, record.health, record.why, None, record.handover)


def _content(path: Path) -> bytes:
    """RunDirError, without the path, where it cannot be read."""
    try:
        return durable.read_file(path, _MOST_BYTES)
    except FileNotFoundError:
        raise RunDirError(f"{path.name} is missing") from None
    except OSError as error:
        raise RunDirError(f"{path.name} cannot be read: {error.strerror}") from None


def _damaged(path: Path, damage: str, manifest: Manifest | None = None, digest: str = "") -> CheckpointEntry:
    return CheckpointEntry(path.name, path, manifest, digest, Health.BAD, damage, damage)


class TrustedOwners:
    """Whose files are believed: this user's, root's, and those of who owns the run directory; none that all may write.

    What the group may write is believed: a group is chosen, and sharing a run with one is common. Holdfast itself makes
    folders 0755 and files 0644 under the umask, so it never makes one writable by others, the group included.
    """

    def __init__(self, checkpoint: Path) -> None:
        above = checkpoint.absolute().parent
        self._home = above.parent if above.name == "checkpoints" else above
        self._owners = {os.geteuid(), 0, durable.retry_interrupted(os.stat, self._home).st_uid}

    def doubt(self, name: str, found: os.stat_result) -> str | None:
        """Why it is not believed, with the cure; None where it is."""
        if stat.S_IMODE(found.st_mode) & stat.S_IWOTH:
            return (
                f"{name} can be written by every user (mode {stat.S_IMODE(found.st_mode):04o}); if it is as you left it, "
                f"chmod -R o-w the folder; a file system without permissions cannot hold checkpoints"
            )
        if found.st_uid not in self._owners:
            return (
                f"{name} is owned by user {found.st_uid}, who is neither you, nor root, nor the owner of {self._home}; "
                f"if you trust it, copy the folder, or chown it"
            )
        return None
