"""Takes snapshots at the right moments, certifies them, and finds the one to roll back to."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol

import torch
from torch import OutOfMemoryError, Tensor

from holdfast.core.base.config import SnapshotSection
from holdfast.core.base.errors import StepError, first_line
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.snapshot_rule import SnapshotRoom
from holdfast.runtime.data.source import BatchSource, Position
from holdfast.runtime.ports.ranks import Ranks, SingleRank
from holdfast.runtime.snapshots.copier import Copier
from holdfast.runtime.snapshots.copy import CopyStart, SnapshotCopy
from holdfast.runtime.snapshots.placement import Placement
from holdfast.runtime.snapshots.restore import Restorer
from holdfast.runtime.snapshots.ring import Ring
from holdfast.runtime.snapshots.shares import Shares
from holdfast.runtime.snapshots.snapshot import Snapshot
from holdfast.runtime.state.buffers import BufferCapture
from holdfast.runtime.state.rng import Rng, RngState
from holdfast.runtime.state.run_state import RunState

DetectorState = Callable[[], dict[str, Any]]
_MAX_REJECTED = 16
_UNLIMITED = SnapshotRoom(0, 0, 2**60)
"""of a rank that takes no snapshots"""


class NonfiniteSnapshot(NamedTuple):
    """A snapshot that holds non-finite state: the run was broken at that step already."""

    step: int
    tensor: str


class StepPosition(NamedTuple):
    """What belongs to a snapshot and is known only when the next step begins."""

    rng: RngState
    buffers: BufferCapture
    data_position: Position
    data: dict[str, Any]
    """the state of the data source, for another process"""
    flags: list[str]
    """which modules train and which parameters require a gradient; inside a step a loop may freeze some for a while"""


class Postponed(NamedTuple):
    """A snapshot of the state as it was when a step began. Its large tensors are copied later in that step."""

    step: int
    tensors: dict[str, Tensor]
    begun: CopyStart
    reason: str | None
    position: StepPosition
    small_state: tuple[dict[str, Any], dict[str, Tensor]]
    detectors: dict[str, Any]


class RejectedSnapshot(NamedTuple):
    """A snapshot that cannot be restored, and why."""

    step: int
    why: str


class CheckpointSink(Protocol):
    """Writes snapshots to disk. `save_reason` returns why the state after a step is written, or None."""

    lineage: Lineage

    every_steps: int
    """steps between scheduled saves; 0: none are scheduled by steps"""

    timed_step: int | None
    """the step to save because the time has come, or None"""

    def save_reason(self, step: int, *, initial: bool = False) -> str | None: ...
    def submit(self, snapshot: Snapshot, stalled_seconds: float) -> None: ...


class SnapshotManager:
    """Assembles one snapshot at a time and keeps the others in the ring. Returned strings are notes for the user."""

    def __init__(
        self,
        config: SnapshotSection,
        state: RunState,
        rng: Rng,
        sink: CheckpointSink,
        ranks: Ranks | None = None,
        ranks_per_host: int = 1,
    ) -> None:
        self._config, self._state, self._rng, self._sink = config, state, rng, sink
        self._ranks = ranks or SingleRank()
        devices = {p.device for p in state.trained_parameters()}
        self.ring = Ring(config, ranks_per_host, () if config.place == "host" else devices)
        self._copier = Copier(state.allowed_nonfinite, staging=config.device_staging)
        self.copies_in_flight = self._copier.reading
        """copies that the next update must wait for"""
        is_possible = config.shared == "auto" and config.place == "host"
        self._shares = Shares(state, self._ranks, is_possible=is_possible)
        self._placement = Placement(state, self._copier, self.ring, config.place, devices, self._shares)
        self.restorer = Restorer(state, self._copier, rng)
        self._in_progress: Snapshot | None = None
        self._due_step: int | None = None
        """the committed step to take a snapshot of when the next step begins"""
        self._initial, self._trusted = False, True
        self._may_postpone = _on_cuda(devices)
        self.postponed: Postponed | None = None
        """what `take_postponed` begins to copy"""
        self.stalled_seconds = 0.0
        """time the training thread has spent on snapshots"""
        self.nonfinite: NonfiniteSnapshot | None = None
        """the first snapshot found to hold NaN or Inf since `pop_nonfinite`"""
        self._rejected: list[RejectedSnapshot] = []
        self._rooms: list[SnapshotRoom] = []
        """of all ranks, once they have exchanged them"""
        self.announcements: list[dict[str, Any]] = []
        """what the other ranks must know to keep the same snapshots"""
        self._submitted_step: int | None = None
        """the last step whose update was submitted before it was committed"""

    # ---- taking snapshots

    def begin_run(self, step: int, *, trusted: bool = True) -> str | None:
        """Schedule a snapshot of the initial state, and drop older ones: they belong to another stream of data.

        A `trusted` one is certified as soon as it is known to be finite.
        """
        self._trusted, self._submitted_step = trusted, None
        for old in self.ring.drop_after(-1):
            self._placement.release(old)
        self._in_progress = self.postponed = None
        _, room = self._placement.fit(self._state.update_tensors(), at_start=True)
        note = self._revise_room(room)
        is_due = self.ring.enabled or self._sink.save_reason(step, initial=True) is not None
        self._due_step, self._initial = (step if is_due else None), True
        return note

    def _revise_room(self, room: SnapshotRoom | None) -> str | None:
        """Budget the ring for a new room of this rank. The rank with the least room decides for all.

        The ranks exchange their rooms once, at the start. Later changes are announced with the rows of a step.
        """
        if not self._rooms and self._ranks.size > 1:
            rooms = self._ranks.all_gather_object(room or _UNLIMITED)
            self._rooms = [SnapshotRoom(*each) for each in rooms]
        elif room is None:
            return None
        elif self._ranks.size == 1:
            self._rooms = [room]
        else:
            if self.ring.usable_copies(room) != self.ring.usable_copies(self._rooms[self._ranks.rank]):
                self.announcements.append({"room": room})
            return None
        return self._budget()

    def _budget(self) -> str | None:
        self._shares.is_on = self.ring.should_share(self._rooms)
        rooms = [room.as_share() for room in self._rooms] if self._shares.is_on else self._rooms
        note, dropped = self.ring.budget(rooms)
        for snapshot in dropped:
            self._placement.release(snapshot)
        return note

    def apply_announcement(self, rank: int, news: dict[str, Any]) -> str | None:
        """Apply what a rank has announced, on all ranks at the same step. Returns a note, or None."""
        if news.get("room") is not None and rank < len(self._rooms):
            self._rooms[rank] = SnapshotRoom(*news["room"])
            return self._budget() if self.ring.enabled else None
        for snapshot in [s for s in self.ring if s.step == news.get("rejected")]:
            self._drop(snapshot)
        return None

    def on_update_submitted(self, step: int) -> str | None:
        """Start copying what an update leaves, while it still runs on the device, if a snapshot is due after it."""
        self._submitted_step = step
        return self._unless_full(step, lambda: self._start(step)) if self._is_due(step) else None

    def _unless_full(self, step: int, take: Callable[[], str | None]) -> str | None:
        """Take a snapshot, or a part of it. If memory runs out, give memory back and try once more; then leave it out."""
        for is_last in (False, True):
            try:
                return take()
            except OutOfMemoryError as error:
                why = first_line(error)
                traceback.clear_frames(error.__traceback__)
            self.release_device_memory()
            if is_last:
                self.discard_in_progress()
        return f"memory ran out while a snapshot of step {step} was taken: it is left out, and training goes on ({why})"

    def _is_due(self, step: int) -> bool:
        ring, every = self.ring, self._sink.every_steps
        is_wanted = ring.enabled and (step % ring.every_steps == 0 or ring.is_waiting)
        if is_wanted and (not ring.is_limited or ring.has_room(step)):
            return True
        is_saved = step == self._sink.timed_step or (every > 0 and step % every == 0)
        return is_saved and self._sink.save_reason(step) is not None

    def on_commit(self, step: int, detectors: DetectorState, *, is_healthy: bool = True) -> str | None:
        """Count a healthy step, and add the small state to a snapshot in progress if the next step has begun already.

        Otherwise take the snapshot when the next step begins: what the loop does between two steps, such as an evaluation
        that moves the schedule, belongs to the first of them.
        """
        if is_healthy:
            self.count_healthy_step(step)
        if not self._placement.is_preallocated:
            self._placement.preallocate()
        started = self._in_progress
        if started is not None and started.position is not None:
            return self._unless_full(step, lambda: self._add_small_state(detectors()))
        if (started is not None and started.step == step) or (step != self._submitted_step and self._is_due(step)):
            self.discard_in_progress()
            self._due_step, self._initial = step, False
        return None

    def discard_in_progress(self) -> None:
        """Discard the snapshot of a step that is not committed."""
        if self._in_progress is not None:
            self._placement.release(self._in_progress)
            self._in_progress = None

    def on_step_begin(
        self,
        rng: Callable[[], RngState],
        buffers: BufferCapture,
        source: BatchSource,
        detectors: DetectorState,
        *,
        may_postpone: bool = False,
    ) -> str | None:
        """Take the snapshot that is due, or add what belongs to its step and is known only now: random state, buffers and
        the data position. With `may_postpone` the copies may begin later in the step: see `take_postponed`.
        """
        note = self.take_postponed()  # one is left if the step that postponed it was abandoned
        due_step, self._due_step = self._due_step, None
        if due_step is not None and may_postpone and self._may_postpone and not self._initial:
            return self._unless_full(due_step, lambda: self._postpone(due_step, rng(), buffers, source, detectors()))
        if due_step is not None:
            note = self._unless_full(due_step, lambda: self._start(due_step, self._initial))
        snapshot = self._in_progress
        if snapshot is None or snapshot.position is not None:
            return note

        def complete() -> str | None:
            self._add_position(snapshot, self._position(rng(), buffers, source, snapshot.reason))
            if due_step is not None:
                self._add_small_state(detectors())
            return None

        return self._unless_full(snapshot.step, complete) or note

    def _postpone(
        self, step: int, rng: RngState, buffers: BufferCapture, source: BatchSource, detectors: dict[str, Any]
    ) -> None:
        tensors, reason = self._state.update_tensors(), self._sink.save_reason(step)
        begun = CopyStart(tensors)
        position = self._position(rng, buffers, source, reason)
        self.postponed = Postponed(
            step, tensors, begun, reason, position, self._small_state(reason is not None), detectors
        )

    def take_postponed(self) -> str | None:
        """Begin to copy what was postponed when the step began.

        Enqueuing the copies takes the host milliseconds. In a loop that waits for the device in every step, the device would
        be idle meanwhile; once the backward is enqueued, it is not. The copies wait only for the work before the step. A
        write to a tensor since then, outside of an update, is detected.
        """
        postponed, self.postponed = self.postponed, None
        if postponed is None:
            return None

        def take() -> str | None:
            note = self._start(postponed.step, reason=postponed.reason, before=postponed)
            if self._in_progress is not None:
                self._add_position(self._in_progress, postponed.position)
                self._add_small_state(postponed.detectors, postponed.small_state)
            return note

        return self._unless_full(postponed.step, take)

    def take_now(
        self, step: int, reason: str, buffers: BufferCapture, source: BatchSource, detectors: DetectorState
    ) -> Snapshot:
        """Take a snapshot between two steps, for the disk."""
        self.take_postponed()
        self.discard_in_progress()
        try:
            self._start(step, reason=reason)
        except OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)
            self.release_device_memory()
            self._start(step, reason=reason)
        snapshot = self._in_progress
        assert snapshot is not None
        self._add_position(snapshot, self._position(self._rng.capture(), buffers, source, reason))
        self._add_small_state(detectors())
        return snapshot

    def _start(
        self, step: int, initial: bool = False, reason: str | None = None, before: Postponed | None = None
    ) -> str | None:
        if self.restorer.is_partial:
            raise StepError(
                f"step {step}: restoring a snapshot failed halfway, so the current state is not saved; end the process and "
                "start it again: the run resumes from its last good checkpoint"
            )
        began = time.perf_counter()
        tensors = self._state.update_tensors() if before is None else before.tensors
        layout, room = self._placement.fit(tensors, is_trained=step > 0 and not initial)
        note = None if room is None else self._revise_room(room)
        reason = reason or self._sink.save_reason(step, initial=initial)
        if reason is None and not (initial and self.ring.enabled) and not self.ring.keeps(step):
            return note
        if self.ring.enabled and self.ring.is_limited:
            if reason is None and not self.ring.has_room(step):
                return note
            for dropped in self.ring.make_room(step, is_forced=reason is not None):
                self._placement.release(dropped)
        copy, notes = self._placement.copy(tensors, layout, reason, None if before is None else before.begun)
        self._in_progress = Snapshot(step, copy, lineage=self._sink.lineage, initial=initial, reason=reason)
        self._in_progress.trusted = initial and self._trusted
        self.stalled_seconds += time.perf_counter() - began
        return "; ".join(each for each in (note, *notes) if each is not None) or None

    def _position(self, rng: RngState, buffers: BufferCapture, source: BatchSource, reason: str | None) -> StepPosition:
        data = source.save(user_code=reason is not None)
        if buffers.places is not self._state.buffers.places:  # taking the snapshot has found a module that was added
            buffers = self._state.buffers.capture()
        return StepPosition(rng, buffers, source.position, data, self._state.named_params.flags())

    def _add_position(self, snapshot: Snapshot, at: StepPosition) -> None:
        snapshot.rng, snapshot.position, snapshot.data, snapshot.flags = at.rng, at.data_position, at.data, at.flags
        named = {f"buffer.{n}": b for n, b in self._state.buffers.as_named(at.buffers).items()}
        snapshot.buffers = self._copy_small(named, "buffers", snapshot)

    def _small_state(self, is_saved: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
        small_state, tensors = self._state.small_state()
        if is_saved:  # a saved snapshot is not compared with frozen weights again before a restore
            tensors |= self._state.copy_changed_frozen(tensors)
        return small_state, tensors

    def _add_small_state(
        self, detectors: dict[str, Any], small_state: tuple[dict[str, Any], dict[str, Tensor]] | None = None
    ) -> str | None:
        snapshot = self._in_progress
        assert snapshot is not None
        rest, tensors = small_state or self._small_state(snapshot.reason is not None)
        snapshot.small_state = {**rest, "flags": snapshot.flags}
        snapshot.small_state_copy = self._copy_small(tensors, "small_state", snapshot)
        snapshot.frozen = self._state.frozen_copies()
        snapshot.detectors = detectors
        snapshot.complete()
        if snapshot.health is not Health.CANDIDATE:
            return None
        self._in_progress = None
        if snapshot.reason is not None:
            self._sink.submit(snapshot, self.stalled_seconds)
        if self.ring.enabled and (snapshot.initial or self.ring.keeps(snapshot.step)):
            for dropped in self.ring.add(snapshot):
                self._placement.release(dropped)
        else:
            self._placement.release(snapshot)
        return None

    def _copy_small(self, tensors: dict[str, Tensor], part: str, snapshot: Snapshot) -> SnapshotCopy:
        return self._copier.start(tensors, live=False, part=part, on_host=self._placement.on_host(snapshot.reason))

    # ---- certifying

    def count_healthy_step(self, step: int) -> None:
        """Count a healthy committed step for every candidate before it, and certify those that have enough."""
        for snapshot in list(self.ring.snapshots):
            if snapshot.health is Health.GOOD:
                snapshot.is_settled = True  # a rank that rejects it has announced that with the row of this step
            elif snapshot.health is Health.CANDIDATE and snapshot.step < step:
                snapshot.healthy_steps += 1
                if snapshot.trusted or snapshot.healthy_steps >= self._config.certify_after:
                    self._certify(snapshot)

    def reset_healthy_counts(self) -> None:
        """Start counting again, because a step was not healthy."""
        for snapshot in self.ring:
            if snapshot.health is Health.CANDIDATE and not snapshot.trusted:
                snapshot.healthy_steps = 0

    def _certify(self, snapshot: Snapshot) -> None:
        for copy in snapshot.copies:
            try:
                inspection = copy.result()
            except Exception as error:  # for example, out of memory on the copy thread: no reason to end the run
                snapshot.reject(f"it could not be copied: {error}")
                continue
            if inspection.torn:
                snapshot.reject("a parameter changed while it was copied")
            elif inspection.nonfinite is not None:
                snapshot.reject(f"{inspection.nonfinite} holds NaN or Inf")
                self.report_nonfinite(snapshot.step, inspection.nonfinite)
        if snapshot.health is not Health.BAD and snapshot.small_state_copy is not None:
            # The fingerprints of frozen weights are single int64 values: the checksum of each is its value.
            changed = self._state.changed_frozen_weight(snapshot.small_state_copy.result().checksums)
            if changed is not None:
                snapshot.reject(f"{changed} was taken for frozen and had changed")
        if snapshot.health is Health.BAD:
            self._rejected = [*self._rejected[1 - _MAX_REJECTED :], RejectedSnapshot(snapshot.step, snapshot.why)]
            if self._ranks.size == 1:
                self._drop(snapshot)
            else:  # it is dropped on all ranks at once, so that they keep holding the same
                self.announcements.append({"rejected": snapshot.step})
        else:
            snapshot.health = Health.GOOD
            snapshot.is_settled = self._ranks.size == 1

    def _drop(self, snapshot: Snapshot) -> None:
        self.ring.drop(snapshot)
        self._placement.release(snapshot)

    def report_nonfinite(self, step: int, tensor: str) -> None:
        """Record that the state after `step` is not finite. Only the first report counts until it is popped."""
        if self.nonfinite is None:
            self.nonfinite = NonfiniteSnapshot(step, tensor)

    def pop_nonfinite(self) -> NonfiniteSnapshot | None:
        """Return the report of non-finite state, if any, and forget it."""
        report, self.nonfinite = self.nonfinite, None
        return report

    # ---- restoring

    def find_restore_point(self, before: int, at_latest: int) -> tuple[Snapshot | None, list[RejectedSnapshot]]:
        """Return the newest certified snapshot up to `before`, else up to `at_latest`, and those rejected on the way.

        Every rank must have it and verify its own part. If it is on a device, or each rank keeps a share of it, its tensors
        are written when this returns, and nothing else is: call `restore`, or `restore_saved` with another state.
        """
        return self._find(before, at_latest, self.restorer.find_problem, gathers=True)

    def find_to_save(self, before: int, at_latest: int, newer_than: int) -> Snapshot | None:
        """Return the snapshot that `find_restore_point` would return, if its step is above `newer_than`. Writes nothing."""
        return self._find(before, at_latest, self.restorer.verify_memory, newer_than=newer_than)[0]

    def certified(self) -> list[Snapshot]:
        """Return the certified snapshots, newest first. Any thread may call it."""
        return [s for s in reversed(list(self.ring.snapshots)) if s.health is Health.GOOD]

    def _find(
        self,
        before: int,
        at_latest: int,
        find_problem: Callable[[Snapshot], str | None],
        *,
        newer_than: int = -1,
        gathers: bool = False,
    ) -> tuple[Snapshot | None, list[RejectedSnapshot]]:
        self.take_postponed()
        self.discard_in_progress()
        for snapshot in list(self.ring):
            if snapshot.trusted and snapshot.health is Health.CANDIDATE:
                self._certify(snapshot)
        rejected = [r for r in self._rejected if r.step <= at_latest]
        for snapshot in self.ring:
            if snapshot.health is Health.CANDIDATE and snapshot.step <= at_latest:
                rejected.append(RejectedSnapshot(snapshot.step, "not certified yet"))
        local = {s.step: s for s in self.ring.good_at_or_before(at_latest) if s.step > newer_than}
        common = set.intersection(*(set(steps) for steps in self._ranks.all_gather_object(sorted(local))))
        missing = "another rank has no certified snapshot of this step"
        rejected += [RejectedSnapshot(step, missing) for step in sorted(set(local) - common)]
        for step in sorted(common, key=lambda s: (s <= before, s), reverse=True):
            snapshot = local[step]
            why = self._first_problem(find_problem(snapshot))
            if why is None and snapshot.share is not None:
                why = self._gather(snapshot) if gathers else self._differing_replicas(snapshot)
            if why is None:
                return snapshot, rejected
            rejected.append(RejectedSnapshot(step, why))
            snapshot.reject(why)
            self._drop(snapshot)
        return None, rejected

    def _first_problem(self, problem: str | None) -> str | None:
        """Return the problem of the first rank that has one. All ranks call it."""
        problems = enumerate(self._ranks.all_gather_object(problem))
        return next((p if self._ranks.size == 1 else f"rank {rank}: {p}" for rank, p in problems if p), None)

    def _gather(self, snapshot: Snapshot) -> str | None:
        """Gather the shares of a snapshot that every rank has verified, and verify the whole. Return what is wrong."""
        why = self._differing_replicas(snapshot)
        return why or self._first_problem(self.restorer.gather(snapshot, self._ranks))

    def _differing_replicas(self, snapshot: Snapshot) -> str | None:
        """Return that tensors of which one rank keeps the copy were not equal on all ranks, or None."""
        digests = self._ranks.all_gather_object(snapshot.replica_digest())
        return None if len(set(digests)) == 1 else "the ranks held different values of tensors that they share out"

    def restore(self, snapshot: Snapshot) -> None:
        """Restore the state, random state and buffers of a snapshot, and drop newer snapshots."""
        self.restorer.restore(snapshot)
        self._drop_newer(snapshot.step)

    def restore_saved(
        self, step: int, small_state: dict[str, Any], tensors: dict[str, Tensor], rng: RngState | None
    ) -> None:
        """Restore a state that another process may have saved. Without `rng` the generators stay as they are."""
        self.restorer.restore_saved(small_state, tensors, rng)
        self._drop_newer(step)
        if self.ring.is_limited and not any(s.is_settled for s in self.ring):
            # All were newer than the checkpoint. It is good itself, so a snapshot of it is.
            self._due_step, self._initial, self._trusted = step, True, True

    def _drop_newer(self, step: int) -> None:
        self._in_progress = self._due_step = self.postponed = None
        self._submitted_step = None
        self._rejected = [r for r in self._rejected if r.step <= step]
        self.announcements = [a for a in self.announcements if a.get("rejected", step) <= step]
        for dropped in self.ring.drop_after(step):
            self._placement.release(dropped)

    def oldest_position(self) -> tuple[int, Position] | None:
        """Return how far back a rollback can go: the step, and its data position."""
        oldest = self.ring.oldest()
        return None if oldest is None or oldest.position is None else (oldest.step, oldest.position)

    # ---- waiting

    def wait_for_copies(self) -> None:
        """Wait until the next update may write to tensors that are being copied."""
        began = time.perf_counter()
        self._copier.wait()
        self.stalled_seconds += time.perf_counter() - began

    def release_device_memory(self) -> str | None:
        """Give back the device memory that snapshots use, because the device ran out of memory. Return what was given back.

        Of snapshots on the device only the newest certified one is kept, on the host.
        """
        gave_staging = self._copier.stop_staging()
        moved = self._placement.leave_device()
        if moved:
            kept = next(iter(self.ring.good_at_or_before(2**62)), None)
            for snapshot in [s for s in self.ring if s is not kept]:
                self._drop(snapshot)
            if kept is not None:
                kept.move_to_host()
        if moved:
            return "snapshots leave the device; from now on they are kept in host memory"
        return "snapshots are not staged in device memory any more" if gave_staging else None

    def wait_until_idle(self) -> None:
        """Block until no copy is running, so that the process may fork."""
        self.take_postponed()
        self._copier.wait_until_idle()

    def close(self) -> None:
        self.postponed = None
        self._copier.close()


def _on_cuda(devices: Collection[torch.device]) -> bool:
    return any(device.type == "cuda" for device in devices)
