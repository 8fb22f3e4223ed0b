"""A run in progress: serves steps, lets them land or not, settles them, and keeps what can be returned to.

Leaving a step makes it pending. It settles before the next update, so that on a device the host never waits for work it
has only just enqueued; where the host decides, it settles at once. All that is found at settling is acted on by
`effects/`, which may put the run back and so make the step after it, already computed, void.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import OutOfMemoryError

from holdfast.core.base.clock import Clock
from holdfast.core.base.config import Config
from holdfast.core.base.errors import InstabilityError, PolicyStop, RanksDisagree, StepError
from holdfast.core.base.types import Incident, Outcome, Plan, Signal, Span, Status
from holdfast.core.checkpoints.recovery_history import RecoveryHistory
from holdfast.core.decide.engine import Engine
from holdfast.core.detectors.base import Detector
from holdfast.core.detectors.expected_shifts import LR_JUMP
from holdfast.runtime.agree.coordinator import Meeting
from holdfast.runtime.checkpoint.manager import END, Checkpoints
from holdfast.runtime.data.source import BatchSource, Position
from holdfast.runtime.guard.setup import devices_of
from holdfast.runtime.integrity.checking import Checking
from holdfast.runtime.ports.checkpoint_store import CheckpointStore
from holdfast.runtime.ports.distributed_context import DistributedContext
from holdfast.runtime.ports.hooks import Hooks
from holdfast.runtime.ports.ranks import MonitoredRanks, NoWatchdog, Ranks, RankWatchdog
from holdfast.runtime.record.records import Records
from holdfast.runtime.snapshots.manager import SnapshotManager
from holdfast.runtime.state.optimizers import clear_gradients
from holdfast.runtime.state.rng import Rng
from holdfast.runtime.state.run_state import RunState
from holdfast.runtime.step import effects
from holdfast.runtime.step.leaving import Leaving
from holdfast.runtime.step.serving import Serving
from holdfast.runtime.step.settling import Settling
from holdfast.runtime.step.step import Step
from holdfast.runtime.tensors.cuda_streams import StreamTracker
from holdfast.runtime.update.gate import Gate
from holdfast.runtime.update.gradient_sync import GradientSync
from holdfast.runtime.update.local_grad_norms import LocalGradNorms

log = logging.getLogger("holdfast")


class Run:
    """One guarded run, from `open` to `close`."""

    def __init__(
        self,
        state: RunState,
        config: Config,
        *,
        clip: float | None,
        hooks: Hooks,
        detectors: Sequence[Detector],
        records: Records,
        clock: Clock,
        tier: CheckpointStore | None = None,
        company: DistributedContext | None = None,
    ) -> None:
        self.state, self.config, self.clock = state, config, clock
        self.hooks, self.records = hooks, records
        company = company or DistributedContext()
        self.norms = company.norms
        self.ranks: Ranks = (
            company.ranks if company.ranks.size == 1 else MonitoredRanks(company.ranks, lambda: self.watch)
        )
        self.meeting = Meeting(self, self.ranks)
        self._make_watch = company.make_watchdog
        self.watch: RankWatchdog = NoWatchdog()
        self.engine = Engine(config, detectors=detectors, on_instability=self._consult)
        devices = devices_of(state.modules)
        self.rng = Rng(devices)
        self.armed = config.recover.mode == "heal"
        on_cuda = state.optimizers.can_veto_on_cuda() and all(map(company.ranks.supports_device, devices))
        self.gate = Gate(state.optimizers, state.scaler, config.detect.gate, self.armed, on_cuda, norms=self.norms)
        self.streams = StreamTracker(devices)
        self.history = RecoveryHistory()
        self.checkpoints = Checkpoints(self, tier)
        self.snapshots = SnapshotManager(
            config.snapshot, state, self.rng, self.checkpoints, self.ranks, ranks_per_host=company.ranks_per_host
        )
        self.checking = Checking(self, company.replicas)
        self.sync = GradientSync(state.wrapped_modules)
        self.witness = LocalGradNorms(state.modules, enabled=self.meeting.several)
        self.serving = Serving(self)
        self.leaving = Leaving(self, clip)
        self.settling = Settling(self)
        self.step = 0
        """steps committed"""
        self.pending: Step | None = None
        self.current: Step | None = None
        self.positions: dict[int, Position] = {}
        """where the data of each step began, as far back as a rollback could want"""
        self.stopping: str | None = None
        self.exhausted = False
        self.attempt = 1
        """how often the next step has been tried, counting the next time"""
        self._told: BaseException | None = None
        """the error that the other ranks have been told of"""

    # ---- beginning and end

    def open(self, about: dict[str, Any]) -> None:
        self.watch = self._make_watch()
        self.watch.start()
        if self.ranks.rank > 0:
            log.addFilter(_said_by_the_first)
        try:
            self.meeting.together(lambda: self.records.open(self.engine, about, self.history))
        except BaseException:
            self._let_go()
            raise
        try:
            self.checkpoints.open(self.records.identity)
        except BaseException as error:
            self.records.close()
            self.fail(error, "opening the run directory")
            self._let_go()
            raise
        self.leaving.forbid_foreign_steps()

    @property
    def source(self) -> BatchSource | None:
        """Where batches come from; None before the first loop."""
        return self.serving.source

    def attach(self, loader: Iterable[Any], epochs: int | None, accumulate: int, max_steps: int | None) -> None:
        """Take batches from `loader` from here on. The same loader again goes on where it stands."""
        self.flush()
        self.serving.same_loop(loader, epochs, accumulate, max_steps)
        self.exhausted = False
        first = self.source is None
        if not self.serving.attach(loader, epochs):
            return
        self.positions.clear()
        trusted = True
        if first:
            trusted = self.checkpoints.resume()
            effects.interventions.again(self)
        self.tell(self.snapshots.begin_run(self.step, trusted=trusted))

    def _consult(self, incident: Incident) -> Plan | None:
        """The user's hooks; of several ranks, the first one's."""
        own = self.hooks.plan(incident)
        return self.meeting.share_plan(incident, own) if self.hooks.broadcasts_plans else None

    def fail(self, error: BaseException, where: str) -> None:
        """This rank cannot go on while the others may be waiting for it: they are told. What all ranks come to at the same
        step is no failure of one."""
        agreed = isinstance(error, PolicyStop | InstabilityError | RanksDisagree)
        if self.meeting.several and self._told is None and not agreed:
            self._told = error
            number = self.step + 1 if self.current is None else self.current.number
            self.checkpoints.abort()
            self.watch.report_failure(error, number, where)

    def close(self, error: BaseException | None) -> None:
        """Settle what is pending, write the end down, let everything go. Never hides the user's own error."""
        trouble: BaseException | None = None
        if error is not None:
            self.fail(error, "between two steps")
        served, self.current = self.current, None
        try:
            if self._told is None:  # with ranks that are going down nothing more can be settled
                if self.flush():
                    self.serving.unserve(served)
                self.watch.wait_for_others_to_finish(self.step)
                self.meeting.hear(self.step + 1)
                self._last_save(error)
        except Exception as problem:  # ours, or out of a hook of the user's: what is held is let go first
            trouble = problem
            self.fail(problem, "at the end of the run")
        parts: tuple[Callable[[], None], ...] = (
            lambda: self.sync.before_forward(last=True),
            self.witness.close,
            self.state.optimizers.remove_hooks,
            self.checkpoints.close,
            self.snapshots.close,
            self.serving.close,
            lambda: self._write_end(error or trouble),
            self.records.close,
            self._let_go,
        )
        for part in parts:
            try:
                part()
            except Exception as problem:  # a disk that fails: the rest is let go all the same
                trouble = trouble or problem
        if trouble is not None and error is None:
            raise trouble

    def _let_go(self) -> None:
        self.watch.close()
        log.removeFilter(_said_by_the_first)

    def _write_end(self, cause: BaseException | None) -> None:
        self.engine.write(
            "run_end",
            durable=True,
            step=self.step,
            policy=self.engine.policy.state_dict(),
            error=None if cause is None else f"{type(cause).__name__}: {cause}",
            stopped=self.stopping,
            summary=self.engine.summary(self.step),
        )

    def _last_save(self, error: BaseException | None) -> None:
        """At an orderly end the run is whole: another life goes on exactly here."""
        if error is None and self.config.checkpoint.at_end and self.step > 0:
            self.checkpoints.now(END)

    # ---- a step

    def serve(self, accumulate: int) -> Step | None:
        """The next step, or None when the data has ended."""
        if self.snapshots.restorer.is_partial:
            raise StepError("the run's state was put back in part and could not be proven: it cannot go on from here")
        self.streams.wait_for_last_stream()
        try:
            return self.serving.serve(accumulate)
        except BaseException as error:
            self.fail(error, "the loader")
            raise

    def draw_more(self, step: Step) -> bool:
        """One more batch for a step in progress; False where the data has ended inside it."""
        return self.serving.draw_more(step)

    def in_time(self) -> None:
        """Between two steps: a teacher or an average that on_step_end moves must move before the next forward sees it."""
        if self.hooks.runs_between_steps:
            self.flush()

    def step_epochs(self, count: int) -> None:
        """That many epochs have ended."""
        for _ in range(count):
            self.step_schedulers("epoch")

    def entered(self, step: Step) -> None:
        """The user's forward and backward begin: the other ranks' collectives are in them."""
        self.streams.wait_for_last_stream()
        self.watch.enter_step(step.number)

    def leave(self, step: Step) -> None:
        """A complete step: measure it, settle the one before, let its update land or not."""
        self.streams.wait_for_last_stream()
        try:
            self._leave(step)
        except BaseException as error:
            self.fail(error, "the update")
            raise
        self.watch.leave_step()

    def _leave(self, step: Step) -> None:
        self.tell(self.gate.check_step_hooks(is_distributed=self.meeting.several))
        left = self.leaving.measure(step)
        if self.pending is not None and not self.settling.settle(step):
            self._discard(step)
            return
        if self.pending is None and step.epochs_before:
            self.step_epochs(step.epochs_before)
        if step.ended_epochs and self.state.schedulers.has_interval("epoch"):
            # An epoch ended between two of its batches: as in a plain loop, the schedule moves before the update.
            step.schedule = self.state.schedule_state()
            self.step_epochs(step.ended_epochs)
        step.number, step.attempt = self.step + 1, self.attempt
        self.leaving.update(step, left)
        self.pending = step
        if not self.gate.on_device:
            self.settling.settle(None)
        elif not self.hooks.runs_between_steps:
            self.tell(self.snapshots.on_update_submitted(step.number))

    def abandon(self, step: Step, error: BaseException) -> None:
        """An error came out of the step: nothing of it is applied, and its data is gone."""
        self.fail(error, step.where)
        self.watch.leave_step()
        self.leaving.drop_gradients()
        self.current = None
        assert self.source is not None
        self.source.defer_epoch_ends(step.epochs_before + step.ended_epochs)
        self.engine.write("abandoned", step=step.number, data=step.spans(), batches=len(step.draws))
        if isinstance(error, OutOfMemoryError):
            self.tell(self.snapshots.release_device_memory())

    def discard_remainder(self, step: Step) -> None:
        """The data ended inside the step: fewer batches than it takes are left, and are not trained on."""
        self.watch.leave_step()
        self.leaving.drop_gradients()
        assert self.source is not None
        self.source.defer_epoch_ends(step.epochs_before + step.ended_epochs)
        self.rewind(step)
        step.result = Outcome(status=Status.DISCARDED, signal=self._unread(step))
        if self.pending is not None and not self.settling.settle(step):
            self.engine.record_outcome(step.result)  # the step before was undone, so there is data again
            return
        self.engine.write("remainder", step=step.number, data=step.spans(), batches=len(step.draws))
        self.serving.ended_epochs = 0
        self.source.emit_epoch_ends()
        self.step_epochs(self.serving.ended_epochs)
        self.exhausted = True

    def _discard(self, step: Step) -> None:
        """The step before was undone, so this one ran on what was not to be."""
        self.leaving.drop_gradients()
        step.result = Outcome(status=Status.DISCARDED, signal=self._unread(step))
        self.engine.record_outcome(step.result)

    def _unread(self, step: Step) -> Signal:
        return Signal(step=step.number, attempt=step.attempt, loss=step.loss, data=step.spans(), seconds=step.seconds)

    # ---- settling

    def flush(self) -> bool:
        """Settle the pending step now, which waits for the device. False: the data was put back."""
        if self.pending is None:
            return True
        served = self.current if self.current is not self.pending else None
        if served is not None and served.is_open:
            raise StepError(
                f"step {self.pending.number} cannot be settled inside step {served.number}, which runs on what it left: "
                "evaluate, save, declare shifts and read step.outcome between two steps, or in on_step_end"
            )
        if served is not None and served.entered:
            served = None
        settled = self.settling.settle(served)
        if not settled:
            self.exhausted = False
            if served is not None:
                self.serving.serve_anew(served)
        return settled

    def step_schedulers(self, interval: Any, metric: float | None = None) -> None:
        before = self.state.optimizers.lr()
        self.state.schedulers.step(interval, metric)
        after = self.state.optimizers.lr()
        if before > 0 and after > LR_JUMP * before and self.step > self.config.detect.warmup_steps:
            self.engine.shift(f"the schedule moved the LR from {before:.4g} to {after:.4g}", self.step)

    def report_eval(self, metric: float) -> None:
        self.flush()
        metric = self.meeting.share_metric(metric)
        self.step_schedulers("eval", metric)
        self.hooks.call("on_eval_end", metric)

    # ---- going back

    def rewind(self, step: Step) -> None:
        """Random streams and buffers as they were before the step's data was loaded, and the schedule with them."""
        assert self.source is not None
        rng = self.source.rewind_to(step.draws[0]) if step.draws else None
        if rng is not None:
            self.rng.restore(rng)
        self.state.buffers.restore(step.buffers)
        if step.schedule is not None:
            self.state.restore_schedule(step.schedule)

    def returned_to(self, step: int) -> None:
        """A snapshot has been put back: what was counted since is undone."""
        self.step, self.attempt = step, 1
        self.settling.returned()
        self.checking.returned_to(step)
        for number in [n for n in self.positions if n > step]:
            del self.positions[number]
        clear_gradients(self.leaving.parameters)

    # ---- what the loop asks for

    def stop(self, reason: str) -> None:
        """One process stops; of several, all do, at the step at which they hear of it."""
        if self.meeting.several:
            self.meeting.ask("stop", reason)
        else:
            self.stopping = reason
            self.engine.write("stop_requested", step=self.step, reason=reason)

    def expect_shift(self, reason: str) -> None:
        if self.meeting.several:
            self.meeting.ask("shift", reason)
        else:
            self.flush()
            self.engine.shift(reason, self.step)

    def quarantine(self, samples: Iterable[int], reason: str) -> None:
        if self.meeting.several:
            self.meeting.ask("quarantine", {"samples": [int(i) for i in samples], "reason": reason})
        else:
            self.leave_samples_out(samples, reason)

    def leave_samples_out(self, samples: Iterable[int], reason: str, rank: int | None = None) -> None:
        added = self.records.quarantine.add_samples(samples, reason)
        self.engine.write("quarantine", durable=True, samples=added, reason=reason, rank=rank)

    # ---- telling

    def excluded(self, span: Span, batches: int, reason: str) -> None:
        self.engine.write("quarantine", durable=True, spans=[span], batches=batches, reason=reason)

    def tell(self, message: str | None) -> None:
        """Something works less well than asked: on record and in the log."""
        if message is not None:
            self.engine.write("note", step=self.step, message=message)
            log.warning("%s", message)


def _said_by_the_first(record: logging.LogRecord) -> bool:
    """What all ranks have agreed on needs saying once. Errors are each rank's own, and so is everything for a debugger."""
    return record.levelno >= logging.ERROR or log.isEnabledFor(logging.DEBUG)
