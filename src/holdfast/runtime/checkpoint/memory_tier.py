"""Decide when a certified snapshot is also written to shared memory, from which a restarted process resumes.

Rank 0 decides, by its clock and the room it finds; the other ranks learn of it as of a checkpoint that is due by time.
The states are in no journal event and no record of the checkpoint manager: retention and lost checkpoints are of the disk.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from holdfast.core.base.errors import RunDirError
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.entry import CheckpointEntry
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.manifest import name_of
from holdfast.core.checkpoints.resume import is_left
from holdfast.runtime.checkpoint.serialization import contents_of
from holdfast.runtime.context import Context
from holdfast.runtime.ports.checkpoint_store import CheckpointLabel, MemoryStore
from holdfast.runtime.snapshots.memory import available_bytes
from holdfast.runtime.snapshots.ring import Ring
from holdfast.runtime.snapshots.snapshot import Snapshot

REASON = "certified"
MAX_SHARE = 0.05
"""of the time between two writes that the first may have taken"""
_COPIES = 2
"""the newest state, and the one that replaces it"""


class MemoryTier:
    """Keeps the newest certified state of a run in shared memory. Without a store every method does nothing."""

    def __init__(self, context: Context, store: MemoryStore | None) -> None:
        self._context, self._store = context, store
        self._mode = context.config.checkpoint.memory_tier
        self.is_writing = False
        """the same on every rank until the run begins; later, rank 0 may stop writing by itself"""
        self._states: dict[str, tuple[int, int]] = {}
        """step and branch of what is in the tier or being written to it, in this order"""
        self._offered_step = -1
        self._next_write = 0.0

    def open(self, identity: str, check: Callable[[], None]) -> None:
        """Find what an earlier process left, without what the run has abandoned since. All ranks call it."""
        store, snapshots = self._store, self._context.config.snapshot
        if store is None:
            return
        if self._mode == "off":
            self._delete(identity)
            return
        self.is_writing = self._mode == "on" or _is_restarted_here()
        if self.is_writing and not (snapshots.enabled and snapshots.place == "host"):
            self.is_writing = False
            if self._mode == "on":
                self._note('it needs snapshots in host memory; set [snapshot] enabled = true and place = "host"')
        problem = store.attach(identity, check, makes=self.is_writing)
        if problem is not None:
            self.is_writing = False
            self._note(problem)
        for name, step, branch in store.states() if store.is_attached else ():
            self._states[name] = (step, branch)
        history = self._context.history
        self._remove([name for name, (step, branch) in self._states.items() if is_left(history.lineage, branch, step)])

    def entries(self) -> list[CheckpointEntry]:
        """Return the states to resume from. On several hosts each fetches what it lacks first. All ranks call it."""
        return [] if self._store is None else self._store.entries()

    def branches(self) -> list[int]:
        return [branch for _, branch in self._states.values()]

    # ---- writing

    def due_step(self, ring: Ring) -> int | None:
        """On rank 0: return the step whose snapshot is to be written now, or None."""
        store = self._store
        if store is None or not (self.is_writing and store.is_rank_zero):
            return None
        self._poll()
        if store.is_busy or self._context.clock.monotonic() < self._next_write:
            return None
        snapshot = next((s for s in reversed(ring.snapshots) if s.health is Health.GOOD), None)
        if snapshot is None or snapshot.in_use or snapshot.step <= max(self._offered_step, self._newest_step()):
            return None
        if (problem := self._find_obstacle(snapshot, store)) is not None:
            self.is_writing = False
            self._note(problem, snapshot.step)
            return None
        self._offered_step = snapshot.step
        return snapshot.step

    def write(self, step: int, ring: Ring) -> None:
        """Write the certified snapshot of a step, in the background, if every rank has it. All ranks call it."""
        store, context = self._store, self._context
        if store is None:
            return
        self._poll()
        snapshot = next((s for s in ring.snapshots if s.health is Health.GOOD and s.step == step), None)
        is_ready = snapshot is not None and not snapshot.in_use and bool(snapshot.data) and not store.is_busy
        problem = None
        if snapshot is not None and store.owns_folder and not store.is_rank_zero:  # rank 0 has looked at its own host
            problem = self._find_obstacle(snapshot, store)
        answers = context.ranks.all_gather_object([is_ready, problem])
        problem = next((each for _, each in answers if each), None)
        if problem is not None and self.is_writing:
            self.is_writing = False
            self._note(problem, step)
        if problem is not None or not all(is_ready for is_ready, _ in answers) or snapshot is None:
            return
        records = context.records
        label = CheckpointLabel(REASON, False, Health.GOOD, "certified in memory", records.about(), records.versions())
        branch = snapshot.lineage.branch
        self._states[name_of(step, branch)] = (step, branch)
        store.save(contents_of(snapshot, context.state, records.journal_bytes[1]), label)

    def _poll(self) -> None:
        """Record what the store has done. After a failure nothing more is written: the disk has the checkpoints."""
        store = self._store
        assert store is not None
        while store.events:
            event = store.events.popleft()
            if event.status == "saved":
                self._next_write = self._context.clock.monotonic() + event.seconds / MAX_SHARE
                self._remove([name for name in self._states if name != event.name])
            elif event.status in ("failed", "refused"):
                step, _ = self._states.pop(event.name, (0, 0))
                if self.is_writing and store.is_rank_zero:
                    self.is_writing = False
                    self._note(event.why, step)

    def _find_obstacle(self, snapshot: Snapshot, store: MemoryStore) -> str | None:
        """Return why the states of this run cannot be kept in shared memory, or None."""
        if not snapshot.data:
            return "the state_dict of the loader is known only when a checkpoint is saved"
        if (room := store.room()) is None:
            return None  # writing tells what has become of the folder
        needed = max(0, _COPIES - len(self._states)) * int(store.kept_fraction * self._bytes_of(snapshot))
        if (missing := describe_missing_room(*room, needed)) is None:
            return None
        return (
            f'{_COPIES} copies need {missing}; allow more (docker --shm-size), or set [checkpoint] memory_tier = "off"'
        )

    def _bytes_of(self, snapshot: Snapshot) -> int:
        """Return the bytes that all ranks write: sharded tensors and those of one rank count once for each rank."""
        state, ranks = self._context.state, self._context.ranks.size
        sharded, share = state.sharded_tensors(), snapshot.share
        return sum(
            tensor.nbytes * (ranks if n in sharded or n.startswith("buffer.") or state.is_rank_specific(n) else 1)
            for n, tensor in snapshot.tensors().items()
        ) + (0 if share is None else share.nbytes_elsewhere)

    def _newest_step(self) -> int:
        return max((step for step, _ in self._states.values()), default=-1)

    # ---- removing

    def remove_abandoned(self, lineage: Lineage) -> None:
        """Remove states of branches that the run has left, also one that is being written."""
        self._offered_step = -1
        self._remove([name for name, (step, branch) in self._states.items() if not lineage.holds(branch, step)])

    def remove_after(self, step: int) -> None:
        """Remove states later than `step`."""
        self._remove([name for name, (saved, _) in self._states.items() if saved > step])

    def remove(self, name: str) -> None:
        """Remove a state that cannot be used."""
        self._remove([name])

    def remove_all(self) -> None:
        self._remove(list(self._states))

    def _remove(self, names: list[str]) -> None:
        for name in names:
            self._states.pop(name, None)
        if self._store is not None and names:
            self._store.remove(names)

    # ---- end

    def wait(self) -> None:
        """Wait until nothing is read from the memory of a snapshot."""
        if self._store is not None:
            self._store.wait()

    def abort(self) -> None:
        if self._store is not None:
            self._store.abort()

    def close(self, newest_on_disk: float | None) -> None:
        """Release the store. Remove the tier if the disk has a state as new; None: the run did not end in order."""
        store = self._store
        if store is None:
            return
        store.wait()
        self._poll()
        store.wait()
        store.close()
        if newest_on_disk is not None and newest_on_disk >= self._newest_step():
            self._delete(self._context.records.identity)

    def _delete(self, identity: str) -> None:
        assert self._store is not None
        try:
            self._store.delete(identity)
        except RunDirError as error:
            self._note(str(error))

    def _note(self, problem: str, step: int = 0) -> None:
        self._context.engine.note(step, f"no new state is kept in shared memory: {problem}")


def describe_missing_room(free: int, whole: int, needed: int) -> str | None:
    """Return how much room of this host's shared memory is needed and free; None if there is enough."""
    available = available_bytes()
    # Workers of a DataLoader use the same file system: they crash if it is full.
    if free - needed >= whole // 4 and needed <= available // 2:
        return None
    return (
        f"{needed / 1e9:.2f} GB more, with a quarter of the shared memory and half of the memory left free; "
        f"{free / 1e9:.2f} of {whole / 1e9:.2f} GB and {available / 1e9:.2f} GB are free on {socket.gethostname()[:200]}"
    )


def _is_restarted_here() -> bool:
    """Return whether torchrun starts the processes again on this machine if one dies."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "")
    return "TORCHELASTIC_RUN_ID" in os.environ and restarts.isdecimal() and int(restarts) > 0
