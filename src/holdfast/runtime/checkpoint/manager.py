"""Decide when checkpoints are written, which of them are good, and which one a rollback returns to.

The training thread hands snapshots over and reads events; the store reads, writes and deletes in the background. A
checkpoint is a candidate until `certify_after` healthy steps have followed it, like a snapshot in memory.
"""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.core.base.errors import RunDirError, SetupError, UnreadableError
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.entry import CheckpointEntry
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.manifest import name_of
from holdfast.core.checkpoints.resume import RejectedCheckpoint, is_left
from holdfast.core.checkpoints.retention import RetentionRules, SavedCheckpoint, select_for_deletion
from holdfast.core.hang.heartbeat import SAVE
from holdfast.runtime.checkpoint.content_checks import RunChecks
from holdfast.runtime.checkpoint.memory_tier import MemoryTier
from holdfast.runtime.checkpoint.serialization import RestorePoint, contents_of, restore_point_on_disk
from holdfast.runtime.context import Context
from holdfast.runtime.data.feeder import Feeder
from holdfast.runtime.data.source import Position
from holdfast.runtime.ports.checkpoint_store import CheckpointLabel, CheckpointStore, MemoryStore, StoreEvent
from holdfast.runtime.record.environment import GrowingModel
from holdfast.runtime.snapshots.manager import NonfiniteSnapshot, SnapshotManager
from holdfast.runtime.snapshots.snapshot import Snapshot
from holdfast.runtime.state.rng import RngState

log = logging.getLogger("holdfast")

START, SCHEDULED, END, STOP, SIGNAL = "start", "scheduled", "end", "stop", "signal"
_CERTIFIED = {
    START: "the state the run began with",
    STOP: "certified in memory before the run was stopped",
    SIGNAL: "certified in memory before a signal ended the process",
}
"""checkpoints that are good as soon as they are written, by reason"""
_RETRY_SECONDS = 60.0
"""a checkpoint that could not be written is due again after this time"""


class CheckpointRecord:
    """Holds what this process knows about one checkpoint."""

    def __init__(self, step: int, branch: int, health: Health, handover: bool = False) -> None:
        self.step, self.branch, self.health, self.handover = step, branch, health, handover
        self.healthy_steps = 0
        self.on_disk = self.is_being_marked = False
        self.reason = ""
        self.path: Path | None = None
        """set when this process has written it"""
        self.stall_seconds = 0.0

    @property
    def name(self) -> str:
        return name_of(self.step, self.branch)


class CheckpointManager:
    """Manages the checkpoints of one run. Without a store, or switched off, every method does nothing."""

    def __init__(
        self, context: Context, store: CheckpointStore | None, feeder: Feeder, memory: MemoryStore | None = None
    ) -> None:
        config = context.config.checkpoint
        self.context, self.config, self._feeder = context, config, feeder
        self.store = store if config.enabled else None
        self.tier = MemoryTier(context, None if self.store is None else memory)
        self.every_steps = 0 if self.store is None else config.every_steps
        self.timed_step: int | None = None
        """the step to save because the time has come; the same on every rank"""
        self.is_overdue = False
        """on rank 0: the time has come, and no step is chosen yet"""
        self._due_at: float | None = None
        self._failed_saves = 0
        """since the last checkpoint that was written"""
        self._model = GrowingModel(context.state)
        self.lineage = Lineage()
        self.records: dict[str, CheckpointRecord] = {}
        self.named_by_bundles: list[str] = []
        """the checkpoints that bundles of incidents need; they are not deleted"""
        self._is_new_run = True
        """nothing was trained, and nothing was resumed from"""
        self._unused_store = None if config.enabled else store
        self._load_path = config.load_path
        self._rules = RetentionRules(config.keep_last, config.keep_every, config.keep_powers_of_two, config.keep_bad)
        self._stalled_before = 0.0
        self._last_saved: _Moment | None = None
        self.nonfinite: NonfiniteSnapshot | None = None
        """the first state the store found to hold NaN or Inf since `pop_nonfinite`"""

    # ---- saving

    def save_reason(self, step: int, *, initial: bool = False) -> str | None:
        """Return why the state after `step` is to be written, or None."""
        if self.store is None:
            return None
        if initial:
            return START if self._is_new_run and self.config.at_start else None
        if step == self.timed_step or (self.config.every_steps and step % self.config.every_steps == 0):
            # No exchange unless the step was saved before: ranks whose rings differ ask differently often.
            is_saved = name_of(step, self.lineage.branch) in self.records and self._is_saved(step)
            return None if is_saved else SCHEDULED
        return None

    def save_at(self, step: int) -> None:
        """Save the state after `step`, which no rank has begun to update yet, because the time has come."""
        self.timed_step, self.is_overdue = step, False

    def _check_time(self) -> None:
        """Note whether a checkpoint is due by the clock of rank 0. The first healthy step after the last one starts it."""
        if self.store is None or not self.config.every_minutes or not self.store.is_rank_zero:
            return
        now = self.context.clock.monotonic()
        if self._due_at is None:
            self._due_at = now + 60 * self.config.every_minutes
        elif now >= self._due_at and self.timed_step is None:
            self.is_overdue = True

    def _is_saved(self, step: int) -> bool:
        """Return whether every rank's present state is on disk. One rank may have evaluated and drawn random numbers."""
        record = self.records.get(name_of(step, self.lineage.branch))
        return all(self.context.ranks.all_gather_object(record is not None and self._is_unchanged(step)))

    def submit(self, snapshot: Snapshot, stalled_seconds: float) -> None:
        """Write a complete snapshot. `stalled_seconds`: all time the training thread has spent on snapshots so far."""
        assert self.store is not None and snapshot.reason is not None
        began = time.perf_counter()
        if name_of(snapshot.step, snapshot.lineage.branch) in self.records:
            # The same step in another state: an evaluation has moved the schedule since it was saved.
            self.fork(snapshot.lineage, snapshot.step)
            snapshot.lineage = self.lineage
        before = self.context.heartbeat.enter(SAVE)
        self.store.wait()  # One at a time: a disk slower than the cadence stalls the run, and the journal shows it.
        self.context.heartbeat.enter(before)
        record = CheckpointRecord(snapshot.step, snapshot.lineage.branch, Health.CANDIDATE)
        record.reason, record.handover = snapshot.reason, snapshot.reason == END
        why = _CERTIFIED.get(snapshot.reason, "")
        if why:
            record.health = Health.GOOD
        self.records[record.name] = record
        run_records, state = self.context.records, self.context.state
        self.describe_model()
        about, versions = run_records.about(), run_records.versions()
        label = CheckpointLabel(snapshot.reason, record.handover, record.health, why, about, versions)
        self.store.save(contents_of(snapshot, state, run_records.journal_bytes[1]), label)
        record.stall_seconds = time.perf_counter() - began + stalled_seconds - self._stalled_before
        self._stalled_before = stalled_seconds
        self._is_new_run = False
        self.timed_step, self.is_overdue, self._due_at = None, False, None
        self._last_saved = None if snapshot.reason == STOP else _moment_of_snapshot(snapshot)

    def describe_model(self) -> None:
        """Describe the model again if the loop has added to it: a checkpoint describes what it holds."""
        records = self.context.records
        if changes := self._model.changes(records.about):
            records.update_description(changes)

    def save_certified(self, snapshots: SnapshotManager, before: int, at_latest: int) -> str | None:
        """Write the certified snapshot that a rollback would return to, unless a good checkpoint is as new.

        Waits for it. Returns the name of the newest good checkpoint up to `at_latest`, which a restart resumes from, or None
        if there is none. Later ones are quarantined: they hold what the run is stopped for. The state of the run is not
        touched. All ranks call it.
        """
        if self.store is None:
            return None
        self.store.wait()
        self.tier.wait()
        self.tier.remove_after(at_latest)
        self.poll()
        newest = self._newest_good(at_latest)
        # Ranks learn at different times what became of a checkpoint: rank 0 decides.
        newer_than = self.context.ranks.broadcast_object(-1 if newest is None else newest.step)
        snapshot = snapshots.find_to_save(before, at_latest, newer_than)
        if snapshot is not None:
            record = self.records.get(name_of(snapshot.step, snapshot.lineage.branch))
            is_on_disk = record is not None and record.on_disk and record.health is Health.CANDIDATE
            if not self.context.ranks.broadcast_object(is_on_disk):
                self._submit_certified(snapshot, snapshots.stalled_seconds)
            elif record is not None:
                self.mark(record, Health.GOOD, _CERTIFIED[STOP])
            self.store.wait()
            self.poll()
            newest = self._newest_good(at_latest)
        if newest is None:
            return None
        for record in self.records.values():
            if record.step > at_latest and record.health in (Health.CANDIDATE, Health.GOOD):
                self.mark(record, Health.QUARANTINED, "saved after the trouble began that stopped the run")
        return newest.name

    def save_without_training_thread(self, snapshots: SnapshotManager) -> str | None:
        """Write the newest certified snapshot on the calling thread, with no exchange. Return its name, or None.

        None also if a checkpoint is as new. The other ranks write what rank 0 has chosen, if they hold it. The records of
        this process do not learn of it: the process ends.
        """
        if self.store is None:
            return None
        good = {name_of(s.step, s.lineage.branch): s for s in snapshots.certified() if s.data}
        newest = max((r.step for r in list(self.records.values()) if r.on_disk), default=-1)
        names = [name for name, snapshot in good.items() if snapshot.step > newest and name not in self.records]
        name = self.store.choose_together(names)
        if name is None:
            return None
        run_records = self.context.records
        about, versions = run_records.about(), run_records.versions()
        label = CheckpointLabel(SIGNAL, False, Health.GOOD, _CERTIFIED[SIGNAL], about, versions)
        contents = contents_of(good[name], self.context.state, run_records.journal_bytes[1])
        return name if self.store.save_now(contents, label) else None

    def _submit_certified(self, snapshot: Snapshot, stalled_seconds: float) -> None:
        """Write a snapshot that was taken for the memory only."""
        source = self._feeder.source
        if not snapshot.data:
            snapshot.data = source.save()
            assert snapshot.position is not None
            drawn = source.position.batch - snapshot.position.batch
            why = "the state_dict of the loader is known only where it is now"
            message = f"{why}: {drawn} batches drawn since step {snapshot.step} are not served again"
            self.context.engine.note(snapshot.step, message)
        snapshot.reason = STOP
        self.submit(snapshot, stalled_seconds)

    def _newest_good(self, at_latest: int) -> CheckpointRecord | None:
        """Return the newest good checkpoint on the run's lineage up to a step."""
        good = [r for r in self.records.values() if r.health is Health.GOOD and r.on_disk and r.step <= at_latest]
        on_lineage = [r for r in good if self.lineage.holds(r.branch, r.step)]
        return max(on_lineage, key=lambda r: (r.step, r.branch), default=None)

    def is_needed_now(self, step: int) -> bool:
        """Wait for writes in progress and return whether the present state must be written to be on disk."""
        assert self.store is not None
        self.store.wait()  # a checkpoint can be marked only when it is written
        self.poll()
        return not self._is_saved(step)

    def finish_now(self, step: int, reason: str) -> str | None:
        """Wait for the checkpoint of `step`. Return its path, or None if it could not be written."""
        assert self.store is not None
        name = name_of(step, self.lineage.branch)
        record = self.records.get(name)
        if reason == END and record is not None and record.on_disk and record.health is Health.CANDIDATE:
            record.handover = True
            self.mark(record, Health.CANDIDATE, "the state an orderly end left")
        is_new = record is not None and not record.on_disk
        self.store.wait()
        self.poll()
        if record is not None and is_new and record.path is not None:
            return str(record.path)
        return next((str(entry.path) for entry in self.store.entries() if entry.name == name), None)

    def _is_unchanged(self, step: int) -> bool:
        """Return whether this rank's run is in the state that was saved last."""
        last = self._last_saved
        return last is not None and last.step == step and last.equals(self._moment_now(step))

    def is_writing(self) -> bool:
        """Return whether a checkpoint of this process is being written. Any thread may call it."""
        return any(not record.on_disk for record in list(self.records.values()))

    def poll(self) -> None:
        """Record what the store has done since the last call."""
        while self.store is not None and self.store.events:
            self._handle(self.store.events.popleft())

    def pop_nonfinite(self) -> NonfiniteSnapshot | None:
        """Return the first state the store found to hold NaN or Inf, and forget it."""
        nonfinite, self.nonfinite = self.nonfinite, None
        return nonfinite

    def _handle(self, event: StoreEvent) -> None:
        record = self.records.get(event.name)
        if event.status in ("saved", "refused", "failed"):
            assert record is not None, "a checkpoint has a record from the moment it is handed over"
            self._on_written(record, event)
        elif event.status == "unmarked" and record is not None:
            self._write_event(record, event.status, event.why)
            record.is_being_marked, record.healthy_steps = False, 0
        elif event.status == "kept":
            log.warning("holdfast: checkpoint %s was not deleted: %s", event.name, event.why)
        elif event.status == Health.GOOD and record is not None and record.health is Health.CANDIDATE:
            record.health = Health.GOOD
            self._write_event(record, event.status, event.why)
            self.prune()  # Only now: its predecessor must stay until this one is known to be good on disk.

    def _on_written(self, record: CheckpointRecord, event: StoreEvent) -> None:
        self._write_event(
            record,
            event.status,
            event.why,
            reason=record.reason,
            handover=record.handover or None,
            bytes=event.bytes,
            stall_seconds=record.stall_seconds,
            write_seconds=event.seconds,
        )
        if event.status == "saved":
            record.on_disk, record.path = True, event.path
            if self._failed_saves:
                log.warning(
                    "holdfast: step %d: checkpoints are written again; %d were not", record.step, self._failed_saves
                )
            self._failed_saves = 0
            if record.health is Health.QUARANTINED:
                self.mark(record, Health.QUARANTINED, "the run left its branch while it was written")
            self.context.hooks.call("on_checkpoint_save", str(event.path))
            return
        del self.records[record.name]
        if event.status == "failed":
            self._failed_saves += 1
            if self.config.every_minutes:
                self._due_at = self.context.clock.monotonic() + min(_RETRY_SECONDS, 60 * self.config.every_minutes)
        if event.status == "refused" or self._failed_saves == 1:
            result = "refused" if event.status == "refused" else "not written"
            log.warning("holdfast: step %d: the checkpoint was %s: %s", record.step, result, event.why)
        is_ours = self.lineage.holds(record.branch, record.step)  # a rollback may have left it while it was written
        if event.status == "refused" and is_ours and self.nonfinite is None:
            self.nonfinite = NonfiniteSnapshot(record.step, event.why.split(" ")[0])

    def _write_event(self, record: CheckpointRecord, status: str, why: str, **fields: Any) -> None:
        self.context.engine.write(
            "checkpoint", status=status, step=record.step, name=record.name, why=why or None, **fields
        )

    # ---- health

    def count_healthy_step(self, step: int) -> None:
        """Count one healthy committed step for every candidate, and mark those good that have seen enough."""
        self._last_saved = None  # the run has moved on
        self._check_time()
        if self.store is not None and self.store.events:
            self.poll()
        for record in self.records.values():
            if record.health is not Health.CANDIDATE or record.step >= step:
                continue
            if not self.lineage.holds(record.branch, record.step):
                continue
            record.healthy_steps += 1
            if record.healthy_steps >= self.config.certify_after and record.on_disk and not record.is_being_marked:
                record.is_being_marked = True
                assert self.store is not None
                self.store.mark(record.name, Health.GOOD, f"{record.healthy_steps} healthy steps have followed it")

    def reset_healthy_counts(self) -> None:
        """Start counting again for every candidate: a finding was acted on."""
        for record in self.records.values():
            record.healthy_steps = 0

    def mark(self, record: CheckpointRecord, health: Health, why: str) -> None:
        """Set a checkpoint's health, in the journal and on disk."""
        assert self.store is not None
        record.health = health
        self._write_event(record, str(health), why)
        if record.on_disk:
            self.store.mark(record.name, health, why, record.handover)

    def quarantine_abandoned(self, why: str) -> None:
        """Quarantine the checkpoints of branches that the run has left: they are never restored."""
        self.tier.remove_abandoned(self.lineage)
        for record in self.records.values():
            is_abandoned = not self.lineage.holds(record.branch, record.step)
            if is_abandoned and record.health in (Health.CANDIDATE, Health.GOOD):
                self.mark(record, Health.QUARANTINED, why)

    def fork(self, lineage: Lineage, step: int) -> int:
        """Begin a new branch of `lineage` at `step` and return its number."""
        history = self.context.history
        branch = history.next_branch([*(record.branch for record in self.records.values()), *self.tier.branches()])
        self.lineage = lineage.forked(branch, step)
        return branch

    def prune(self) -> None:
        """Delete the checkpoints that no retention rule keeps."""
        if self.store is None:
            return
        saved = [
            SavedCheckpoint(r.name, r.step, r.branch, r.health, r.handover) for r in self.records.values() if r.on_disk
        ]
        selected = select_for_deletion(saved, self.lineage, self._rules)
        deleted = [(each, why) for each, why in selected if each.name not in self.named_by_bundles]
        for checkpoint, why in deleted:
            self.context.engine.write(
                "checkpoint", status="pruned", step=checkpoint.step, name=checkpoint.name, why=why
            )
            del self.records[checkpoint.name]
        self.store.remove([checkpoint.name for checkpoint, _ in deleted])

    # ---- opening and resuming

    def open(self) -> None:
        """Read what the run directory holds. RunDirError if its checkpoints belong to another run."""
        if self.store is None:
            if self._load_path:
                raise SetupError(
                    f"[checkpoint] load_path = {self._load_path!r} needs a run_dir, and [checkpoint] enabled = true"
                )
            if self.config.memory_tier == "on":
                self.context.engine.note(
                    0,
                    '[checkpoint] memory_tier = "on" has no effect: it needs a run_dir, and [checkpoint] enabled = true',
                )
            if self._unused_store is not None and (entries := self._unused_store.entries()):
                self.context.engine.note(
                    0, f"[checkpoint] enabled = false: the run does not resume from its {len(entries)} checkpoints"
                )
            return
        identity = self._share_past(self.store)
        self.store.open(identity, self.context.records.check_held)
        entries = self.store.entries()
        self._refuse_foreign(entries, identity)
        for entry in entries:
            if entry.manifest is not None and entry.manifest.run == identity:
                record = CheckpointRecord(entry.step, entry.branch, entry.health, entry.handover)
                record.on_disk = True
                self.records[record.name] = record
        lineage = self.context.history.lineage
        for record in self.records.values():
            if is_left(lineage, record.branch, record.step) and record.health in (Health.CANDIDATE, Health.GOOD):
                self.mark(record, Health.QUARANTINED, "a previous process left its branch and ended before marking it")
        self.tier.open(identity, self.context.records.check_held)

    def _share_past(self, store: CheckpointStore) -> str:
        """Give every rank what rank 0 has read from run.json, journal and quarantine. Return the run's identity."""
        history, engine, records = self.context.history, self.context.engine, self.context.records
        past = store.broadcast_object(
            {
                "identity": records.identity,
                "restarted": records.restarted,
                "history": history.state_dict(),
                "policy": engine.policy.state_dict(),
                "quarantine": records.quarantine.entries,
                "facts": records.facts,
            }
        )
        if not store.is_rank_zero:
            records.adopt(past["identity"], past["restarted"], past["facts"], past["quarantine"])
            history.load_state_dict(past["history"])
            engine.policy.load_state_dict(past["policy"])
        return str(past["identity"])

    def _refuse_foreign(self, entries: list[CheckpointEntry], identity: str) -> None:
        """Refuse a folder that only holds another run's checkpoints: resuming or overwriting them would be wrong."""
        runs = {entry.manifest.run for entry in entries if entry.manifest is not None}
        if runs and identity not in runs and self.config.resume == "auto" and not self._load_path:
            raise RunDirError(
                f"{self.context.records.place} is run {identity[:8]}, but its checkpoints belong to run "
                f"{', '.join(sorted(r[:8] for r in runs))}: choose another run_dir, restore the journal and run.json that "
                "belong to them, or name one with [checkpoint] load_path"
            )

    def set_load_path(self, path: str) -> None:
        """Resume from this checkpoint, whatever the run directory holds."""
        if self.store is None:
            raise SetupError(f"load({path!r}) needs a run_dir, and [checkpoint] enabled = true")
        self.store.find(path)
        self._load_path = path

    @property
    def load_path(self) -> str:
        return self._load_path

    def set_resumed(self, *, from_another_run: bool) -> None:
        """Note that the run resumed. From another run's checkpoint it still writes one of its own at the start."""
        self._is_new_run = self._is_new_run and from_another_run

    def find(
        self, snapshots: SnapshotManager, before: int, at_latest: int, oldest: int = 0
    ) -> tuple[RestorePoint | None, list[RejectedCheckpoint]]:
        """Return the newest good checkpoint on the run's lineage that verifies, and those rejected on the way.

        Prefers one at or before `before`, then one at or before `at_latest`; none is older than step `oldest`.
        """
        if self.store is None:
            return None, []
        self.store.wait()
        self.poll()
        rejected: list[RejectedCheckpoint] = []
        entries = {entry.name: entry for entry in self.store.entries()}
        good = [r for r in self.records.values() if r.health is Health.GOOD and r.step >= oldest]
        usable = [[r.step, r.branch] for r in good if self.lineage.holds(r.branch, r.step)]
        # Ranks learn at different times what became of a checkpoint: rank 0 decides.
        shared = [CheckpointRecord(step, branch, Health.GOOD) for step, branch in self.store.broadcast_object(usable)]
        candidates = [self.records.get(r.name, r) for r in shared]
        for limit in (before, at_latest):
            older = sorted((r for r in candidates if r.step <= limit), key=lambda r: (r.step, r.branch), reverse=True)
            for record in older:
                if any(each.name == record.name for each in rejected):
                    continue
                try:
                    checks = RunChecks(self.context)
                    saved = self.store.load(entries[record.name], self.context.state.target(), checks)
                    point = restore_point_on_disk(self.context, snapshots, self._feeder.source, saved, is_resume=False)
                    return point, rejected
                except (RunDirError, SetupError) as error:
                    rejected.append(RejectedCheckpoint(record.name, record.step, str(error)))
                    if not isinstance(error, UnreadableError | SetupError):
                        self.mark(record, Health.BAD, str(error))
        return None, rejected

    # ---- end

    def abort(self) -> None:
        """Stop waiting for other ranks' parts of a checkpoint: this rank has failed."""
        if self.store is not None:
            self.store.abort()
            self.tier.abort()

    def close(self, *, is_orderly: bool = False) -> None:
        """Finish the writes in progress and release the store. After an orderly end nothing stays in shared memory."""
        if self.store is not None:
            self.store.wait()
            self.poll()
            self.store.close()
            self.tier.close(self._newest_usable() if is_orderly else None)

    def _newest_usable(self) -> float:
        """Return the step that a restart would resume from on disk; -1 if there is none."""
        if not self.config.at_end and self._feeder.is_attached and self.context.engine.stopped_by is None:
            return math.inf  # the user wants nothing of the end of a run to be kept
        usable = [r for r in self.records.values() if r.on_disk and (r.health is Health.GOOD or r.handover)]
        return max((r.step for r in usable if self.lineage.holds(r.branch, r.step)), default=-1)

    def _moment_now(self, step: int) -> _Moment:
        context = self.context
        light, tensors = context.state.small_state()
        light["flags"] = context.state.named_params.flags()
        tensors |= {f"buffer.{n}": b.detach() for n, b in context.state.buffers.named().items()}
        return _Moment(
            step, light, tensors, context.rng.capture(), self._feeder.source.position, context.engine.state_dict()
        )


class _Moment(NamedTuple):
    """The state of a run between two steps, without what only an update can change."""

    step: int
    light: dict[str, Any]
    tensors: dict[str, Tensor]
    rng: RngState
    position: Position
    detectors: dict[str, Any]

    def equals(self, other: _Moment) -> bool:
        return (
            (self.step, self.position, self.light, self.detectors)
            == (other.step, other.position, other.light, other.detectors)
            and self.rng.same(other.rng)
            and all(n in self.tensors and torch.equal(self.tensors[n], v.cpu()) for n, v in other.tensors.items())
        )


def _moment_of_snapshot(snapshot: Snapshot) -> _Moment:
    """Return the moment at which a snapshot was taken, from its copies on the host."""
    assert snapshot.small_state is not None and snapshot.rng is not None and snapshot.position is not None
    tensors = {name: value for copy in snapshot.copies[1:] for name, value in copy.tensors.items()}
    return _Moment(snapshot.step, snapshot.small_state, tensors, snapshot.rng, snapshot.position, snapshot.detectors)
