"""When a run is written to disk, what is thought of what was written, and which of it a run goes on from.

The training thread only hands snapshots over and asks for news; reading, writing and deleting are the tier's, in the
background. A checkpoint is a candidate until `certify_after` healthy steps have followed it, as a snapshot in memory is.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from holdfast.core.checkpoints import fit
from holdfast.core.checkpoints.entry import Entry
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.manifest import name_of
from holdfast.core.checkpoints.resume import Passed
from holdfast.core.checkpoints.retention import Rules, Saved, doomed
from holdfast.core.errors import RunDirError, SetupError
from holdfast.core.types import Health
from holdfast.runtime.data.source import Position
from holdfast.runtime.rng import RngState
from holdfast.runtime.saving import Found, frame_of, on_disk
from holdfast.runtime.snapshots.snapshot import Snapshot
from holdfast.runtime.snapshots.tier import Label, News, Restored, Tier

if TYPE_CHECKING:
    from holdfast.runtime.run import Run

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

    def __init__(self, run: Run, tier: Tier | None) -> None:
        config = run.config.checkpoint
        self._run, self._config = run, config
        self._tier = tier if config.enabled else None
        self.lineage = Lineage()
        self._known: dict[str, Known] = {}
        self._fresh = True
        """nothing was trained yet, and nothing gone on from"""
        self._load_path = config.load_path
        self._rules = Rules(config.keep_last, config.keep_every, config.keep_powers, config.keep_bad)
        self._stalled = 0.0
        self._last: _Place | None = None

    # ---- saving

    def due(self, step: int, *, initial: bool = False) -> str | None:
        """Why the state after `step` is to be written, or None."""
        if self._tier is None:
            return None
        if initial:
            return START if self._fresh and self._config.at_start else None
        if self._config.every_steps and step % self._config.every_steps == 0:
            saved = name_of(step, self.lineage.branch) in self._known and self._unchanged()
            return None if saved else SCHEDULED
        return None

    def take(self, snapshot: Snapshot) -> None:
        """A snapshot is whole and wanted on disk."""
        assert self._tier is not None and snapshot.reason is not None
        began = time.perf_counter()
        if name_of(snapshot.step, snapshot.lineage.branch) in self._known:
            # The same step in another state: an evaluation, say, has moved the schedule since it was saved.
            self._fork(snapshot.lineage, snapshot.step)
            snapshot.lineage = self.lineage
        self._tier.wait()  # one at a time: a disk slower than the cadence holds the run up, and the journal says so
        known = Known(snapshot.step, snapshot.lineage.branch, Health.CANDIDATE)
        known.reason = snapshot.reason
        known.handover = snapshot.reason == END and self._quiet()
        if snapshot.reason == START:
            known.health = Health.GOOD
        self._known[known.name] = known
        why = "the state the run began with" if snapshot.reason == START else ""
        label = Label(
            snapshot.reason, known.handover, known.health, why, self._run.records.about(), self._run.records.versions()
        )
        self._tier.save(frame_of(snapshot, self._run.state), label)
        known.stall = time.perf_counter() - began + self._run.keeper.stalled - self._stalled
        self._stalled = self._run.keeper.stalled
        self._fresh = False
        self._last = _place_of(self._run)

    def now(self, reason: str) -> str | None:
        """Write the state of this moment and wait until it is there: its path, or None where it could not be."""
        run = self._run
        run.flush()
        if self._tier is None or run.source is None:
            return None
        known = self._known.get(name_of(run.step, self.lineage.branch))
        if known is None or not self._unchanged():
            run.keeper.now(run.step, reason, run.state.buffers.capture(), run.source, run.engine.state_dict)
        elif reason == END and known.health is Health.CANDIDATE and self._quiet():
            known.handover = True
            self._mark(known, Health.CANDIDATE, "the state an orderly end left")
        name = name_of(run.step, self.lineage.branch)
        self._tier.wait()
        told = self.poll()
        path = next((str(n.path) for n in told if n.name == name and n.path is not None), None)
        return path or next((str(e.path) for e in self._tier.entries() if e.name == name), None)

    def _unchanged(self) -> bool:
        """Whether the run stands where it stood when it was last saved."""
        return self._last is not None and self._last.same(_place_of(self._run))

    def _quiet(self) -> bool:
        return self._run.engine.policy.state.incident is None

    def poll(self) -> list[News]:
        """What has become of what was handed over, on record."""
        if self._tier is None:
            return []
        told = self._tier.news()
        for news in told:
            self._hear(news)
        return told

    def _hear(self, news: News) -> None:
        known = self._known.get(news.name)
        if news.status in ("saved", "refused", "failed"):
            assert known is not None, "it is known from the moment it was handed over"
            self._written(known, news)
        elif news.status == "unmarked" and known is not None:
            self._say(known, news.status, news.why)
            known.marking, known.healthy = False, 0
        elif news.status == "kept":
            log.warning("checkpoint %s: %s", news.name, news.why)
        elif news.status == Health.GOOD and known is not None:
            known.health = Health.GOOD
            self._say(known, news.status, news.why)
            self.prune()  # only now: what it takes the place of must not go before it is on disk that this one is good

    def _written(self, known: Known, news: News) -> None:
        run = self._run
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
                self._mark(known, Health.QUARANTINED, "the run left its branch while it was written")
            run.hooks.call("on_checkpoint_save", str(news.path))
            return
        del self._known[known.name]
        log.warning("step %d: the checkpoint was %s: %s", known.step, news.status, news.why)
        if news.status == "refused":
            run.keeper.alarm(known.step, news.why.split(" ")[0])

    def _say(self, known: Known, status: str, why: str, **fields: Any) -> None:
        self._run.engine.write("checkpoint", status=status, step=known.step, name=known.name, why=why or None, **fields)

    # ---- what is thought of them

    def healthy(self, step: int) -> None:
        """A healthy step was committed."""
        self.poll()
        for known in self._known.values():
            if known.health is Health.CANDIDATE and known.step < step and self.lineage.holds(known.branch, known.step):
                known.healthy += 1
                if known.healthy >= self._config.certify_after and known.on_disk and not known.marking:
                    known.marking = True
                    assert self._tier is not None
                    self._tier.mark(known.name, Health.GOOD, f"{known.healthy} healthy steps have followed it")

    def unhealthy(self) -> None:
        """Something was found: candidates start counting anew."""
        for known in self._known.values():
            known.healthy = 0

    def _mark(self, known: Known, health: Health, why: str) -> None:
        assert self._tier is not None
        known.health = health
        self._say(known, str(health), why)
        if known.on_disk:
            self._tier.mark(known.name, health, why, known.handover)

    def go_back(self, found: Found) -> int:
        """The run is about to return to an older state: the number of the new branch that begins there."""
        self._fork(found.lineage, found.step)
        return self.lineage.branch

    def leave_behind(self, why: str) -> None:
        """What was saved on a branch that the run has left is not to be restored."""
        for known in self._known.values():
            left = not self.lineage.holds(known.branch, known.step)
            if left and known.health in (Health.CANDIDATE, Health.GOOD):
                self._mark(known, Health.QUARANTINED, why)

    def _fork(self, lineage: Lineage, step: int) -> None:
        history = self._run.history
        history.branches = 1 + max([history.branches, *(k.branch for k in self._known.values())])
        self.lineage = lineage.forked(history.branches, step)

    def prune(self) -> None:
        """Delete what no rule keeps."""
        if self._tier is None:
            return
        saved = [Saved(k.name, k.step, k.branch, k.health, k.handover) for k in self._known.values() if k.on_disk]
        going = doomed(saved, self.lineage, self._rules)
        for one, why in going:
            self._run.engine.write("checkpoint", status="pruned", step=one.step, name=one.name, why=why)
            del self._known[one.name]
        self._tier.remove([one.name for one, _ in going])

    # ---- going on from one

    def open(self, identity: str) -> None:
        """The folder is held: see what is there."""
        if self._tier is None:
            if self._load_path:
                raise SetupError(
                    f"[checkpoint] load_path = {self._load_path!r}: it needs a run_dir, and [checkpoint] enabled = true"
                )
            return
        self._tier.open(identity)
        for entry in self._tier.entries():
            if entry.manifest is not None:
                known = Known(entry.step, entry.branch, entry.health, entry.handover)
                known.on_disk = True
                self._known[known.name] = known
        if self._run.history.lineage is not None:
            self.lineage = self._run.history.lineage
            self.leave_behind("left by the run, which ended before it could be said here")

    def load_path(self, path: str) -> None:
        """Go on from this one, whatever there is."""
        if self._tier is None:
            raise SetupError(f"load({path!r}): it needs a run_dir, and [checkpoint] enabled = true")
        self._tier.find(path)
        self._load_path = path

    def resume(self) -> bool:
        """Put the run where it is to go on from, if there is such a place. Its loader must be there, and nothing trained."""
        if self._tier is None:
            return False
        began = time.perf_counter()
        explicit = bool(self._load_path)
        saved, passed = self._named() if explicit else self._newest()
        if saved is None:
            self._begin_anew(passed)
            return False
        self._compare(saved, explicit)
        found = on_disk(self._run, saved, fresh=True)
        self._go_on(found, saved, passed, began)
        return True

    def _named(self) -> tuple[Restored, list[Passed]]:
        assert self._tier is not None
        named = self._tier.find(self._load_path)
        would, _ = self._tier.choose(self._left) if self._config.resume == "auto" else (None, [])
        if would is not None and would.path != named.path:
            self._run.tell(f"load_path = {named.path} is used; automatic resume would have taken {would.name}")
        return self._tier.load(named), []

    def _newest(self) -> tuple[Restored | None, list[Passed]]:
        """The newest that is good and verifies; each that does not is condemned on the way."""
        assert self._tier is not None
        if self._config.resume == "never":
            return None, []
        spoilt: dict[str, str] = {}
        while True:
            entry, passed = self._tier.choose(lambda e: spoilt.get(e.name) or self._left(e))
            if entry is None:
                return None, passed
            try:
                return self._tier.load(entry), passed
            except RunDirError as error:
                spoilt[entry.name] = str(error)
                log.warning("checkpoint %s cannot be used: %s", entry.name, error)
                if entry.name in self._known:
                    self._mark(self._known[entry.name], Health.BAD, str(error))

    def _left(self, entry: Entry) -> str | None:
        lineage = self._run.history.lineage
        left = lineage is not None and not lineage.holds(entry.branch, entry.step)
        return "it is on a branch that the run has left" if left else None

    def _begin_anew(self, passed: list[Passed]) -> None:
        run = self._run
        if self._config.resume == "never" and run.records.restarted:
            if self._known:
                run.tell('[checkpoint] resume = "never": the checkpoints of this run_dir are not gone on from')
            run.engine.write("begun_anew", durable=True)
            run.history.turns.clear()
        spoilt = [p for p in passed if self._known.get(p.name) and self._known[p.name].health is Health.BAD]
        if spoilt and run.records.restarted:
            listed = "; ".join(f"{p.name}: {p.why}" for p in spoilt)
            raise RunDirError(
                f"no checkpoint of {run.records.place} can be restored: {listed}; name one with [checkpoint] "
                'load_path, or begin anew with [checkpoint] resume = "never" or another run_dir'
            )
        if self._known or run.history.branches:
            self._fork(Lineage(), 0)
            self.leave_behind("the run began anew")

    def _compare(self, saved: Restored, explicit: bool) -> None:
        """What is other than when it was saved: refused where it is another run, said where it matters."""
        differences = fit.compare(saved.manifest.about, self._run.records.about())
        why = fit.refusal(differences)
        if why is not None:
            raise SetupError(f"checkpoint {saved.manifest.name}: {why}")
        for line in fit.describe([d for d in differences if d.weight != "note"]):
            self._run.tell(f"going on from {saved.manifest.name}, {line}")

    def _go_on(self, found: Found, saved: Restored, passed: list[Passed], began: float) -> None:
        run, manifest = self._run, saved.manifest
        foreign = manifest.run != run.records.identity
        lineage = Lineage() if foreign else manifest.lineage
        self._fresh = False
        found.put_back()
        run.step = found.step
        self._fork(lineage, found.step)
        if foreign:
            run.tell(f"{manifest.name} is of another run ({manifest.run[:8]}): its quarantine and budgets stay with it")
            run.state.interventions.turns = 0
        if not saved.own:
            run.tell("this rank was not there when it was saved: its random streams begin where they stand")
        run.engine.write(
            "resumed",
            durable=True,
            step=run.step,
            checkpoint=manifest.name,
            branch=self.lineage.branch,
            lineage=self.lineage,
            passed_over=[{"name": p.name, "step": p.step, "why": p.why} for p in passed] or None,
            seconds=time.perf_counter() - began,
        )
        self.leave_behind(f"the run went on from step {found.step}")
        log.warning("resumed from %s: step %d%s", manifest.name, run.step, _over(passed))
        run.engine.resume(found.detectors, run.step)

    def find(self, before: int, at_latest: int) -> tuple[Found | None, list[Passed]]:
        """Where memory has nothing to return to: the newest good one on the run's lineage, verified."""
        if self._tier is None:
            return None, []
        self._tier.wait()
        self.poll()
        passed: list[Passed] = []
        entries = {e.name: e for e in self._tier.entries()}
        mine = [k for k in self._known.values() if k.health is Health.GOOD and self.lineage.holds(k.branch, k.step)]
        for limit in (before, at_latest):
            for known in sorted((k for k in mine if k.step <= limit), key=lambda k: (k.step, k.branch), reverse=True):
                if any(p.name == known.name for p in passed):
                    continue
                try:
                    return on_disk(self._run, self._tier.load(entries[known.name]), fresh=False), passed
                except (RunDirError, SetupError, KeyError) as error:
                    passed.append(Passed(known.name, known.step, str(error)))
                    self._mark(known, Health.BAD, str(error))
        return None, passed

    def close(self) -> None:
        if self._tier is not None:
            self._tier.wait()
            self.poll()
            self._tier.close()


def _over(passed: list[Passed]) -> str:
    return "" if not passed else " (passed over: " + "; ".join(f"{p.name}: {p.why}" for p in passed) + ")"


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
            and all(torch.equal(value, other.tensors[name]) for name, value in self.tensors.items())
        )


def _place_of(run: Run) -> _Place:
    assert run.source is not None
    light, tensors = run.state.light()
    tensors |= {f"buffer.{n}": b.detach().clone() for n, b in run.state.buffers.named().items()}
    return _Place(run.step, light, tensors, run.rng.capture(), run.source.position, run.engine.state_dict())
