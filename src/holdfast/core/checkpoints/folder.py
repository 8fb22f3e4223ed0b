"""The checkpoints of a run on disk. A folder named step_* is whole: it got that name after all of it was on disk.

    .tmp-step_00001000    in the making
    step_00001000         a checkpoint; step_00001000.b2 where branch 2 came to the same step
    .gone-step_00001000   being removed

Whoever changes anything here holds the run's lock; anybody may list and read at any time.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from holdfast.core.base import durable
from holdfast.core.base.errors import RunDirError
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.entry import CheckpointEntry, TrustedOwners, read_entry
from holdfast.core.checkpoints.manifest import (
    HEALTH,
    MANIFEST,
    HealthRecord,
    Manifest,
    is_name,
    seal,
    unseal_manifest,
)

_TMP = ".tmp-"
_GONE = ".gone-"


class Folder:
    """RUN/checkpoints. Every OSError comes out as a RunDirError that says what to do."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def entries(self) -> list[CheckpointEntry]:
        """Every checkpoint, by step and then branch, damaged ones too. Reads two small files of each."""
        found = (read_entry(self.path / name) for name in self._names() if is_name(name))
        return sorted((e for e in found if e is not None), key=lambda e: (e.step, e.branch, e.name))

    def entry(self, name: str) -> CheckpointEntry:
        """One checkpoint by its name; RunDirError where there is none."""
        entry = read_entry(self._at(name))
        if entry is None:
            raise RunDirError(f"{self.path / name}: no such checkpoint; {self.path} has {self._known()}")
        return entry

    def staging(self, name: str) -> Path:
        """An empty folder to write the files of a checkpoint into, mode 0755 under the umask; an old one is removed.

        Files in it are to be made with mode 0644 at most. `publish` makes a checkpoint of it, `sweep` removes it.
        """
        path = self.path / f"{_TMP}{self._at(name).name}"
        with _told(path, "made"):
            if not os.path.isdir(self.path):
                durable.retry_interrupted(os.makedirs, self.path, 0o755, exist_ok=True)
                durable.fsync_folder(self.path.parent)
            durable.remove_tree(path)
            durable.retry_interrupted(os.mkdir, path, 0o755)
        return path

    def publish(
        self,
        staging: Path,
        manifest: Manifest,
        health: Health = Health.CANDIDATE,
        why: str = "",
        *,
        time: float,
        handover: bool = False,
    ) -> CheckpointEntry:
        """Make the files in `staging` the checkpoint `manifest.name`: whole and on disk, or not there under that name.

        Refused where there is one of that name, or where the files are not those of the manifest by name and length,
        or could not be trusted later. After a failure `staging` is removed if it can be. One failure is after the fact:
        where the folder above cannot be synced, the checkpoint is listed, whole, and may not survive a power loss.
        """
        path = self._at(manifest.name)
        if staging != self.path / f"{_TMP}{manifest.name}":
            raise ValueError(f"{staging} is not what staging({manifest.name!r}) returned")
        try:
            with _told(staging, "published"):
                if os.path.lexists(path):
                    raise RunDirError(f"{path} is there already; remove it, or save on the branch the run is on now")
                record = HealthRecord(health=health, why=why, handover=handover, manifest=seal(manifest)[1], time=time)
                entry = self._complete(staging, manifest, record)
                durable.retry_interrupted(os.rename, staging, path)
        except BaseException:
            with contextlib.suppress(OSError):
                durable.remove_tree(staging)
            raise
        with _told(path, "forced to disk"):
            durable.fsync_folder(self.path)
        return entry

    def mark(self, name: str, health: Health, why: str, time: float, *, handover: bool = False) -> CheckpointEntry:
        """Say what is thought of a checkpoint now. A damaged one is bad already: nothing else can be said of it."""
        entry = self.entry(name)
        if entry.damage is not None:
            if health is Health.BAD:
                return entry
            raise RunDirError(f"{entry.path} cannot be marked {health}: {entry.damage}; remove it, or restore a copy")
        record = HealthRecord(health=health, why=why, handover=handover, manifest=entry.digest, time=time)
        with _told(entry.path / HEALTH, "written"):
            durable.replace_file(entry.path / HEALTH, seal(record)[0])
        return entry._replace(health=health, why=why, handover=handover)

    def remove(self, name: str) -> None:
        """Remove a checkpoint: gone from the list at once and for good, then deleted. Of a link, only the link."""
        path, gone = self._at(name), self.path / f"{_GONE}{name}"
        with _told(path, "removed"):
            durable.remove_tree(gone)
            try:
                durable.retry_interrupted(os.rename, path, gone)
            except FileNotFoundError:
                raise RunDirError(f"{path}: no such checkpoint; {self.path} has {self._known()}") from None
            durable.fsync_folder(self.path)
            durable.remove_tree(gone)

    def sweep(self) -> list[str]:
        """Remove what a killed process left in the making or half removed; the names. Nothing may be in the making."""
        removed: list[str] = []
        failed: RunDirError | None = None
        for left in self._leftovers():
            try:
                with _told(left, "removed"):
                    durable.remove_tree(left)
            except RunDirError as error:
                failed = failed or error
            else:
                removed.append(str(left.relative_to(self.path)))
        if failed is not None:
            raise failed
        return removed

    def _leftovers(self) -> Iterator[Path]:
        for name in self._names():
            path = self.path / name
            if name.startswith((_TMP, _GONE)) or durable.is_temporary(name):
                yield path
            elif is_name(name) and os.path.isdir(path) and not os.path.islink(path):
                asides: list[str] = []
                with contextlib.suppress(OSError):  # one that cannot be read is listed as damaged; the others are swept
                    asides = [n for n in durable.retry_interrupted(os.listdir, path) if durable.is_temporary(n)]
                yield from (path / n for n in sorted(asides))

    def _complete(self, staging: Path, manifest: Manifest, record: HealthRecord) -> CheckpointEntry:
        """Add the two small files and force everything to disk."""
        content, digest = seal(manifest)
        unseal_manifest(content)  # what would not be read back is refused now, not at the resume
        for name in (MANIFEST, HEALTH):
            if os.path.lexists(staging / name):
                raise RunDirError(f"{staging / name} is there already; it is written here and nowhere else")
        strange = _mismatch(staging, manifest)
        if strange is not None:
            raise RunDirError(f"{staging} is not what its manifest says: {strange}; nothing was published")
        durable.write_file(staging / MANIFEST, content, exclusive=True)
        durable.write_file(staging / HEALTH, seal(record)[0], exclusive=True)
        for name in manifest.files:
            durable.fsync_file(staging / name)
        durable.fsync_folder(staging)
        path = self.path / manifest.name
        return CheckpointEntry(path.name, path, manifest, digest, record.health, record.why, None, record.handover)

    def _at(self, name: str) -> Path:
        if not is_name(name):
            raise ValueError(f"{name!r} is not the name of a checkpoint, such as step_00001000")
        return self.path / name

    def _names(self) -> list[str]:
        try:
            return sorted(durable.retry_interrupted(os.listdir, self.path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise durable.run_dir_error(self.path, "listed", error) from None

    def _known(self) -> str:
        names = [name for name in self._names() if is_name(name)]
        return ", ".join(names[-5:]) + (f" and {len(names) - 5} older" if len(names) > 5 else "") or "none"


def _mismatch(staging: Path, manifest: Manifest) -> str | None:
    """The first thing in the folder that is not as the manifest has it, by names, kinds, lengths and modes."""
    trust = TrustedOwners(staging)
    extra = next(
        (
            n
            for n in sorted(durable.retry_interrupted(os.listdir, staging))
            if not n.startswith(".") and n not in manifest.files
        ),
        None,
    )
    if extra is not None:
        return f"{extra} is not part of it"
    if doubt := trust.doubt("the folder", durable.retry_interrupted(os.lstat, staging)):
        return doubt
    for name, expected in manifest.files.items():
        try:
            found = durable.retry_interrupted(os.lstat, staging / name)
        except FileNotFoundError:
            return f"{name} is missing"
        if not stat.S_ISREG(found.st_mode):
            return f"{name} is not a regular file"
        if found.st_size != expected.bytes:
            return f"{name} has {found.st_size:,} bytes, not {expected.bytes:,}"
        if doubt := trust.doubt(name, found):
            return doubt
    return None


@contextlib.contextmanager
def _told(path: Path, doing: str) -> Iterator[None]:
    """OSError inside becomes a RunDirError."""
    try:
        yield
    except OSError as error:
        raise durable.run_dir_error(path, doing, error) from None
