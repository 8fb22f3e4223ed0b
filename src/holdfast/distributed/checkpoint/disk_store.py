"""Writes, marks, removes and reads the checkpoints of a run directory, for one rank or many.

One background thread runs the requests in order. With several ranks, each writes its share into the same staging folder.
Rank 0 waits for the others' completion notes, writes the manifest and publishes the folder; the others wait to see it.
The background thread calls no collective, and every wait has a time limit.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from holdfast.core.base import durable
from holdfast.core.base.errors import RunDirError, SetupError, UnreadableError
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.entry import CheckpointEntry, read_entry
from holdfast.core.checkpoints.folder import Folder
from holdfast.core.checkpoints.manifest import FileSum, HealthRecord, Manifest, name_of, seal
from holdfast.core.checkpoints.resume import CHECKPOINTS, RejectedCheckpoint, pick, resolve_resume_path
from holdfast.core.checkpoints.verify import verify, verify_except_contents
from holdfast.distributed.checkpoint.rank_writer import write_rank
from holdfast.distributed.world import World
from holdfast.runtime.ports.checkpoint_store import (
    CheckpointContents,
    CheckpointLabel,
    ContentChecks,
    FindTarget,
    RestoredCheckpoint,
    StoreEvent,
)
from holdfast.runtime.snapshots.encoding import decode, encode
from holdfast.runtime.tensors.inspect import checksums

log = logging.getLogger("holdfast")

_POLL_SECONDS = 0.02
_MAX_NOTE_BYTES = 1 << 24


class DiskCheckpointStore:
    """Implements CheckpointStore in the checkpoints folder of a run directory."""

    def __init__(self, run_dir: str | os.PathLike[str], world: World, rank_timeout_seconds: float) -> None:
        self._run_dir = Path(run_dir).resolve()
        self._folder = Folder(self._run_dir / CHECKPOINTS)
        self._world, self._timeout = world, rank_timeout_seconds
        self.is_rank_zero = self.owns_folder = world.rank == 0
        self._run = ""
        self._has_run_dir = False
        """the run directory was there when the run began"""
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="holdfast-disk")
        self._requests: list[Future[None]] = []
        self._aborted = False
        self.events: deque[StoreEvent] = deque()

    def open(self, run: str, check: Callable[[], None]) -> None:
        """Remove what a killed process left unfinished. The caller holds the run directory's lock. All ranks call it."""
        self._run = self._folder.run = run
        self._folder.check = check
        self._has_run_dir = durable.retry_interrupted(self._run_dir.is_dir)
        if self.owns_folder:
            try:
                self._folder.sweep()
            except RunDirError as error:
                log.warning("holdfast: %s", error)
        self._world.barrier(self._timeout)

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's value. All ranks call it."""
        return self._world.broadcast_object(value)

    # ---- in the background

    def save(self, contents: CheckpointContents, label: CheckpointLabel) -> None:
        self._submit(lambda: self._save(contents, label))

    def choose_together(self, names: Sequence[str]) -> str | None:
        if self.is_rank_zero or not names:
            return names[0] if names else None

        def begun() -> str | None:
            return next((name for name in names if self._staging_of(name).is_dir()), None)

        try:
            self._wait_until(lambda: begun() is not None, lambda: "rank 0 has begun no checkpoint")
        except RunDirError:
            return None
        return begun()

    def save_now(self, contents: CheckpointContents, label: CheckpointLabel) -> bool:
        try:
            (self._save_distributed if self._world.size > 1 else self._save_single)(contents, label)
        except Exception as error:  # whatever it is, the process ends anyway
            log.error("holdfast: step %d could not be saved: %s", contents.step, str(error) or type(error).__name__)
            return False
        finally:
            contents.release()
        return True

    def mark(self, name: str, health: Health, why: str, handover: bool = False) -> None:
        if self.is_rank_zero:
            self._submit(lambda: self._mark(name, health, why, handover))
        else:
            self._emit(name, str(health), why)

    def remove(self, names: Sequence[str]) -> None:
        for name in names if self.is_rank_zero else ():
            self._submit(lambda name=name: self._remove(name))  # type: ignore[misc]

    def _submit(self, work: Callable[[], None]) -> None:
        self._requests = [r for r in self._requests if not r.done()]
        self._requests.append(self._worker.submit(work))

    def wait(self) -> None:
        """Block until every request is done."""
        for request in self._requests:
            request.result()
        self._requests.clear()

    def abort(self) -> None:
        """Stop waiting for other ranks: requests that need them fail at once."""
        self._aborted = True

    def _emit(
        self, name: str, status: str, why: str = "", path: Path | None = None, bytes: int = 0, seconds: float = 0.0
    ) -> None:
        self.events.append(StoreEvent(name, status, why, path, bytes, seconds))

    def _mark(self, name: str, health: Health, why: str, handover: bool) -> None:
        try:
            self._folder.mark(name, health, why, time.time(), handover=handover)
        except (RunDirError, OSError) as error:
            self._emit(name, "unmarked", f"it could not be marked {health}: {error}")
        else:
            self._emit(name, str(health), why)

    def _remove(self, name: str) -> None:
        try:
            self._folder.remove(name)
        except (RunDirError, OSError) as error:
            self._emit(name, "kept", f"it could not be removed: {error}")

    def _save(self, contents: CheckpointContents, label: CheckpointLabel) -> None:
        name, began = name_of(contents.step, contents.lineage.branch), time.perf_counter()
        try:
            save = self._save_distributed if self._world.size > 1 else self._save_single
            path, nbytes = save(contents, label)
        except _UnsafeState as error:
            self._emit(name, "refused", str(error))
        except Exception as error:  # a full disk, no memory, state that JSON cannot hold: the run continues
            self._emit(name, "failed", str(error) or type(error).__name__)
        else:
            self._emit(name, "saved", "", path, nbytes, time.perf_counter() - began)
        finally:
            contents.release()

    def _save_single(self, contents: CheckpointContents, label: CheckpointLabel) -> tuple[Path, int]:
        staging = self._folder.staging(name_of(contents.step, contents.lineage.branch))
        try:
            files = self._write_share(staging, contents)
        except BaseException:
            with contextlib.suppress(OSError):
                durable.remove_tree(staging)
            raise
        return self._publish(staging, contents, label, files)

    def _write_share(self, staging: Path, contents: CheckpointContents) -> dict[str, FileSum]:
        """Write this rank's files. Inspecting the tensors overlaps with writing and is waited for at the end."""
        small: dict[str, Tensor] = {}
        parts = encode(contents.parts, small)
        return write_rank(
            staging,
            {**contents.tensors, **small},
            parts,
            rank=self._world.rank,
            size=self._world.size,
            sums=lambda: {**_inspected_checksums(contents), **checksums(small)},
            is_private=contents.is_private,
            owners=contents.owners,
            wait_for=contents.wait_for_tensor,
        )

    def _publish(
        self, staging: Path, contents: CheckpointContents, label: CheckpointLabel, files: dict[str, FileSum]
    ) -> tuple[Path, int]:
        now = time.time()
        manifest = Manifest(
            run=self._run,
            step=contents.step,
            lineage=contents.lineage,
            reason=label.reason,
            world_size=self._world.size,
            time=now,
            versions=label.versions,
            about=label.about,
            files=files,
        )
        health = HealthRecord(
            health=label.health, why=label.why, handover=label.handover, manifest=seal(manifest)[1], time=now
        )
        self._publish_elsewhere(manifest, health)
        return self._publish_here(staging, manifest, health), sum(f.bytes for f in files.values())

    def _publish_here(self, staging: Path, manifest: Manifest, health: HealthRecord) -> Path:
        entry = self._folder.publish(
            *(staging, manifest, health.health, health.why),
            time=health.time,
            handover=health.handover,
            held=self._held_files(manifest),
        )
        return entry.path

    # ---- what a store on several hosts adds

    def _replicate(self, name: str, files: dict[str, FileSum], staging: Path) -> None:
        """Copy this rank's files to another host."""

    def _publish_elsewhere(self, manifest: Manifest, health: HealthRecord) -> None:
        """Have other hosts publish their files of a checkpoint."""

    def _held_files(self, manifest: Manifest) -> Collection[str]:
        """Return the files of a checkpoint that this folder holds."""
        return manifest.files

    # ---- with several ranks

    def _save_distributed(self, contents: CheckpointContents, label: CheckpointLabel) -> tuple[Path, int]:
        """Write this rank's share and its note; publish if all succeeded. A rank that fails says why in its note."""
        world, name = self._world, name_of(contents.step, contents.lineage.branch)
        final, staging = self._folder.path / name, self._make_staging(name)
        files: dict[str, FileSum] = {}
        failure: Exception | None = None
        try:
            files = self._write_share(staging, contents)
            self._replicate(name, files, staging)
        except _UnsafeState as error:
            failure = _UnsafeState(f"{error} on rank {world.rank}")
        except Exception as error:  # report it at once, or the other ranks would wait for the timeout
            failure = RunDirError(f"rank {world.rank}: {str(error) or type(error).__name__}")
        try:
            self._leave_note(name, files, failure)
            if world.rank != 0:
                self._wait_until(lambda: not staging.exists(), lambda: f"rank 0 has not published {name}")
                if not final.is_dir():
                    raise failure or RunDirError("another rank could not write its share")
                return final, sum(f.bytes for f in files.values())
            notes = self._collect_notes(staging)
            failed = sorted((n for n in notes if n["why"]), key=lambda n: not n["unsafe"])
            if failed:
                raise (_UnsafeState if failed[0]["unsafe"] else RunDirError)(failed[0]["why"])
            all_files = {n: msgspec.convert(s, FileSum) for note in notes for n, s in note["files"].items()}
            return self._publish(staging, contents, label, all_files)
        finally:
            if self.owns_folder:
                with contextlib.suppress(OSError):
                    durable.remove_tree(staging)

    def _make_staging(self, name: str) -> Path:
        """Return the folder in which the ranks write a checkpoint. One rank makes it, the others wait for it."""
        if self.owns_folder:
            return self._folder.staging(name)
        staging = self._staging_of(name)
        self._wait_until(staging.is_dir, lambda: f"rank 0 has not made {staging}")
        return staging

    def _staging_of(self, name: str) -> Path:
        return self._folder.path / f".tmp-{name}"

    def _leave_note(self, name: str, files: dict[str, FileSum], failure: Exception | None) -> None:
        """Tell rank 0 which files this rank has written, or why it could not."""
        note = {
            "files": {n: msgspec.to_builtins(s) for n, s in files.items()},
            "why": None if failure is None else str(failure),
            "unsafe": isinstance(failure, _UnsafeState),
        }
        self._write_note(name, note_name(self._world.rank), json.dumps(note).encode())

    def _write_note(self, name: str, file: str, note: bytes) -> None:
        durable.write_file(self._staging_of(name) / file, note)

    def _collect_notes(self, staging: Path) -> list[dict[str, Any]]:
        """Wait for the notes of all ranks. Return them in rank order and delete their files."""
        notes: dict[int, dict[str, Any]] = {}

        def all_present() -> bool:
            for rank in range(self._world.size):
                if rank not in notes:
                    with contextlib.suppress(OSError, ValueError):
                        notes[rank] = json.loads(durable.read_file(staging / note_name(rank), _MAX_NOTE_BYTES))
            return len(notes) == self._world.size

        self._wait_until(
            all_present, lambda: f"ranks {sorted(set(range(self._world.size)) - set(notes))} wrote no share"
        )
        for rank in notes:
            durable.remove_tree(staging / note_name(rank))
        return [notes[rank] for rank in sorted(notes)]

    def _wait_until(self, condition: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Wait for another rank's work to appear in the file system. RunDirError after the timeout."""
        ends = time.monotonic() + self._timeout
        while not condition():
            if self._aborted:
                raise RunDirError("the run is ending")
            if self._has_run_dir and not durable.retry_interrupted(self._run_dir.is_dir):
                raise RunDirError(f"{self._run_dir} was removed")
            if time.monotonic() > ends:
                raise RunDirError(f"{describe()} after {self._timeout:g} s ([checkpoint] rank_timeout_seconds)")
            time.sleep(_POLL_SECONDS)

    # ---- reading, on the training thread

    def entries(self) -> list[CheckpointEntry]:
        self.wait()
        return self._folder.entries()

    def choose(
        self, why_not: Callable[[CheckpointEntry], str | None], in_memory: Sequence[CheckpointEntry] = ()
    ) -> tuple[CheckpointEntry | None, list[RejectedCheckpoint]]:
        """Return the newest usable checkpoint and those passed over. `why_not` rejects one by returning a reason.

        in_memory: those of the memory tier, which come first if the disk has the same.
        Only small files are verified; `load` verifies every byte.
        """
        self.wait()
        choice: Any = None
        if self.is_rank_zero:
            damaged: set[tuple[str, bool]] = set()

            def check(entry: CheckpointEntry) -> str | None:
                if (why := why_not(entry)) is None and (why := verify(entry, contents=False)) is not None:
                    damaged.add((entry.name, entry.in_memory))
                return why

            entry, passed = pick([*in_memory, *self._folder.entries()], self._run, check)
            passed_over = [list(p._replace(damaged=(p.name, p.in_memory) in damaged)) for p in passed]
            choice = [None if entry is None else [entry.name, entry.in_memory], passed_over]
        chosen, passed_over = self._world.broadcast_object(choice)
        rejected = [RejectedCheckpoint(*p) for p in passed_over]
        if chosen is None:
            return None, rejected
        listed = next((e for e in in_memory if [e.name, e.in_memory] == chosen), None)
        return listed or self._folder.entry(chosen[0]), rejected

    def find(self, path: str) -> CheckpointEntry:
        """Return the checkpoint at a path that the user named. RunDirError if there is none."""
        resolved = resolve_resume_path(self._run_dir, path, verify=False)
        entry = None if resolved is None else read_entry(resolved)
        if entry is None:
            raise RunDirError(f"load_path {path}: no such checkpoint")
        return entry

    def load(
        self, entry: CheckpointEntry, find_target: FindTarget | None = None, checks: ContentChecks | None = None
    ) -> RestoredCheckpoint:
        """Return the contents, every byte verified. If a rank finds damage or fails a check, every rank raises its error."""
        # Importing the planners takes a second, and a run that only saves does not need them.
        from holdfast.distributed.checkpoint.load import read_parts, read_tensors

        manifest = entry.manifest
        if manifest is None:
            raise RunDirError(entry.damage or "manifest.json is missing")
        has_local_rng = self._world.rank < manifest.world_size
        rank = self._world.rank if has_local_rng else 0
        why, error_type, parts, tensors = "", "", {}, {}
        try:
            if (damage := verify_except_contents(entry)) is not None:
                raise RunDirError(damage)
            check_layout = None if checks is None else functools.partial(checks.check_layout, manifest)
            tensors = read_tensors(
                entry.path, manifest, find_target or {}, rank=rank, size=self._world.size, check_layout=check_layout
            )
            parts = decode(read_parts(entry.path, rank, manifest), tensors)
            if checks is not None:
                checks.check_parts(manifest, parts, tensors)
        except (RunDirError, SetupError) as error:
            why, error_type = str(error), type(error).__name__
        except OSError as error:
            why, error_type = str(durable.run_dir_error(entry.path, "read", error)), UnreadableError.__name__
        problems = {p[1]: p[0] for p in reversed(self._world.all_gather_object([why, error_type])) if p[0]}
        for raised in (RunDirError, SetupError, UnreadableError):
            if raised.__name__ in problems:
                raise raised(problems[raised.__name__])
        return RestoredCheckpoint(manifest, parts, tensors, self._world.size, has_local_rng)

    def close(self) -> None:
        self.wait()
        self._worker.shutdown(wait=True)


def _inspected_checksums(contents: CheckpointContents) -> dict[str, int]:
    """Return the checksums of the copied tensors. Raise if the copy is torn or holds NaN or Inf."""
    inspection = contents.wait_for_inspection()
    if inspection.torn:
        raise RunDirError("a parameter changed while it was copied")
    if inspection.nonfinite is not None:
        raise _UnsafeState(f"{inspection.nonfinite} holds NaN or Inf")
    return inspection.checksums


class _UnsafeState(Exception):
    """The state itself must not be saved."""


def note_name(rank: int) -> str:
    return f".note-{rank:05d}"
