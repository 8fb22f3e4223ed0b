"""A checkpoint as listed: the content of its two small files, and whether its owner and modes can be trusted."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

from holdfast.core.base import durable
from holdfast.core.base.errors import RunDirError
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.manifest import HEALTH, MANIFEST, Manifest, is_name, unseal_health, unseal_manifest

_MAX_BYTES = 16 << 20


class CheckpointEntry(NamedTuple):
    """A checkpoint folder. If `damage` tells what is wrong with its small files, it is bad whatever they contain."""

    name: str
    path: Path
    manifest: Manifest | None
    digest: str
    """the checksum of the manifest; empty if there is none"""
    health: Health
    why: str
    damage: str | None = None
    handover: bool = False
    """saved at an orderly stop: the next process resumes from it although it is a candidate"""
    in_memory: bool = False
    """it is in the memory tier, not in the run directory"""

    @property
    def step(self) -> int:
        """The step in its name, which a damaged checkpoint has too."""
        return int(self.name.split(".")[0].removeprefix("step_"))

    @property
    def branch(self) -> int:
        return int(self.name.partition(".b")[2] or 0)


def read_entry(path: Path) -> CheckpointEntry | None:
    """Return the checkpoint in a folder; None if it is not one. Never raises: the entry has the damage."""
    if not is_name(path.name):
        return None
    try:
        status = durable.retry_interrupted(os.lstat, path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return _damaged(path, f"it cannot be read: {error.strerror}")
    if stat.S_ISLNK(status.st_mode):
        return _damaged(path, "it is a symbolic link; put the folder itself here") if os.path.isdir(path) else None
    if not stat.S_ISDIR(status.st_mode):
        return None
    entry = _read(path)
    if entry.damage is not None and not os.path.lexists(path):
        return None  # removed meanwhile
    return entry


def _read(path: Path) -> CheckpointEntry:
    try:
        manifest, digest = unseal_manifest(_content(path / MANIFEST))
    except RunDirError as error:
        return _damaged(path, str(error))
    if manifest.name != path.name:
        return _damaged(
            path, f"{MANIFEST} belongs to {manifest.name}: the folder was copied or renamed", manifest, digest
        )
    try:
        record = unseal_health(_content(path / HEALTH))
    except RunDirError as error:
        return _damaged(path, str(error), manifest, digest)
    if record.manifest != digest:
        return _damaged(path, f"{HEALTH} belongs to another {MANIFEST}: one of them was replaced", manifest, digest)
    return CheckpointEntry(path.name, path, manifest, digest, record.health, record.why, None, record.handover)


def _content(path: Path) -> bytes:
    """Return the content of a file. Raise RunDirError, without the path, if it cannot be read."""
    try:
        return durable.read_file(path, _MAX_BYTES)
    except FileNotFoundError:
        raise RunDirError(f"{path.name} is missing") from None
    except OSError as error:
        raise RunDirError(f"{path.name} cannot be read: {error.strerror}") from None


def _damaged(path: Path, damage: str, manifest: Manifest | None = None, digest: str = "") -> CheckpointEntry:
    return CheckpointEntry(path.name, path, manifest, digest, Health.BAD, damage, damage)


class TrustedOwners:
    """Decides which files to trust: those of this user, root, or the owner of the run directory, not world-writable.

    In a folder that every user can write to, any of them could put another checkpoint in place: none in it is trusted.

    Group-writable files are trusted, since sharing a run with a chosen group is common. Holdfast itself makes folders
    0755 and files 0644 under the umask.
    """

    def __init__(self, checkpoint: Path) -> None:
        above = checkpoint.absolute().parent
        self._home = above.parent if above.name == "checkpoints" else above
        home = durable.retry_interrupted(os.stat, self._home)
        self._owners = {os.geteuid(), 0, home.st_uid}
        self._folders = {self._home: home, above: durable.retry_interrupted(os.stat, above)}

    def distrust_folders(self) -> str | None:
        """Return why the run directory and its checkpoints folder are not trusted, with the cure; None if they are."""
        for path, status in self._folders.items():
            mode = stat.S_IMODE(status.st_mode)
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                return (
                    f"{path} can be written by every user (mode {mode:04o}); if its content is yours: chmod o-w {path}"
                )
        return None

    def distrust(self, name: str, status: os.stat_result) -> str | None:
        """Return why a file is not trusted, with the cure; None if it is."""
        if stat.S_IMODE(status.st_mode) & stat.S_IWOTH:
            return (
                f"{name} can be written by every user (mode {stat.S_IMODE(status.st_mode):04o}); if its content is yours, "
                f"chmod -R o-w the folder; a file system without permissions cannot hold checkpoints"
            )
        if status.st_uid not in self._owners:
            return (
                f"{name} is owned by user {status.st_uid}, who is neither you, nor root, nor the owner of {self._home}; "
                f"if you trust it, copy the folder, or chown it"
            )
        return None
