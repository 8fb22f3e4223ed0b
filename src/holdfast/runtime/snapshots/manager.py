"""Takes snapshots at the right moments, certifies them, and finds the one to return to."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from holdfast.core.base.config import SnapshotSection
from holdfast.core.base.errors import StepError
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.runtime.data.source import BatchSource, Position
from holdfast.runtime.ports.ranks import Ranks, SingleRank
from holdfast.runtime.snapshots.copier import Copier
from holdfast.runtime.snapshots.placement import Room
from holdfast.runtime.snapshots.restore import Restorer
from holdfast.runtime.snapshots.ring import Ring
from holdfast.runtime.snapshots.snapshot import Snapshot
from holdfast.runtime.state.buffers import BufferCapture
from holdfast.runtime.state.rng import Rng, RngState
from holdfast.runtime.state.run_state import RunState


class NonfiniteSnapshot(NamedTuple):
    """A snapshot was found to hold non-finite state: the run was broken at that step already."""

    step: int
    tensor: str


class RejectedSnapshot(NamedTuple):
    """A snapshot that was not taken, and why."""

    step: int
    why: str


class CheckpointSink(Protocol):
    """Who takes snapshots further, to where they outlive the process."""

    lineage: Lineage

    def save_reason(self, step: int, *, initial: bool = False) -> str | None: ...
    def submit(self, snapshot: Snapshot) -> None: ...


class SnapshotManager:
    """One at a time is being assembled; the others are in the ring."""

    def __init__(
        self,
        config: SnapshotSection,
        state: RunState,
        rng: Rng,
        sink: CheckpointSink,
        ranks: Ranks | None = None,
        neighbours: int = 1,
    ) -> None:
        self._config, self._state, self._rng, self._sink = config, state, rng, sink
        self._ranks = ranks or SingleRank()
        devices = {p.device for p in state.trained_parameters()}
        self.ring = Ring(config, neighbours, () if config.place == "host" else devices)
        self._copier = Copier(state.allowed_nonfinite, staging=config.device_staging)
        self._placement = Room(state, self._copier, self.ring, config.place, devices)
        self.restorer = Restorer(state, self._copier, rng)
        self._in_progress: Snapshot | None = None
        self._due_step: int | None = None
        """the committed step after which one is to be taken, when the next step begins"""
        self._initial, self._trusted = False, True
        self.stalled_seconds = 0.0
        """seconds that the training thread has spent on snapshots"""
        self._nonfinite: NonfiniteSnapshot | None = None
        self._rejected: list[RejectedSnapshot] = []

    # ---- taking one

    def begin_run(self, step: int, *, trusted: bool = True) -> str | None:
        """The state a run starts from: certified as soon as it is seen to be finite, where it is `trusted`. What is older
        belongs to another stream of data and is dropped."""
        self._trusted = trusted
        for old in self.ring.drop_after(-1):
            self._placement.leave(old)
        self._in_progress = None
        _, said = self._placement.fit(self._state.update_tensors(), at_first=True)
        wanted = self.ring.enabled or self._sink.save_reason(step, initial=True) is not None
        self._due_step, self._initial = (step if wanted else None), True
        return said

    def on_update_submitted(self, step: int) -> str | None:
        """An update is on its way on the device: begin copying what it leaves, if a snapshot is due after it."""
        return self._start(step) if self._due(step) else None

    def _due(self, step: int) -> bool:
        return self.ring.due(step) or self._sink.save_reason(step) is not None

    def on_commit(self, step: int, detectors: Callable[[], dict[str, Any]]) -> None:
        """The step has settled as committed. Where the next one has begun already, what is small is added now; else all
        is taken then, since what the loop does between two steps (an evaluation that moves the schedule) belongs to the
        first of them."""
        self._placement.prepare()
        if self._in_progress is not None and self._in_progress.position is not None:
            self._add_light(detectors())
        elif self._due(step):
            self.discard_in_progress()
            self._due_step, self._initial = step, False

    def discard_in_progress(self) -> None:
        """The step whose state was being copied did not come to be."""
        if self._in_progress is not None:
            self._placement.leave(self._in_progress)
            self._in_progress = None

    def on_step_begin(
        self,
        rng: Callable[[], RngState],
        buffers: BufferCapture,
        source: BatchSource,
        detectors: Callable[[], dict[str, Any]],
    ) -> str | None:
        """The next step begins: all that has settled, random streams, buffers and data stand where the snapshot's own
        step left them."""
        said, wanted = None, self._due_step
        self._due_step = None
        if wanted is not None:
            said = self._start(wanted, self._initial)
        snapshot = self._in_progress
        if snapshot is None or snapshot.position is not None:
            return said
        self._add_place(snapshot, rng(), buffers, source)
        if wanted is not None:
            self._add_light(detectors())
        return said

    def take_now(
        self,
        step: int,
        reason: str,
        buffers: BufferCapture,
        source: BatchSource,
        detectors: Callable[[], dict[str, Any]],
    ) -> Snapshot:
        """One of this very moment, between two steps, for the disk alone."""
        self.discard_in_progress()
        self._start(step, reason=reason)
        snapshot = self._in_progress
        assert snapshot is not None
        self._add_place(snapshot, self._rng.capture(), buffers, source)
        self._add_light(detectors())
        return snapshot

    def _start(self, step: int, initial: bool = False, reason: str | None = None) -> str | None:
        if self.restorer.is_partial:
            raise StepError(
                f"step {step}: the state was being put back, and that has failed: nothing is saved of it; end the process "
                "and start it again, and the run goes on from its last good checkpoint"
            )
        began = time.perf_counter()
        tensors = self._state.update_tensors()
        layout, fitted = self._placement.fit(tensors)
        reason = reason or self._sink.save_reason(step, initial=initial)
        if reason is None and not (initial and self.ring.enabled) and not self.ring.due(step):
            return fitted
        copy, said = self._placement.copy(tensors, layout, reason)
        self._in_progress = Snapshot(step, copy, lineage=self._sink.lineage, initial=initial, reason=reason)
        self._in_progress.trusted = initial and self._trusted
        self.stalled_seconds += time.perf_counter() - began
        return "; ".join(each for each in (fitted, *said) if each is not None) or None

    def _add_place(self, snapshot: Snapshot, rng: RngState, buffers: BufferCapture, source: BatchSource) -> None:
        snapshot.rng, snapshot.position = rng, source.position
        if snapshot.reason is not None:
            snapshot.data = source.save()
        named = {f"buffer.{n}": b for n, b in self._state.buffers.as_named(buffers).items()}
        snapshot.buffers = self._copier.start(
            named, live=False, part="buffers", on_host=self._placement.on_host(snapshot.reason)
        )

    def _add_light(self, detectors: dict[str, Any]) -> None:
        snapshot = self._in_progress
        assert snapshot is not None
        snapshot.light, tensors = self._state.small_state()
        if snapshot.reason is not None:  # it outlives the process, and is not looked at again before it is restored
            tensors |= self._state.copy_changed_frozen(tensors)
        snapshot.light_copy = self._copier.start(
            tensors, live=False, part="light", on_host=self._placement.on_host(snapshot.reason)
        )
        snapshot.frozen = self._state.frozen_copies()
        snapshot.detectors = detectors
        self._finish(snapshot)

    def _finish(self, snapshot: Snapshot) -> None:
        snapshot.settle()
        if snapshot.health is Health.CANDIDATE:
            self._in_progress = None
            if snapshot.reason is not None:
                self._sink.submit(snapshot)
            if self.ring.enabled and (snapshot.initial or self.ring.due(snapshot.step)):
                for gone in self.ring.add(snapshot):
                    self._placement.leave(gone)
            else:
                self._placement.leave(snapshot)

    # ---- certifying

    def count_healthy_step(self, step: int) -> None:
        """A healthy step was committed: candidates before it are one step nearer to good."""
        for snapshot in list(self.ring):
            if snapshot.health is Health.CANDIDATE and snapshot.step < step:
                snapshot.healthy += 1
                if snapshot.trusted or snapshot.healthy >= self._config.certify_after:
                    self._certify(snapshot)

    def reset_healthy_counts(self) -> None:
        """Something was found: candidates start counting anew."""
        for snapshot in self.ring:
            if snapshot.health is Health.CANDIDATE and not snapshot.trusted:
                snapshot.healthy = 0

    def _certify(self, snapshot: Snapshot) -> None:
        for copy in snapshot.copies:
            try:
                found = copy.result()
            except Exception as error:  # out of memory on the copying thread, say: no reason to end the run
                snapshot.condemn(f"it could not be copied: {error}")
                continue
            if found.torn:
                snapshot.condemn("a parameter changed while it was copied")
            elif found.nonfinite is not None:
                snapshot.condemn(f"{found.nonfinite} holds NaN or Inf")
                if self._nonfinite is None:
                    self._nonfinite = NonfiniteSnapshot(snapshot.step, found.nonfinite)
        light = snapshot.light_copy
        if snapshot.health is not Health.BAD and light is not None:
            moved = self._state.changed_frozen_weight(light.result().checksums)  # the sum of one number is that number
            if moved is not None:
                snapshot.condemn(f"{moved} was taken for frozen and had changed")
        if snapshot.health is Health.BAD:
            self._rejected = [*self._rejected[-15:], RejectedSnapshot(snapshot.step, snapshot.why)]
            self.ring.drop(snapshot)
            self._placement.leave(snapshot)
        else:
            snapshot.health = Health.GOOD

    def pop_nonfinite(self) -> NonfiniteSnapshot | None:
        alarm, self._nonfinite = self._nonfinite, None
        return alarm

    # ---- restorer to one

    def find_restore_point(self, before: int, at_latest: int) -> tuple[Snapshot | None, list[RejectedSnapshot]]:
        """The newest certified snapshot at or before `before`, else at or before `at_latest`, verified; and those that
        were rejected over on the way. Of several ranks each must have it, and trust its own part of it. On a device its
        tensors are in place when this returns, and only those: `restore` is to follow, or `put_back` of another."""
        self.discard_in_progress()
        for snapshot in list(self.ring):
            if snapshot.trusted and snapshot.health is Health.CANDIDATE:
                self._certify(snapshot)
        rejected = [p for p in self._rejected if p.step <= at_latest]
        for snapshot in self.ring:
            if snapshot.health is not Health.GOOD and snapshot.step <= at_latest:
                rejected.append(RejectedSnapshot(snapshot.step, "not certified yet"))
        mine = {s.step: s for s in self.ring.good_at_or_before(at_latest)}
        everyones = set.intersection(*(set(steps) for steps in self._ranks.all_gather_object(sorted(mine))))
        rejected += [
            RejectedSnapshot(s, "another rank has no certified snapshot of this step")
            for s in sorted(set(mine) - everyones)
        ]
        for step in sorted(everyones, key=lambda s: (s <= before, s), reverse=True):
            snapshot = mine[step]
            told = self._ranks.all_gather_object(self.restorer.why_not(snapshot))
            why = next((w if self._ranks.size == 1 else f"rank {r}: {w}" for r, w in enumerate(told) if w), None)
            if why is None:
                return snapshot, rejected
            rejected.append(RejectedSnapshot(step, why))
            snapshot.condemn(why)
            self.ring.drop(snapshot)
            self._placement.leave(snapshot)
        return None, rejected

    def restore(self, snapshot: Snapshot) -> None:
        """Put the run's state, random streams and buffers back to it; what is younger is forgotten."""
        self.restorer.restore(snapshot)
        self._returned(snapshot.step)

    def restore_saved(self, step: int, light: dict[str, Any], tensors: dict[str, Tensor], rng: RngState | None) -> None:
        """The same from parts that another process may have saved; without random streams they stay where they are."""
        self.restorer.restore_saved(light, tensors, rng)
        self._returned(step)

    def _returned(self, step: int) -> None:
        self._in_progress = self._due_step = None
        self._rejected = [p for p in self._rejected if p.step <= step]
        for gone in self.ring.drop_after(step):
            self._placement.leave(gone)

    # ---- the rest

    def wait_for_copies(self) -> None:
        """Whatever is being copied must be out of the update's way."""
        began = time.perf_counter()
        self._copier.wait()
        self.stalled_seconds += time.perf_counter() - began

    def release_device_memory(self) -> str | None:
        """The device has none left: what copies have of it for their own sake is given back."""
        if not self._copier.put_nothing_aside():
            return None
        return "the device is out of memory: no part of a copy is put aside there any more"

    def report_nonfinite(self, step: int, tensor: str) -> None:
        """A save found the state broken."""
        if self._nonfinite is None:
            self._nonfinite = NonfiniteSnapshot(step, tensor)

    def wait_until_idle(self) -> None:
        """Nothing runs on the copying thread, so that a process may be forked."""
        self._copier.idle()

    def oldest_position(self) -> tuple[int, Position] | None:
        """How far back a rollback could go: the step, and where the data stood."""
        oldest = self.ring.oldest()
        if oldest is None or oldest.position is None:
            return None
        return oldest.step, oldest.position

    def close(self) -> None:
        self._copier.close()
