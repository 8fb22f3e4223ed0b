"""The disk tier: saved states written, marked, removed and read back, on one rank or many.

One background thread does what is asked for, in order. Of several ranks each writes its share into the same folder in the
making; the first waits for the others' notes, writes the manifest and publishes; the others wait to see it there. No
collective is called off the training thread, and every wait has a bound.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from holdfast.core.base import durable
from holdfast.core.base.errors import RunDirError, Unreadable
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.entry import Entry, read_entry
from holdfast.core.checkpoints.folder import Folder
from holdfast.core.checkpoints.manifest import FileSum, Manifest, name_of
from holdfast.core.checkpoints.resume import CHECKPOINTS, Passed, choose, resolve_resume_path
from holdfast.core.checkpoints.verify import look, verify
from holdfast.distributed.checkpoint.writing import write_rank
from holdfast.distributed.world import World
from holdfast.runtime.ports.checkpoint_store import (
    CheckpointContents,
    CheckpointLabel,
    FindTarget,
    RestoredCheckpoint,
    StoreEvent,
)
from holdfast.runtime.snapshots.encoding import decode, encode
from holdfast.runtime.tensors.inspect import checksums

log = logging.getLogger("holdfast")

_POLL_SECONDS = 0.02


class DiskCheckpointStore:
    """The checkpoints folder of one run directory."""

    def __init__(self, run_dir: str | os.PathLike[str], world: World, patience: float) -> None:
        self._home = Path(run_dir).resolve()
        self._folder = Folder(self._home / CHECKPOINTS)
        self._world, self._patience = world, patience
        self.is_rank_zero = world.rank == 0
        self._run = ""
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="holdfast-disk")
        self._asked: list[Future[None]] = []
        self._aborted = False
        self._news: deque[StoreEvent] = deque()

    def open(self, run: str) -> None:
        """The run directory is held: what a killed process left half done is removed before anybody writes."""
        self._run = run
        if self.is_rank_zero:
            try:
                self._folder.sweep()
            except RunDirError as error:
                log.warning("%s", error)
        self._world.barrier(self._patience)

    def broadcast_object(self, value: Any) -> Any:
        """What the first rank says, on every rank. Called by all."""
        return self._world.broadcast_object(value)

    # ---- in the background

    def save(self, frame: CheckpointContents, label: CheckpointLabel) -> None:
        self._ask(lambda: self._save(frame, label))

    def mark(self, name: str, health: Health, why: str, handover: bool = False) -> None:
        if self.is_rank_zero:
            self._ask(lambda: self._mark(name, health, why, handover))
        else:
            self._tell(name, str(health), why)

    def remove(self, names: Sequence[str]) -> None:
        for name in names if self.is_rank_zero else ():
            self._ask(lambda name=name: self._remove(name))  # type: ignore[misc]

    def _ask(self, work: Callable[[], None]) -> None:
        self._asked = [f for f in self._asked if not f.done()]
        self._asked.append(self._worker.submit(work))

    def wait(self) -> None:
        """Until everything asked for has been done."""
        for asked in self._asked:
            asked.result()
        self._asked.clear()

    def abort(self) -> None:
        """No other rank is waited for from here on; what needs them fails at once."""
        self._aborted = True

    def drain_events(self) -> list[StoreEvent]:
        told = []
        while self._news:
            told.append(self._news.popleft())
        return told

    def _tell(self, name: str, status: str, why: str = "", path: Path | None = None, **sizes: Any) -> None:
        self._news.append(StoreEvent(name, status, why, path, sizes.get("bytes", 0), sizes.get("seconds", 0.0)))

    def _mark(self, name: str, health: Health, why: str, handover: bool) -> None:
        try:
            self._folder.mark(name, health, why, time.time(), handover=handover)
        except (RunDirError, OSError) as error:
            self._tell(name, "unmarked", f"it could not be marked {health}: {error}")
        else:
            self._tell(name, str(health), why)

    def _remove(self, name: str) -> None:
        try:
            self._folder.remove(name)
        except (RunDirError, OSError) as error:
            self._tell(name, "kept", f"it could not be removed: {error}")

    def _save(self, frame: CheckpointContents, label: CheckpointLabel) -> None:
        name, began = name_of(frame.step, frame.lineage.branch), time.perf_counter()
        try:
            small: dict[str, Tensor] = {}
            text = encode(frame.parts, small)
            share = _Share(text, {**frame.tensors, **small}, lambda: {**_examined(frame), **checksums(small)})
            save = self._save_together if self._world.size > 1 else self._save_alone
            entry, nbytes = save(frame, label, share)
        except _Refused as error:
            self._tell(name, "refused", str(error))
        except Exception as error:  # a full disk, no memory, a state JSON cannot hold: no reason to end the run
            self._tell(name, "failed", str(error) or type(error).__name__)
        else:
            self._tell(name, "saved", "", entry, bytes=nbytes, seconds=time.perf_counter() - began)
        finally:
            frame.release()

    def _save_alone(self, frame: CheckpointContents, label: CheckpointLabel, share: _Share) -> tuple[Path, int]:
        staging = self._folder.staging(name_of(frame.step, frame.lineage.branch))
        try:
            files = share.write(staging, 0, 1, frame)
        except BaseException:
            with contextlib.suppress(OSError):
                durable.remove_tree(staging)
            raise
        return self._publish(staging, frame, label, files)

    def _publish(
        self, staging: Path, frame: CheckpointContents, label: CheckpointLabel, files: dict[str, FileSum]
    ) -> tuple[Path, int]:
        now = time.time()
        manifest = Manifest(
            run=self._run,
            step=frame.step,
            lineage=frame.lineage,
            reason=label.reason,
            world_size=self._world.size,
            time=now,
            versions=label.versions,
            about=label.about,
            files=files,
        )
        entry = self._folder.publish(staging, manifest, label.health, label.why, time=now, handover=label.handover)
        return entry.path, sum(f.bytes for f in files.values())

    # ---- of several ranks

    def _save_together(self, frame: CheckpointContents, label: CheckpointLabel, share: _Share) -> tuple[Path, int]:
        """Each rank its share. A rank that cannot says so in its note, and nothing is published."""
        world, name = self._world, name_of(frame.step, frame.lineage.branch)
        final = self._folder.path / name
        staging = self._folder.staging(name) if world.rank == 0 else self._folder.path / f".tmp-{name}"
        self._until(staging.is_dir, f"the first rank has not made {staging}")
        files: dict[str, FileSum] = {}
        refusal: str | None = None
        try:
            files = share.write(staging, world.rank, world.size, frame)
        except (RunDirError, OSError, _Refused) as error:
            refusal = f"rank {world.rank}: {error}"
        note = {"files": {n: msgspec.to_builtins(s) for n, s in files.items()}, "why": refusal}
        durable.write_file(staging / _note(world.rank), json.dumps(note).encode())
        if world.rank != 0:
            self._until(lambda: not staging.exists(), f"the first rank has not published {name}")
            if not final.is_dir():
                raise _Refused(refusal) if refusal else RunDirError("another rank could not write its share")
            return final, sum(f.bytes for f in files.values())
        try:
            notes = self._gathered(staging)
            why = next((n["why"] for n in notes if n["why"]), None)
            if why is not None:
                raise _Refused(why)
            every = {n: msgspec.convert(s, FileSum) for note in notes for n, s in note["files"].items()}
            return self._publish(staging, frame, label, every)
        finally:
            with contextlib.suppress(OSError):
                durable.remove_tree(staging)

    def _gathered(self, staging: Path) -> list[dict[str, Any]]:
        """The notes of all ranks, once each is there and whole."""
        notes: dict[int, dict[str, Any]] = {}

        def all_there() -> bool:
            for rank in range(self._world.size):
                if rank not in notes:
                    with contextlib.suppress(OSError, ValueError):
                        notes[rank] = json.loads(durable.read_file(staging / _note(rank), 1 << 24))
            return len(notes) == self._world.size

        self._until(all_there, lambda: f"ranks {sorted(set(range(self._world.size)) - set(notes))} wrote no share")
        for rank in notes:
            os.unlink(staging / _note(rank))
        return [notes[rank] for rank in sorted(notes)]

    def _until(self, holds: Callable[[], bool], otherwise: str | Callable[[], str]) -> None:
        """Wait for the file system to show what another rank has done, as long as patience lasts."""
        ends = time.monotonic() + self._patience
        while not holds():
            if self._aborted:
                raise RunDirError("the run is ending")
            if time.monotonic() > ends:
                said = otherwise if isinstance(otherwise, str) else otherwise()
                raise RunDirError(f"{said} after {self._patience:g} s ([checkpoint] rank_timeout_seconds)")
            time.sleep(_POLL_SECONDS)

    # ---- reading back, on the training thread

    def entries(self) -> list[Entry]:
        self.wait()
        return self._folder.entries()

    def choose(self, doubted: Callable[[Entry], str | None]) -> tuple[Entry | None, list[Passed]]:
        """By their small files alone: `load` compares every byte. What is `doubted` is passed over."""
        self.wait()
        said: Any = None
        if self.is_rank_zero:
            strange: set[str] = set()

            def check(e: Entry) -> str | None:
                if (why := doubted(e)) is None and (why := verify(e, contents=False)) is not None:
                    strange.add(e.name)
                return why

            entry, passed = choose(self._folder, self._run, check=check)
            over = [list(p._replace(damaged=p.name in strange)) for p in passed]
            said = [None if entry is None else entry.name, over]
        name, told = self._world.broadcast_object(said)
        return (None if name is None else self._folder.entry(name)), [Passed(*p) for p in told]

    def find(self, path: str) -> Entry:
        """The checkpoint that a person has named."""
        found = resolve_resume_path(self._home, path, verify=False)
        entry = None if found is None else read_entry(found)
        if entry is None:
            raise RunDirError(f"load_path {path}: no such checkpoint")
        return entry

    def load(self, entry: Entry, find_target: FindTarget | None = None) -> RestoredCheckpoint:
        """Everything in it, every byte compared. RunDirError on every rank where one of them cannot trust it."""
        # Its planners take a second to import, and a run that only saves does not need them.
        from holdfast.distributed.checkpoint.reading import read_parts, read_tensors

        manifest = entry.manifest
        if manifest is None:
            raise RunDirError(entry.damage or "manifest.json is missing")
        own = self._world.rank < manifest.world_size
        rank = self._world.rank if own else 0
        why, damaged, parts, tensors = "", False, {}, {}
        try:
            if (strange := look(entry)) is not None:
                raise RunDirError(strange)
            tensors = read_tensors(entry.path, manifest, find_target or {}, rank=rank, size=self._world.size)
            parts = decode(read_parts(entry.path, rank), tensors)
        except RunDirError as error:
            why, damaged = str(error), not isinstance(error, Unreadable)
        except OSError as error:
            why = str(durable.refused(entry.path, "read", error))
        troubles = [t for t in self._world.all_gather_object([why, damaged]) if t[0]]
        if troubles:
            worst = next((t for t in troubles if t[1]), troubles[0])
            raise (RunDirError if worst[1] else Unreadable)(worst[0])
        return RestoredCheckpoint(manifest, parts, tensors, self._world.size, own)

    def close(self) -> None:
        self.wait()
        self._worker.shutdown(wait=True)


class _Share(NamedTuple):
    """What this rank writes. The look at its tensors goes on while they are written, and is waited for after that."""

    text: str
    tensors: dict[str, Tensor]
    sums: Callable[[], dict[str, int]]

    def write(self, staging: Path, rank: int, size: int, frame: CheckpointContents) -> dict[str, FileSum]:
        return write_rank(
            staging,
            self.tensors,
            self.text,
            rank=rank,
            size=size,
            sums=self.sums,
            private=frame.is_private,
            ready=frame.wait_for_tensor,
        )


def _examined(frame: CheckpointContents) -> dict[str, int]:
    """The sums of what was copied; refused where it is not to be saved."""
    look = frame.wait_for_inspection()
    if look.torn:
        raise RunDirError("a parameter changed while it was copied")
    if look.nonfinite is not None:
        raise _Refused(f"{look.nonfinite} holds NaN or Inf")
    return look.checksums


class _Refused(Exception):
    """The state itself is not to be saved."""


def _note(rank: int) -> str:
    return f".note-{rank:05d}"
