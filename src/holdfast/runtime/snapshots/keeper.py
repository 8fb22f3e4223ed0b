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
from holdfast.runtime.data.source import Position, Source
from holdfast.runtime.ports.ranks import Ranks, SingleRank
from holdfast.runtime.snapshots.copier import Copier
from holdfast.runtime.snapshots.placement import Room
from holdfast.runtime.snapshots.restore import Returning
from holdfast.runtime.snapshots.ring import Ring
from holdfast.runtime.snapshots.snapshot import Snapshot
from holdfast.runtime.state.buffers import Capture
from holdfast.runtime.state.rng import Rng, RngState
from holdfast.runtime.state.run_state import RunState


class Alarm(NamedTuple):
    """A snapshot was found to hold non-finite state: the run was broken at that step already."""

    step: int
    tensor: str


class Passed(NamedTuple):
    """A snapshot that was not taken, and why."""

    step: int
    why: str


class Beyond(Protocol):
    """Who takes snapshots further, to where they outlive the process."""

    lineage: Lineage

    def due(self, step: int, *, initial: bool = False) -> str | None: ...
    def take(self, snapshot: Snapshot) -> None: ...


class Keeper:
    """One at a time is being assembled; the others are in the ring."""

    def __init__(
        self,
        config: SnapshotSection,
        state: RunState,
        rng: Rng,
        beyond: Beyond,
        ranks: Ranks | None = None,
        neighbours: int = 1,
    ) -> None:
        self._config, self._state, self._rng, self._beyond = config, state, rng, beyond
        self._ranks = ranks or SingleRank()
        devices = {p.device for p in state.trained()}
        self.ring = Ring(config, neighbours, () if config.place == "host" else devices)
        self._copier = Copier(state.intended, staging=config.staging)
        self._room = Room(state, self._copier, self.ring, config.place, devices)
        self.returning = Returning(state, self._copier, rng)
        self._making: Snapshot | None = None
        self._wanted: int | None = None
        """the committed step after which one is to be taken, when the next step begins"""
        self._initial, self._trusted = False, True
        self.stalled = 0.0
        """seconds that the training thread has spent on snapshots"""
        self._alarm: Alarm | None = None
        self._condemned: list[Passed] = []

    # ---- taking one

    def begin(self, step: int, *, trusted: bool = True) -> str | None:
        """The state a run starts from: certified as soon as it is seen to be finite, where it is `trusted`. What is older
        belongs to another stream of data and is dropped."""
        self._trusted = trusted
        for old in self.ring.drop_after(-1):
            self._room.leave(old)
        self._making = None
        _, said = self._room.fit(self._state.heavy(), at_first=True)
        wanted = self.ring.enabled or self._beyond.due(step, initial=True) is not None
        self._wanted, self._initial = (step if wanted else None), True
        return said

    def updated(self, step: int) -> str | None:
        """An update is on its way on the device: begin copying what it leaves, if a snapshot is due after it."""
        return self._start(step) if self._due(step) else None

    def _due(self, step: int) -> bool:
        return self.ring.due(step) or self._beyond.due(step) is not None

    def committed(self, step: int, detectors: Callable[[], dict[str, Any]]) -> None:
        """The step has settled as committed. Where the next one has begun already, what is small is added now; else all
        is taken then, since what the loop does between two steps (an evaluation that moves the schedule) belongs to the
        first of them."""
        self._room.prepare()
        if self._making is not None and self._making.position is not None:
            self._add_light(detectors())
        elif self._due(step):
            self.not_committed()
            self._wanted, self._initial = step, False

    def not_committed(self) -> None:
        """The step whose state was being copied did not come to be."""
        if self._making is not None:
            self._room.leave(self._making)
            self._making = None

    def next_begins(
        self,
        rng: Callable[[], RngState],
        buffers: Capture,
        source: Source,
        detectors: Callable[[], dict[str, Any]],
    ) -> str | None:
        """The next step begins: all that has settled, random streams, buffers and data stand where the snapshot's own
        step left them."""
        said, wanted = None, self._wanted
        self._wanted = None
        if wanted is not None:
            said = self._start(wanted, self._initial)
        snapshot = self._making
        if snapshot is None or snapshot.position is not None:
            return said
        self._add_place(snapshot, rng(), buffers, source)
        if wanted is not None:
            self._add_light(detectors())
        return said

    def now(
        self, step: int, reason: str, buffers: Capture, source: Source, detectors: Callable[[], dict[str, Any]]
    ) -> Snapshot:
        """One of this very moment, between two steps, for the disk alone."""
        self.not_committed()
        self._start(step, reason=reason)
        snapshot = self._making
        assert snapshot is not None
        self._add_place(snapshot, self._rng.capture(), buffers, source)
        self._add_light(detectors())
        return snapshot

    def _start(self, step: int, initial: bool = False, reason: str | None = None) -> str | None:
        if self.returning.unsound:
            raise StepError(
                f"step {step}: the state was being put back, and that has failed: nothing is saved of it; end the process "
                "and start it again, and the run goes on from its last good checkpoint"
            )
        began = time.perf_counter()
        tensors = self._state.heavy()
        layout, fitted = self._room.fit(tensors)
        reason = reason or self._beyond.due(step, initial=initial)
        if reason is None and not (initial and self.ring.enabled) and not self.ring.due(step):
            return fitted
        copy, said = self._room.copy(tensors, layout, reason)
        self._making = Snapshot(step, copy, lineage=self._beyond.lineage, initial=initial, reason=reason)
        self._making.trusted = initial and self._trusted
        self.stalled += time.perf_counter() - began
        return "; ".join(each for each in (fitted, *said) if each is not None) or None

    def _add_place(self, snapshot: Snapshot, rng: RngState, buffers: Capture, source: Source) -> None:
        snapshot.rng, snapshot.position = rng, source.position
        if snapshot.reason is not None:
            snapshot.data = source.save()
        named = {f"buffer.{n}": b for n, b in self._state.buffers.as_named(buffers).items()}
        snapshot.buffers = self._copier.start(
            named, live=False, part="buffers", on_host=self._room.on_host(snapshot.reason)
        )

    def _add_light(self, detectors: dict[str, Any]) -> None:
        snapshot = self._making
        assert snapshot is not None
        snapshot.light, tensors = self._state.light()
        if snapshot.reason is not None:  # it outlives the process, and is not looked at again before it is restored
            tensors |= self._state.moved(tensors)
        snapshot.light_copy = self._copier.start(
            tensors, live=False, part="light", on_host=self._room.on_host(snapshot.reason)
        )
        snapshot.frozen = self._state.frozen()
        snapshot.detectors = detectors
        self._finish(snapshot)

    def _finish(self, snapshot: Snapshot) -> None:
        snapshot.settle()
        if snapshot.health is Health.CANDIDATE:
            self._making = None
            if snapshot.reason is not None:
                self._beyond.take(snapshot)
            if self.ring.enabled and (snapshot.initial or self.ring.due(snapshot.step)):
                for gone in self.ring.add(snapshot):
                    self._room.leave(gone)
            else:
                self._room.leave(snapshot)

    # ---- certifying

    def healthy(self, step: int) -> None:
        """A healthy step was committed: candidates before it are one step nearer to good."""
        for snapshot in list(self.ring):
            if snapshot.health is Health.CANDIDATE and snapshot.step < step:
                snapshot.healthy += 1
                if snapshot.trusted or snapshot.healthy >= self._config.certify_after:
                    self._certify(snapshot)

    def unhealthy(self) -> None:
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
                if self._alarm is None:
                    self._alarm = Alarm(snapshot.step, found.nonfinite)
        light = snapshot.light_copy
        if snapshot.health is not Health.BAD and light is not None:
            moved = self._state.thawed(light.result().checksums)  # the sum of one number is that number
            if moved is not None:
                snapshot.condemn(f"{moved} was taken for frozen and had changed")
        if snapshot.health is Health.BAD:
            self._condemned = [*self._condemned[-15:], Passed(snapshot.step, snapshot.why)]
            self.ring.drop(snapshot)
            self._room.leave(snapshot)
        else:
            snapshot.health = Health.GOOD

    def take_alarm(self) -> Alarm | None:
        alarm, self._alarm = self._alarm, None
        return alarm

    # ---- returning to one

    def find(self, before: int, at_latest: int) -> tuple[Snapshot | None, list[Passed]]:
        """The newest certified snapshot at or before `before`, else at or before `at_latest`, verified; and those that
        were passed over on the way. Of several ranks each must have it, and trust its own part of it. On a device its
        tensors are in place when this returns, and only those: `restore` is to follow, or `put_back` of another."""
        self.not_committed()
        for snapshot in list(self.ring):
            if snapshot.trusted and snapshot.health is Health.CANDIDATE:
                self._certify(snapshot)
        passed = [p for p in self._condemned if p.step <= at_latest]
        for snapshot in self.ring:
            if snapshot.health is not Health.GOOD and snapshot.step <= at_latest:
                passed.append(Passed(snapshot.step, "not certified yet"))
        mine = {s.step: s for s in self.ring.good_at_or_before(at_latest)}
        everyones = set.intersection(*(set(steps) for steps in self._ranks.all_gather_object(sorted(mine))))
        passed += [
            Passed(s, "another rank has none of this step that is certified") for s in sorted(set(mine) - everyones)
        ]
        for step in sorted(everyones, key=lambda s: (s <= before, s), reverse=True):
            snapshot = mine[step]
            told = self._ranks.all_gather_object(self.returning.why_not(snapshot))
            why = next((w if self._ranks.size == 1 else f"rank {r}: {w}" for r, w in enumerate(told) if w), None)
            if why is None:
                return snapshot, passed
            passed.append(Passed(step, why))
            snapshot.condemn(why)
            self.ring.drop(snapshot)
            self._room.leave(snapshot)
        return None, passed

    def restore(self, snapshot: Snapshot) -> None:
        """Put the run's state, random streams and buffers back to it; what is younger is forgotten."""
        self.returning.restore(snapshot)
        self._returned(snapshot.step)

    def put_back(self, step: int, light: dict[str, Any], tensors: dict[str, Tensor], rng: RngState | None) -> None:
        """The same from parts that another process may have saved; without random streams they stay where they are."""
        self.returning.put_back(light, tensors, rng)
        self._returned(step)

    def _returned(self, step: int) -> None:
        self._making = self._wanted = None
        self._condemned = [p for p in self._condemned if p.step <= step]
        for gone in self.ring.drop_after(step):
            self._room.leave(gone)

    # ---- the rest

    def before_update(self) -> None:
        """Whatever is being copied must be out of the update's way."""
        began = time.perf_counter()
        self._copier.wait()
        self.stalled += time.perf_counter() - began

    def out_of_memory(self) -> str | None:
        """The device has none left: what copies have of it for their own sake is given back."""
        if not self._copier.put_nothing_aside():
            return None
        return "the device is out of memory: no part of a copy is put aside there any more"

    def alarm(self, step: int, tensor: str) -> None:
        """A save found the state broken."""
        if self._alarm is None:
            self._alarm = Alarm(step, tensor)

    def idle(self) -> None:
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
