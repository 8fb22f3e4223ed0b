"""When a run is written to disk, what is thought of what was written, and what is returned to where memory has nothing.

The training thread only hands snapshots over and asks for news; reading, writing and deleting are the tier's, in the
background. A checkpoint is a candidate until `certify_after` healthy steps have followed it, as a snapshot in memory is.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from holdfast.core.base.errors import RunDirError, SetupError, StepError, UnreadableError
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.entry import CheckpointEntry
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.manifest import name_of
from holdfast.core.checkpoints.resume import RejectedCheckpoint, is_left
from holdfast.core.checkpoints.retention import RetentionRules, SavedCheckpoint, select_for_deletion
from holdfast.runtime.checkpoint import resume as resuming
from holdfast.runtime.checkpoint.serialization import Found, frame_of, on_disk
from holdfast.runtime.data.source import BatchSource, Position
from holdfast.runtime.ports.checkpoint_store import CheckpointLabel, CheckpointStore, StoreEvent
from holdfast.runtime.record.environment import with_added_groups
from holdfast.runtime.snapshots.snapshot import Snapshot
from holdfast.runtime.state.rng import RngState

if TYPE_CHECKING:
    from holdfast.runtime.step.run import Run

log = logging.getLogger("holdfast")

START, SCHEDULED, END = "start", "scheduled", "end"


class Known:
    """One checkpoint, as this life of the run knows it."""

    def __init__(self, step: int, branch: int, health: Health, handover: bool = False) -> None:
        self.step, self.branch, self.health, self.handover = step, branch, health, handover
        self.healthy = 0
        self.on_disk = self.marking = False
        self.reason = ""
        self.stall = 0.0

    @property
    def name(self) -> str:
        return name_of(self.step, self.branch)


class Checkpoints:
    """The run's own checkpoints. Without a tier, or switched off, every method does nothing."""

    def __init__(self, run: Run, tier: CheckpointStore | None) -> None:
        config = run.config.checkpoint
        self.run, self.config = run, config
        self.tier = tier if config.enabled else None
        self.lineage = Lineage()
        self.known: dict[str, Known] = {}
        self._fresh = True
        """nothing was trained yet, and nothing gone on from"""
        self.foreign = False
        """gone on from another run's: there is nothing of its own to return to yet"""
        self._unused = None if config.enabled else tier
        self._load_path = config.load_path
        self._rules = RetentionRules(config.keep_last, config.keep_every, config.keep_powers_of_two, config.keep_bad)
        self._stalled = 0.0
        self._last: _Place | None = None

    # ---- saving

    def save_reason(self, step: int, *, initial: bool = False) -> str | None:
        """Why the state after `step` is to be written, or None."""
        if self.tier is None:
            return None
        if initial:
            return START if self._fresh and self.config.at_start else None
        if self.config.every_steps and step % self.config.every_steps == 0:
            saved = name_of(step, self.lineage.branch) in self.known and all(
                self.run.ranks.all_gather_object(self._unchanged())
            )
            return None if saved else SCHEDULED
        return None

    def submit(self, snapshot: Snapshot) -> None:
        """A snapshot is whole and wanted on disk."""
        assert self.tier is not None and snapshot.reason is not None
        began = time.perf_counter()
        if name_of(snapshot.step, snapshot.lineage.branch) in self.known:
            # The same step in another state: an evaluation, say, has moved the schedule since it was saved.
            self.fork(snapshot.lineage, snapshot.step)
            snapshot.lineage = self.lineage
        self.tier.wait()  # one at a time: a disk slower than the cadence holds the run up, and the journal says so
        known = Known(snapshot.step, snapshot.lineage.branch, Health.CANDIDATE)
        known.reason = snapshot.reason
        known.handover = snapshot.reason == END
        if snapshot.reason == START:
            known.health = Health.GOOD
        self.known[known.name] = known
        why = "the state the run began with" if snapshot.reason == START else ""
        about = with_added_groups(self.run.records.about(), self.run.state)
        label = CheckpointLabel(snapshot.reason, known.handover, known.health, why, about, self.run.records.versions())
        self.tier.save(frame_of(snapshot, self.run.state), label)
        known.stall = time.perf_counter() - began + self.run.snapshots.stalled_seconds - self._stalled
        self._stalled = self.run.snapshots.stalled_seconds
        self._fresh = False
        self._last = _saved_at(snapshot)

    def now(self, reason: str) -> str | None:
        """Write the state of this moment and wait until it is there: its path, or None where it could not be."""
        run = self.run
        served = run.current
        if served is not None and served.is_open:
            raise StepError(
                f"checkpoint(): step {served.number} is under way, and half a step cannot be saved: call it between two "
                "steps, or in on_step_end"
            )
        run.flush()
        if self.tier is None or run.source is None:
            return None
        taken_back = run.serving.unserve(served)
        try:
            return self._now(self.tier, run.source, reason)
        finally:
            if taken_back and served is not None:
                run.serving.serve_anew(served)

    def _now(self, tier: CheckpointStore, source: BatchSource, reason: str) -> str | None:
        run = self.run
        tier.wait()  # what is being written of this very step can be marked only when it is there
        self.poll()
        known = self.known.get(name_of(run.step, self.lineage.branch))
        # One rank may have evaluated, and drawn random numbers for it: all write, or none does.
        if not all(run.ranks.all_gather_object(known is not None and self._unchanged())) or known is None:
            run.snapshots.take_now(run.step, reason, run.state.buffers.capture(), source, run.engine.state_dict)
        elif reason == END and known.health is Health.CANDIDATE:
            known.handover = True
            self.mark(known, Health.CANDIDATE, "the state an orderly end left")
        name = name_of(run.step, self.lineage.branch)
        tier.wait()
        told = self.poll()
        path = next((str(n.path) for n in told if n.name == name and n.path is not None), None)
        return path or next((str(e.path) for e in tier.entries() if e.name == name), None)

    def _unchanged(self) -> bool:
        """Whether the run, on this rank, stands where it stood when it was last saved."""
        return self._last is not None and self._last.step == self.run.step and self._last.same(_place_of(self.run))

    def poll(self) -> list[StoreEvent]:
        """What has become of what was handed over, on record."""
        if self.tier is None:
            return []
        told = self.tier.drain_events()
        for news in told:
            self._hear(news)
        return told

    def _hear(self, news: StoreEvent) -> None:
        known = self.known.get(news.name)
        if news.status in ("saved", "refused", "failed"):
            assert known is not None, "it is known from the moment it was handed over"
            self._written(known, news)
        elif news.status == "unmarked" and known is not None:
            self._say(known, news.status, news.why)
            known.marking, known.healthy = False, 0
        elif news.status == "kept":
            log.warning("checkpoint %s: %s", news.name, news.why)
        elif news.status == Health.GOOD and known is not None and known.health is Health.CANDIDATE:
            known.health = Health.GOOD
            self._say(known, news.status, news.why)
            self.prune()  # only now: what it takes the place of must not go before it is on disk that this one is good

    def _written(self, known: Known, news: StoreEvent) -> None:
        run = self.run
        self._say(
            known,
            news.status,
            news.why,
            reason=known.reason,
            handover=known.handover or None,
            bytes=news.bytes,
            stall_seconds=known.stall,
            write_seconds=news.seconds,
        )
        if news.status == "saved":
            known.on_disk = True
            if known.health is Health.QUARANTINED:  # left behind while it was being written
                self.mark(known, Health.QUARANTINED, "the run left its branch while it was written")
            run.hooks.call("on_checkpoint_save", str(news.path))
            return
        del self.known[known.name]
        log.warning("step %d: the checkpoint was %s: %s", known.step, news.status, news.why)
        if news.status == "refused":
            run.snapshots.report_nonfinite(known.step, news.why.split(" ")[0])

    def _say(self, known: Known, status: str, why: str, **fields: Any) -> None:
        self.run.engine.write("checkpoint", status=status, step=known.step, name=known.name, why=why or None, **fields)

    # ---- what is thought of them

    def healthy(self, step: int) -> None:
        """A healthy step was committed."""
        self._last = None  # the run stands elsewhere now
        self.poll()
        for known in self.known.values():
            if known.health is Health.CANDIDATE and known.step < step and self.lineage.holds(known.branch, known.step):
                known.healthy += 1
                if known.healthy >= self.config.certify_after and known.on_disk and not known.marking:
                    known.marking = True
                    assert self.tier is not None
                    self.tier.mark(known.name, Health.GOOD, f"{known.healthy} healthy steps have followed it")

    def unhealthy(self) -> None:
        """Something was found: candidates start counting anew."""
        for known in self.known.values():
            known.healthy = 0

    def mark(self, known: Known, health: Health, why: str) -> None:
        assert self.tier is not None
        known.health = health
        self._say(known, str(health), why)
        if known.on_disk:
            self.tier.mark(known.name, health, why, known.handover)

    def go_back(self, found: Found) -> int:
        """The run is about to return to an older state: the number of the new branch that begins there."""
        self.fork(found.lineage, found.step)
        return self.lineage.branch

    def leave_behind(self, why: str) -> None:
        """What was saved on a branch that the run has left is not to be restored."""
        for known in self.known.values():
            left = not self.lineage.holds(known.branch, known.step)
            if left and known.health in (Health.CANDIDATE, Health.GOOD):
                self.mark(known, Health.QUARANTINED, why)

    def fork(self, lineage: Lineage, step: int) -> None:
        history = self.run.history
        history.branches = 1 + max([history.branches, *(k.branch for k in self.known.values())])
        self.lineage = lineage.forked(history.branches, step)

    def prune(self) -> None:
        """Delete what no rule keeps."""
        if self.tier is None:
            return
        saved = [
            SavedCheckpoint(k.name, k.step, k.branch, k.health, k.handover) for k in self.known.values() if k.on_disk
        ]
        going = select_for_deletion(saved, self.lineage, self._rules)
        for one, why in going:
            self.run.engine.write("checkpoint", status="pruned", step=one.step, name=one.name, why=why)
            del self.known[one.name]
        self.tier.remove([one.name for one, _ in going])

    # ---- going on from one

    def open(self, identity: str) -> None:
        """The folder is held: see what is there."""
        if self.tier is None:
            if self._load_path:
                raise SetupError(
                    f"[checkpoint] load_path = {self._load_path!r}: it needs a run_dir, and [checkpoint] enabled = true"
                )
            if self._unused is not None and (found := self._unused.entries()):
                self.run.tell(
                    f"[checkpoint] enabled = false: the {len(found)} checkpoints of this run_dir are not gone on from"
                )
            return
        identity = self._agree_on_the_past(identity)
        self.tier.open(identity)
        entries = self.tier.entries()
        self._refuse_foreign(entries, identity)
        for entry in entries:
            if entry.manifest is not None and entry.manifest.run == identity:
                known = Known(entry.step, entry.branch, entry.health, entry.handover)
                known.on_disk = True
                self.known[known.name] = known
        noted = self.run.history.lineage
        for known in self.known.values():
            if is_left(noted, known.branch, known.step) and known.health in (Health.CANDIDATE, Health.GOOD):
                self.mark(known, Health.QUARANTINED, "left by the run, which ended before it could be said here")

    def _agree_on_the_past(self, identity: str) -> str:
        """The first rank has read run.json, journal and quarantine; what they say holds on every rank."""
        assert self.tier is not None
        run = self.run
        said = self.tier.broadcast_object(
            {
                "identity": identity,
                "restarted": run.records.restarted,
                "history": run.history.state_dict(),
                "policy": run.engine.policy.state_dict(),
                "quarantine": run.records.quarantine.entries,
                "facts": run.records.facts,
            }
        )
        if not self.tier.is_rank_zero:
            run.records.identity, run.records.restarted = said["identity"], said["restarted"]
            run.records.facts = said["facts"]
            run.history.load_state_dict(said["history"])
            run.engine.policy.load_state_dict(said["policy"])
            run.records.quarantine.adopt(said["quarantine"])
        return str(said["identity"])

    def _refuse_foreign(self, entries: list[CheckpointEntry], identity: str) -> None:
        """Checkpoints of another run alone: its folder was taken for this one's, or what says whose it is was lost."""
        runs = {e.manifest.run for e in entries if e.manifest is not None}
        if runs and identity not in runs and self.config.resume == "auto" and not self._load_path:
            raise RunDirError(
                f"{self.run.records.place} is run {identity[:8]}, and its checkpoints are of another ("
                f"{', '.join(sorted(r[:8] for r in runs))}): they are not gone on from, nor written over; choose another "
                "run_dir, put the journal and run.json that belong to them back, or name one with [checkpoint] load_path"
            )

    def load_path(self, path: str) -> None:
        """Go on from this one, whatever there is."""
        if self.tier is None:
            raise SetupError(f"load({path!r}): it needs a run_dir, and [checkpoint] enabled = true")
        self.tier.find(path)
        self._load_path = path

    def resume(self) -> bool:
        """Put the run where it is to go on from, if there is such a place. Its loader must be there, and nothing trained.

        Returns whether the state it begins with may be returned to at once. What an orderly end left may be gone on from,
        as if there had been no end; but it is no more than a candidate until it has been followed by healthy steps.
        """
        found = None if self.tier is None else resuming.resume(self, self.tier, self._load_path)
        self._fresh = self._fresh and (found is None or self.foreign)
        return found is None or found.health is Health.GOOD

    def find(self, before: int, at_latest: int, oldest: int = 0) -> tuple[Found | None, list[RejectedCheckpoint]]:
        """Where memory has nothing to return to: the newest good one on the run's lineage, not before step `oldest`,
        verified."""
        if self.tier is None:
            return None, []
        self.tier.wait()
        self.poll()
        passed: list[RejectedCheckpoint] = []
        entries = {e.name: e for e in self.tier.entries()}
        good = [k for k in self.known.values() if k.health is Health.GOOD and k.step >= oldest]
        mine = [[k.step, k.branch] for k in good if self.lineage.holds(k.branch, k.step)]
        # Ranks hear at different times what has become of a checkpoint, and one may have given up what another has not:
        # the first one's word holds.
        told = [Known(step, branch, Health.GOOD) for step, branch in self.tier.broadcast_object(mine)]
        candidates = [self.known.get(k.name, k) for k in told]
        for limit in (before, at_latest):
            older = sorted((k for k in candidates if k.step <= limit), key=lambda k: (k.step, k.branch), reverse=True)
            for known in older:
                if any(p.name == known.name for p in passed):
                    continue
                try:
                    return on_disk(
                        self.run, self.tier.load(entries[known.name], self.run.state.target()), fresh=False
                    ), passed
                except (RunDirError, SetupError, KeyError) as error:
                    passed.append(RejectedCheckpoint(known.name, known.step, str(error)))
                    if not isinstance(error, UnreadableError):
                        self.mark(known, Health.BAD, str(error))
        return None, passed

    def abort(self) -> None:
        """This rank cannot go on: nobody's part of a checkpoint is waited for any more."""
        if self.tier is not None:
            self.tier.abort()

    def close(self) -> None:
        if self.tier is not None:
            self.tier.wait()
            self.poll()
            self.tier.close()


class _Place(NamedTuple):
    """Where a run stands between two steps, as far as anything but an update can move it."""

    step: int
    light: dict[str, Any]
    tensors: dict[str, Tensor]
    rng: RngState
    position: Position
    detectors: dict[str, Any]

    def same(self, other: _Place) -> bool:
        return (
            (self.step, self.position, self.light, self.detectors)
            == (other.step, other.position, other.light, other.detectors)
            and self.rng.same(other.rng)
            and all(n in self.tensors and torch.equal(self.tensors[n], v.cpu()) for n, v in other.tensors.items())
        )


def _saved_at(snapshot: Snapshot) -> _Place:
    """Where the run stood when the snapshot was taken: its own copies, on the host."""
    assert snapshot.light is not None and snapshot.rng is not None and snapshot.position is not None
    tensors = {name: value for copy in snapshot.copies[1:] for name, value in copy.tensors.items()}
    return _Place(snapshot.step, snapshot.light, tensors, snapshot.rng, snapshot.position, snapshot.detectors)


def _place_of(run: Run) -> _Place:
    """Where it stands now."""
    assert run.source is not None
    light, tensors = run.state.small_state()
    tensors |= {f"buffer.{n}": b.detach() for n, b in run.state.buffers.named().items()}
    return _Place(run.step, light, tensors, run.rng.capture(), run.source.position, run.engine.state_dict())
