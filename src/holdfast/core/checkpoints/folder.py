"""The checkpoint folder of a run. A folder named step_* is complete: it got that name after all of it was on disk.

    .tmp-step_00001000    being written
    step_00001000         a checkpoint; step_00001000.b2 on branch 2
    .gone-step_00001000   being removed

A process that changes anything here has locked the run; any process may list and read at any time.

The folder may be a link to a scratch disk. It is resolved once, and then has to prove that it is this run's before
anything in it is removed: by a checkpoint of the run, or by the file `.run` with its identity, made in an empty folder.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from holdfast.core.base import durable
from holdfast.core.base.errors import RunDirError
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.entry import CheckpointEntry, TrustedOwners, read_entry
from holdfast.core.checkpoints.manifest import HEALTH, MANIFEST, HealthRecord, Manifest, is_name, seal, unseal_manifest

_TMP = ".tmp-"
_GONE = ".gone-"
_OWNER = ".run"


class Folder:
    """RUN/checkpoints. Turns every OSError into a RunDirError with a cure.

    run: the identity of the run; needed to change anything in a folder that is a link. `check` is called before every
    change, and raises if this process may not write to the run directory.
    """

    def __init__(
        self, path: str | os.PathLike[str], run: str | None = None, check: Callable[[], None] | None = None
    ) -> None:
        self._is_link = os.path.islink(path)
        self.path = Path(path).resolve() if self._is_link else Path(path)
        self.run, self.check = run, check

    def entries(self) -> list[CheckpointEntry]:
        """Return every checkpoint by step and branch, including damaged ones. Reads two small files of each."""
        entries = (read_entry(self.path / name) for name in self._names() if is_name(name))
        return sorted((e for e in entries if e is not None), key=lambda e: (e.step, e.branch, e.name))

    def entry(self, name: str) -> CheckpointEntry:
        """Return a checkpoint by its name. Raise RunDirError if there is none."""
        entry = read_entry(self._at(name))
        if entry is None:
            raise RunDirError(f"{self.path / name}: no such checkpoint; {self.path} has {self._known()}")
        return entry

    def staging(self, name: str) -> Path:
        """Make and return an empty folder for the files of a checkpoint, mode 0755 under the umask; remove an old one.

        The files must have mode 0644 at most. `publish` turns the folder into a checkpoint, `sweep` removes it.
        """
        path = self.path / f"{_TMP}{self._at(name).name}"
        with _as_run_dir_error(path, "made"):
            self._check_change()
            if self._is_link:
                self._claim()
            elif not os.path.isdir(self.path):
                durable.make_folder(self.path)
                durable.fsync_folder(self.path.parent)
            durable.remove_tree(path)
            durable.make_new_folder(path)
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
        held: Collection[str] | None = None,
    ) -> CheckpointEntry:
        """Turn `staging` into the checkpoint `manifest.name`: complete and on disk, or not there at all.

        Raises RunDirError if that name exists, or if the files differ from the manifest in name or length, or could not
        be trusted later; then `staging` is removed if possible. If the last step, syncing the parent folder, fails, the
        checkpoint is listed and complete, but may not survive a power loss.
        held: the files of the manifest that are in this folder; all of them, unless other hosts hold the rest.
        """
        path = self._at(manifest.name)
        if staging != self.path / f"{_TMP}{manifest.name}":
            raise ValueError(f"{staging} is not what staging({manifest.name!r}) returned")
        try:
            with _as_run_dir_error(staging, "published"):
                if os.path.lexists(path):
                    raise RunDirError(f"{path} exists already; remove it, or save on the current branch of the run")
                record = HealthRecord(health=health, why=why, handover=handover, manifest=seal(manifest)[1], time=time)
                entry = self._complete(staging, manifest, record, manifest.files if held is None else held)
                self._check_change()
                durable.rename(staging, path)
        except BaseException:
            with contextlib.suppress(OSError):
                durable.remove_tree(staging)
            raise
        with _as_run_dir_error(path, "forced to disk"):
            durable.fsync_folder(self.path)
        return entry

    def mark(self, name: str, health: Health, why: str, time: float, *, handover: bool = False) -> CheckpointEntry:
        """Change the health of a checkpoint. Raise RunDirError for a damaged one, which is bad and stays bad."""
        entry = self.entry(name)
        if entry.damage is not None:
            if health is Health.BAD:
                return entry
            raise RunDirError(f"{entry.path} cannot be marked {health}: {entry.damage}; remove it, or restore a copy")
        record = HealthRecord(health=health, why=why, handover=handover, manifest=entry.digest, time=time)
        with _as_run_dir_error(entry.path / HEALTH, "written"):
            self._check_change(entry)
            durable.replace_file(entry.path / HEALTH, seal(record)[0])
        return entry._replace(health=health, why=why, handover=handover)

    def remove(self, name: str) -> None:
        """Remove a checkpoint: rename it, so that it is not listed any more, then delete it; of a link, only the link."""
        path, gone = self._at(name), self.path / f"{_GONE}{name}"
        with _as_run_dir_error(path, "removed"):
            self._check_change(read_entry(path))
            durable.remove_tree(gone)
            try:
                durable.rename(path, gone)
            except FileNotFoundError:
                raise RunDirError(f"{path}: no such checkpoint; {self.path} has {self._known()}") from None
            durable.fsync_folder(self.path)
            durable.remove_tree(gone)

    def sweep(self) -> list[str]:
        """Remove the unfinished folders of killed processes, and return their names. No save may be under way."""
        removed: list[str] = []
        failed: RunDirError | None = None
        with _as_run_dir_error(self.path, "swept"):
            self._check_change()
        for leftover in self._leftovers() if self._is_of_run() else ():
            try:
                with _as_run_dir_error(leftover, "removed"):
                    durable.remove_tree(leftover)
            except RunDirError as error:
                failed = failed or error
            else:
                removed.append(str(leftover.relative_to(self.path)))
        if failed is not None:
            raise failed
        return removed

    def _leftovers(self) -> Iterator[Path]:
        for name in self._names():
            path = self.path / name
            if is_unfinished(name) or durable.is_temporary(name):
                yield path
            elif is_name(name) and os.path.isdir(path) and not os.path.islink(path):
                temporary: list[str] = []
                with contextlib.suppress(OSError):  # an unreadable folder is listed as damaged; the others are swept
                    temporary = [n for n in durable.retry_interrupted(os.listdir, path) if durable.is_temporary(n)]
                yield from (path / n for n in sorted(temporary))

    def _check_change(self, entry: CheckpointEntry | None = None) -> None:
        """Raise if this process may not change the folder, or an entry of it."""
        if self.check is not None:
            self.check()
        if os.path.islink(self.path):
            raise RunDirError(f"{self.path} was replaced by a link while it was in use; nothing is written through it")
        if self._is_link and entry is not None and (entry.manifest is None or entry.manifest.run != self.run):
            raise RunDirError(
                f"{entry.path} is left alone: the checkpoints folder is a link, and this is not known to be of the run"
            )

    def _is_of_run(self) -> bool:
        """Return whether everything in the folder is this run's: it is inside the run directory, or it is proven."""
        if not self._is_link:
            return True
        runs = {entry.manifest.run for entry in self.entries() if entry.manifest is not None}
        if self.run is None or runs:
            return runs == {self.run}
        try:
            return durable.read_file(self.path / _OWNER, 1000) == self.run.encode()
        except OSError:
            return False

    def _claim(self) -> None:
        """Make an empty folder that is a link this run's. Raise RunDirError if there is anything of others in it."""
        if self._is_of_run():
            return
        if self.run is None or not os.path.isdir(self.path) or self._names():
            problem = "is not empty and holds no checkpoint of this run" if self._names() else "is not a folder"
            raise RunDirError(
                f"the checkpoints folder is a link to {self.path}, which {problem}; link an empty folder, or remove the link"
            )
        durable.write_file(self.path / _OWNER, self.run.encode())

    def _complete(
        self, staging: Path, manifest: Manifest, record: HealthRecord, held: Collection[str]
    ) -> CheckpointEntry:
        """Add the two small files, force everything to disk, and return the entry."""
        content, digest = seal(manifest)
        unseal_manifest(content)  # refuse now what could not be read at a resume
        for name in (MANIFEST, HEALTH):
            if os.path.lexists(staging / name):
                raise RunDirError(f"{staging / name} exists already; only publish writes it")
        if (mismatch := _mismatch(staging, manifest, held)) is not None:
            raise RunDirError(f"{staging} differs from its manifest: {mismatch}; nothing was published")
        durable.write_file(staging / MANIFEST, content)
        durable.write_file(staging / HEALTH, seal(record)[0])
        for name in held:
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


def is_unfinished(name: str) -> bool:
    """Return whether a name is that of a folder in which a checkpoint is being written or removed."""
    return any(name.startswith(prefix) and is_name(name.removeprefix(prefix)) for prefix in (_TMP, _GONE))


def _mismatch(staging: Path, manifest: Manifest, held: Collection[str]) -> str | None:
    """Return the first difference between the folder and the manifest in names, types, lengths and modes."""
    trust = TrustedOwners(staging)
    extra = next(
        (n for n in sorted(durable.retry_interrupted(os.listdir, staging)) if not n.startswith(".") and n not in held),
        None,
    )
    if extra is not None:
        return f"{extra} is not part of it"
    if distrust := trust.distrust("the folder", durable.retry_interrupted(os.lstat, staging)):
        return distrust
    for name, expected in ((name, manifest.files[name]) for name in held):
        try:
            status = durable.retry_interrupted(os.lstat, staging / name)
        except FileNotFoundError:
            return f"{name} is missing"
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is not a regular file"
        if status.st_size != expected.bytes:
            return f"{name} has {status.st_size:,} bytes, not {expected.bytes:,}"
        if distrust := trust.distrust(name, status):
            return distrust
    return None


@contextlib.contextmanager
def _as_run_dir_error(path: Path, operation: str) -> Iterator[None]:
    """Turn an OSError of the block into a RunDirError."""
    try:
        yield
    except OSError as error:
        raise durable.run_dir_error(path, operation, error) from None
