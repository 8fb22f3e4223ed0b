"""A run in progress: serves steps, lets them land or not, settles them, and keeps what can be returned to.

Leaving a step makes it pending. It settles before the next update, so that on a device the host never waits for work it
has only just enqueued; where the host decides, it settles at once. All that is found at settling is acted on by
`effects/`, which may put the run back and so make the step after it, already computed, void.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from holdfast.core.config import Config
from holdfast.core.detectors.base import Detector
from holdfast.core.engine import Engine
from holdfast.core.errors import InstabilityError, PolicyStop, RanksDisagree, SetupError, StepError
from holdfast.core.history import History
from holdfast.core.ports import Clock
from holdfast.core.shifts import LR_JUMP
from holdfast.core.types import Finding, Flag, Incident, Outcome, Plan, Signal, Skip, Span, Status
from holdfast.runtime import effects
from holdfast.runtime.buffers import Capture
from holdfast.runtime.checking import Checking
from holdfast.runtime.checkpoints import END, Checkpoints
from holdfast.runtime.data.fingerprint import Look
from holdfast.runtime.data.open import open_source
from holdfast.runtime.data.source import Position, Source
from holdfast.runtime.data.world import share_of
from holdfast.runtime.gate import Gate
from holdfast.runtime.hooks import Hooks
from holdfast.runtime.integrity import Replicas, Single
from holdfast.runtime.meeting import Meeting
from holdfast.runtime.norms import LocalNorms, Norm, NormAndClip
from holdfast.runtime.optimizers import clear_gradients
from holdfast.runtime.ranks import Alone, Ranks, Unwatched, Watch
from holdfast.runtime.records import Records
from holdfast.runtime.rng import Rng
from holdfast.runtime.sensing import Reading, sense
from holdfast.runtime.setup import devices_of
from holdfast.runtime.snapshots.keeper import Keeper
from holdfast.runtime.snapshots.tier import Tier
from holdfast.runtime.state import RunState
from holdfast.runtime.step import Step, discount
from holdfast.runtime.sync import GradientSync
from holdfast.runtime.update_size import UpdateSize
from holdfast.runtime.witness import Witness

log = logging.getLogger("holdfast")

_LOOK_AT_STREAKS = (4, 16)
_WEIGH_EVERY = 50


class Company(NamedTuple):
    """Whom a run trains with, and how it deals with them."""

    ranks: Ranks = Alone()
    norms: NormAndClip = LocalNorms()
    replicas: Replicas = Single()
    watch: Callable[[], Watch] = Unwatched
    neighbours: int = 1
    """how many ranks share this host's memory"""


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
        tier: Tier | None = None,
        company: Company | None = None,
    ) -> None:
        self.state, self.config, self.clock = state, config, clock
        self.hooks, self.records = hooks, records
        company = company or Company()
        self.ranks, self.norms = company.ranks, company.norms
        self.meeting = Meeting(self, company.ranks)
        self._make_watch = company.watch
        self.watch: Watch = Unwatched()
        self.engine = Engine(config, detectors=detectors, on_instability=self._consult)
        devices = devices_of(state.modules)
        self.rng = Rng(devices)
        self.armed = config.recover.mode == "heal"
        on_cuda = any(d.type == "cuda" for d in devices) and all(map(company.ranks.carries, devices))
        self.gate = Gate(state.optimizers, state.scaler, config.detect.gate, self.armed, on_cuda, norms=self.norms)
        self.history = History()
        self.checkpoints = Checkpoints(self, tier)
        self.keeper = Keeper(
            config.snapshot, state, self.rng, self.checkpoints, company.ranks, neighbours=company.neighbours
        )
        self.checking = Checking(self, company.replicas)
        self.sync = GradientSync(state.given)
        self.witness = Witness(state.modules, enabled=self.meeting.several)
        self.source: Source | None = None
        self.step = 0
        """steps committed"""
        self.pending: Step | None = None
        self.current: Step | None = None
        self.positions: dict[int, Position] = {}
        """where the data of each step began, as far back as a rollback could want"""
        self.stopping: str | None = None
        self.exhausted = False
        self._clip = clip
        self._loader: Any = None
        self._parameters: list[Tensor] = []
        self._counts: list[int] = []
        self._update_size = UpdateSize(state.optimizers)
        self._attempt = 1
        self._ended_epochs = 0
        self._overflows = 0
        self._ours = False
        self._told: BaseException | None = None
        """the error that the other ranks have been told of"""

    # ---- beginning and end

    def open(self, about: dict[str, Any]) -> None:
        self.watch = self._make_watch()
        self.watch.begin()
        try:
            self.records.open(self.engine, about, self.history)
            try:
                self.checkpoints.open(self.records.identity)
            except BaseException:
                self.records.close()
                raise
        except BaseException as error:
            self.fail(error, "opening the run directory")
            self.watch.close()
            raise
        self.state.optimizers.forbid_foreign_steps(lambda: self._ours, self._foreign_step)

    def attach(self, loader: Iterable[Any], epochs: int | None, accumulate: int, max_steps: int | None) -> None:
        """Take batches from `loader` from here on. The same loader again goes on where it stands."""
        self.flush()
        self._same_loop(loader, epochs, accumulate, max_steps)
        self.exhausted = False
        if self.source is not None and loader is self._loader:
            self.source.extend(epochs)
            return
        epoch = 0 if self.source is None else self.source.next_epoch
        source = open_source(
            loader,
            rng=self.rng,
            quarantine=self.records.quarantine,
            epochs=epochs,
            first_epoch=epoch,
            on_epoch_end=self._epoch_ended,
            before_iter=self.keeper.idle,
            on_exclusion=self._excluded,
            in_step=self.meeting.several,
        )
        first = self.source is None
        if self.source is not None:
            self.source.close()
            self.engine.shift("another loader", self.step)
        elif not source.exact:
            self.engine.write(
                "note", step=0, message="the loader has no resumable position: its data is drawn and dropped"
            )
        self.source, self._loader = source, loader
        self.positions.clear()
        trusted = True
        if first:
            trusted = self.checkpoints.resume()
            effects.interventions.again(self)
        self.tell(self.keeper.begin(self.step, trusted=trusted))

    def _same_loop(self, loader: Iterable[Any], epochs: int | None, accumulate: int, max_steps: int | None) -> None:
        """Ranks that take a different number of steps would wait for each other at the end: refused at the beginning."""
        if not self.meeting.several:
            return
        try:
            batches: int | None = len(loader)  # type: ignore[arg-type]
        except Exception:  # an iterable has no length, or one that is not known
            batches = None
        share = share_of(getattr(loader, "sampler", None))
        about = {"accumulate": accumulate, "max_steps": max_steps, "epochs": epochs, "batches of the loader": batches}
        why = self.meeting.same_loop({**about, "share": list(share)})
        if why is not None:
            raise SetupError(
                f"steps(): the ranks' loops differ: {why}; ranks step together, so give each the same, with a "
                "DistributedSampler (which deals out equally many samples to each) for the data"
            )

    def _consult(self, incident: Incident) -> Plan | None:
        """The user's hooks; of several ranks, the first one's."""
        own = self.hooks.plan(incident)
        return self.meeting.share_plan(incident, own) if self.hooks.plans else None

    def fail(self, error: BaseException, where: str) -> None:
        """This rank cannot go on while the others may be waiting for it: they are told. What all ranks come to at the same
        step is no failure of one."""
        agreed = isinstance(error, PolicyStop | InstabilityError | RanksDisagree)
        if self.meeting.several and self._told is None and not agreed:
            self._told = error
            number = self.step + 1 if self.current is None else self.current.number
            self.checkpoints.abort()
            self.watch.failed(error, number, where)

    def close(self, error: BaseException | None) -> None:
        """Settle what is pending, write the end down, let everything go. Never hides the user's own error."""
        trouble: BaseException | None = None
        if error is not None:
            self.fail(error, "between two steps")
        served, self.current = self.current, None
        try:
            if self._told is None:  # with ranks that are going down nothing more can be settled
                if self.flush():
                    self.unserve(served)
                self.watch.ended(self.step)
                self._last_save(error)
        except Exception as problem:  # ours, or out of a hook of the user's: what is held is let go first
            trouble = problem
            self.fail(problem, "at the end of the run")
        parts: tuple[Callable[[], None], ...] = (
            lambda: self.sync.before_forward(last=True),
            self.witness.close,
            self.state.optimizers.release,
            self.checkpoints.close,
            self.keeper.close,
            self._close_source,
            lambda: self._write_end(error or trouble),
            self.records.close,
            self.watch.close,
        )
        for part in parts:
            try:
                part()
            except Exception as problem:  # a disk that fails: the rest is let go all the same
                trouble = trouble or problem
        if trouble is not None and error is None:
            raise trouble

    def _close_source(self) -> None:
        self._loader = None
        if self.source is not None:
            self.source.close()

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

    # ---- serving

    def serve(self, accumulate: int) -> Step | None:
        """The next step, or None when the data has ended."""
        assert self.source is not None
        while True:
            buffers = self._next_begins()
            try:
                first = self.source.draw()
                break
            except StopIteration:
                if self.pending is None:
                    self._step_epochs(self._ended_epochs)
                    return None
                # The last step settles first; it may be undone. Then the data ends again, or there is more of it.
                self.source.untell(self._ended_epochs)
                self.flush()
        number = self.step + 1 + (self.pending is not None)
        attempt = 1 if self.pending is not None else self._attempt
        step = Step(self, number, attempt, accumulate, first, buffers)
        step.look = Look(fingerprint=self.config.detect.watch)
        if self.pending is None:
            self._step_epochs(self._ended_epochs)
        else:
            step.epochs_before = self._ended_epochs
        self.current = step
        return step

    def in_time(self) -> None:
        """Between two steps: a teacher or an average that on_step_end moves must move before the next forward sees it."""
        if self.hooks.in_time:
            self.flush()

    def _next_begins(self) -> Capture:
        """What a snapshot of the step before still lacks, and the buffers to come back to."""
        assert self.source is not None
        buffers = self.state.buffers.capture()
        self.tell(self.keeper.next_begins(self.rng.capture, buffers, self.source, self.engine.state_dict))
        self._ended_epochs = 0
        return buffers

    def _serve_anew(self, step: Step) -> None:
        """The step has been served but not entered, and the one before it was undone: other data, same object."""
        assert self.source is not None
        step.buffers = self._next_begins()
        try:
            step.draws = [self.source.draw()]
        except StopIteration:
            step.draws, step.data_ended = [], True
        step.number, step.attempt, step.epochs_before = self.step + 1, self._attempt, 0
        self._step_epochs(self._ended_epochs)

    def unserve(self, step: Step | None) -> bool:
        """A step that was served and never entered gives its data back: the run stands right before it."""
        assert self.source is not None or step is None
        if step is None or step.entered or not step.draws or not self.source.exact:  # type: ignore[union-attr]
            return False
        self._step_epochs(step.epochs_before)
        step.epochs_before = 0
        self.rewind(step)
        self.source.seek(step.draws[0].begin)  # type: ignore[union-attr]
        return True

    def serve_again(self, step: Step) -> None:
        """What `unserve` has taken back is drawn anew."""
        self._serve_anew(step)

    def _follow_groups(self) -> None:
        """A group added on the way (gradual unfreezing): its gradients are clipped and cleared like the others."""
        counts = [len(g["params"]) for o in self.state.optimizers.all for g in o.param_groups]
        if counts != self._counts:
            self._counts, self._parameters = counts, self.state.trained()
            self._update_size.forget()

    def draw_more(self, step: Step) -> bool:
        """One more batch for a step in progress; False where the data has ended inside it."""
        assert self.source is not None
        self._ended_epochs = 0
        try:
            step.draws.append(self.source.draw())
        except StopIteration:
            step.data_ended = True
        step.ended_epochs += self._ended_epochs
        return not step.data_ended

    def _epoch_ended(self, epoch: int) -> None:
        self._ended_epochs += 1

    def _step_epochs(self, count: int) -> None:
        for _ in range(count):
            self._step_schedulers("epoch")

    # ---- leaving

    def entered(self, step: Step) -> None:
        """The user's forward and backward begin: the other ranks' collectives are in them."""
        self.watch.in_step(step.number)

    def leave(self, step: Step) -> None:
        """A complete step: measure it, settle the one before, let its update land or not."""
        try:
            self._leave(step)
        except BaseException as error:
            self.fail(error, "the update")
            raise
        self.watch.in_step(None)

    def _leave(self, step: Step) -> None:
        self._follow_groups()
        parameters, scaler, optimizers = self._parameters, self.state.scaler, self.state.optimizers
        if (factor := step.correction()) != 1.0:
            discount(parameters, factor)
        found = {} if scaler is None else scaler.unscale(optimizers.outer)
        clipping = self.state.interventions.max_norm(self._clip) is not None
        norm = self.norms.of_gradients(parameters, to_clip=clipping)
        loss = step.mean_loss()
        assert loss is not None, "a complete step has a loss"
        if self.pending is not None and not self.settle(step):
            self._discard(step)
            return
        if self.pending is None and step.epochs_before:
            self._step_epochs(step.epochs_before)
        if step.ended_epochs and self.state.schedulers.has("epoch"):
            # An epoch ended between two of its batches: as in a plain loop, the schedule moves before the update.
            step.schedule = self.state.schedule()
            self._step_epochs(step.ended_epochs)
        step.number, step.attempt = self.step + 1, self._attempt
        self.watch.ping(step.number)
        limits = self.engine.limits()
        checks = self.checking.before_update(step.number)
        flags = [found.get(id(o), loss.new_zeros(())) for o in optimizers.outer] if scaler is not None else []
        agreed = self.meeting.agree(step, loss, norm, flags, limits, checks)
        edges, own = agreed.limits, norm.value if norm.whole else agreed.norm
        if self.meeting.several and not self.gate.on_device and self.meeting.read(step, _to_host(agreed.extra)):
            edges = limits = self.engine.limits()
        if self.meeting.several and scaler is not None:
            found = {id(o): flag for o, flag in zip(optimizers.outer, agreed.found, strict=True) if id(o) in found}
            scaler.agree(found)
        if (unit := step.unit_total()) is not None and agreed.weight is not None:
            share = unit * self.ranks.size / agreed.weight
            discount(parameters, share.to(loss.dtype))
            agreed, own = agreed._replace(norm=agreed.norm * share), own * share.to(own.dtype)
        scale = None if scaler is None else scaler.tensor()
        sensed = sense(agreed.loss, agreed.norm, edges, _any(agreed.found), scale, agreed.differs)
        sensed = sensed._replace(update=agreed.update, weights=agreed.weights, extra=agreed.extra)
        step.loss_limit, step.grad_limit = limits
        step.clip = self.state.interventions.max_norm(self._clip)
        factor = self.state.interventions.factor()
        step.lr = optimizers.lr() * factor
        self.keeper.before_update()
        with self.updating():
            step.passage = self.gate.apply(sensed, parameters, found, step.clip, factor, own=own)
        self.checking.after_update(step.number)
        clear_gradients(parameters)
        self.pending = step
        if self.gate.on_device:
            if not self.hooks.in_time:
                self.tell(self.keeper.updated(step.number))
        else:
            self.settle(None)

    @property
    def scaled_optimizers(self) -> int:
        """How many optimizers a loss scaler looks at."""
        return 0 if self.state.scaler is None else len(self.state.optimizers.outer)

    def sense_update(self, loss: Tensor) -> Tensor | None:
        return self._update_size.sense(loss.device) if self.config.detect.update_spike else None

    def sense_update_share(self, loss: Tensor) -> tuple[Tensor, float] | None:
        """This rank's part of the update's size. The optimizer's state comes into being on all ranks at once."""
        return self._update_size.shares(loss.device) if self.config.detect.update_spike else None

    def sense_weights(self, step: Step, loss: Tensor) -> Norm | None:
        """Now and then: the weights as the step found them."""
        due = self.config.detect.watch and step.number % _WEIGH_EVERY == 0
        return self.norms.of_weights(self._parameters, loss.device) if due else None

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Inside, `optimizer.step()` is ours."""
        self._ours = True
        try:
            yield
        finally:
            self._ours = False

    def _foreign_step(self) -> Exception:
        return StepError(
            "optimizer.step() was called while the guard is in charge of it: remove your own optimizer.step(), "
            "scaler.step() and scheduler.step(); leaving `with step:` clips, steps and schedules (clip_grad_norm=, "
            "scaler= and scheduler= are arguments of Guard)"
        )

    def abandon(self, step: Step, error: BaseException) -> None:
        """An error came out of the step: nothing of it is applied, and its data is gone."""
        self.fail(error, step.where)
        self.watch.in_step(None)
        self._drop_gradients()
        self.current = None
        assert self.source is not None
        self.source.untell(step.epochs_before + step.ended_epochs)
        self.engine.write("abandoned", step=step.number, data=_spans(step), batches=len(step.draws))

    def discard_remainder(self, step: Step) -> None:
        """The data ended inside the step: fewer batches than it takes are left, and are not trained on."""
        self._drop_gradients()
        assert self.source is not None
        self.source.untell(step.epochs_before + step.ended_epochs)
        self.rewind(step)
        step.result = Outcome(status=Status.DISCARDED, signal=self._unread(step))
        if self.pending is not None and not self.settle(step):
            self.engine.became(step.result)  # the step before was undone: there is data again, the step's own with it
            return
        self.engine.write("remainder", step=step.number, data=_spans(step), batches=len(step.draws))
        self._ended_epochs = 0
        self.source.tell()
        self._step_epochs(self._ended_epochs)
        self.exhausted = True

    def _discard(self, step: Step) -> None:
        """The step before was undone, so this one ran on what was not to be."""
        self._drop_gradients()
        step.result = Outcome(status=Status.DISCARDED, signal=self._unread(step))
        self.engine.became(step.result)

    def _drop_gradients(self) -> None:
        self._follow_groups()
        clear_gradients(self._parameters)
        if self.state.scaler is not None:
            self.state.scaler.leave()

    def _unread(self, step: Step) -> Signal:
        return Signal(step=step.number, attempt=step.attempt, loss=step.loss, data=_spans(step), seconds=step.seconds)

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
        settled = self.settle(served)
        if not settled:
            self.exhausted = False
            if served is not None:
                self._serve_anew(served)
        return settled

    def settle(self, following: Step | None) -> bool:
        """Find out what became of the pending step and act on it. False: the data was put back; `following` is void."""
        step, self.pending = self.pending, None
        assert step is not None and step.passage is not None
        reading = step.passage.read()
        self.meeting.read(step, reading.extra)
        signal = self.meeting.over_all(self._signal(step, reading), step)
        vetoed = bool(reading.flags) and self.armed
        if vetoed or signal.overflow:
            step.passage.undo_first_touch(overflow=not vetoed)
            self.checking.forget()
        step.origin = self.meeting.blame(step, signal)
        origin = None if step.origin is None else step.origin.evidence
        plan = self.engine.judge(
            signal, [*self._look_deeper(step, signal), *self.checking.findings(step, signal)], origin
        )
        self.meeting.decided(signal, plan)
        if plan is None or not plan.actions:
            if vetoed:
                return effects.skip.perform(self, step, following, signal, plan, Skip())
            self.stands(step, signal, healthy=plan is None or plan.by != "observe")
            return True
        self.keeper.unhealthy()
        self.checkpoints.unhealthy()
        return effects.carry_out(self, step, following, signal, plan, vetoed)

    def stands(self, step: Step, signal: Signal, healthy: bool = True) -> None:
        """Nothing undoes the step: its update has landed, or the loss scaler kept it from landing."""
        if signal.overflow:
            self._overflowed(step, signal)
        else:
            self._commit(step, signal, healthy)

    def _signal(self, step: Step, reading: Reading) -> Signal:
        return Signal(
            step=step.number,
            attempt=step.attempt,
            loss=reading.loss,
            grad_norm=reading.grad_norm,
            lr=step.lr,
            loss_scale=reading.loss_scale,
            update_rms=reading.update_rms,
            weight_norm=reading.weight_norm,
            batch=None if step.look is None else step.look.batch,
            clip=step.clip,
            flags=reading.flags,
            overflow=reading.overflow,
            loss_limit=step.loss_limit,
            grad_limit=step.grad_limit,
            data=_spans(step),
            samples=step.samples,
            length=None if step.look is None else step.look.length,
            seconds=step.seconds,
        )

    def _look_deeper(self, step: Step, signal: Signal) -> list[Finding]:
        """Is it the batch, or was the state broken before it? Asked only when something is wrong already."""
        self._overflows = self._overflows + 1 if signal.overflow else 0
        nonfinite = signal.flags & (Flag.LOSS_NONFINITE | Flag.GRAD_NONFINITE)
        asked = self.config.detect.nonfinite and (nonfinite or self._overflows in _LOOK_AT_STREAKS)
        name = self.state.nonfinite(step.buffers) if asked else None
        onset, how = signal.step - 1, "found when the step was not finite"
        if name is None and not self.meeting.several and (alarm := self.keeper.take_alarm()) is not None:
            name, onset, how = alarm.tensor, alarm.step, "found in a snapshot"
        if name is None and not self.meeting.alarmed and not (asked and self.meeting.several):
            return []
        return self.meeting.broken_state(name, onset, how, signal)

    def _commit(self, step: Step, signal: Signal, healthy: bool) -> None:
        self.step += 1
        assert self.step == signal.step, "committed steps are numbered without gaps"
        self._attempt = 1
        self.positions[self.step] = step.draws[0].begin
        before = self.state.interventions.factor()
        self._step_schedulers("step")
        self.state.interventions.commit()
        self.meeting.weigh(step)
        if (after := self.state.interventions.factor()) > LR_JUMP * before:
            self.engine.shift(f"the LR returned from {before:.4g} to {after:.4g} of its schedule", self.step)
        if len(self.history.turns) > self.state.interventions.turns:
            effects.interventions.again(self)
        if healthy:
            if self.engine.commit(signal) is not None:
                self.checking.incident_closed()
            self.keeper.healthy(self.step)
            self.checkpoints.healthy(self.step)
        step.result = Outcome(status=Status.COMMITTED, signal=signal)
        self.records.metrics(step.result)
        self.hooks.call("on_step_end", step.result)
        self.keeper.committed(self.step, self.engine.state_dict)
        oldest = self.keeper.oldest_position()
        if oldest is not None and self.step % 16 == 0:
            self._forget_before(oldest)

    def _forget_before(self, oldest: tuple[int, Position]) -> None:
        assert self.source is not None
        self.source.forget_before(oldest[1])
        for number in [n for n in self.positions if n < oldest[0]]:
            del self.positions[number]

    def _overflowed(self, step: Step, signal: Signal) -> None:
        """As torch does it: data, RNG and buffers are consumed, the scale has backed off, the schedule stays."""
        self.keeper.not_committed()
        self._attempt += 1
        step.result = Outcome(status=Status.OVERFLOWED, signal=signal)
        self.engine.became(step.result, loss_scale=signal.loss_scale)
        self.records.metrics(step.result)

    def not_committed(self, step: Step, outcome: Outcome, **fields: Any) -> None:
        """An effect has dealt with the step in another way than committing it."""
        self._attempt += 1
        step.result = outcome
        self.engine.became(outcome, **fields)
        self.records.metrics(outcome)

    def _step_schedulers(self, interval: Any, metric: float | None = None) -> None:
        before = self.state.optimizers.lr()
        self.state.schedulers.step(interval, metric)
        after = self.state.optimizers.lr()
        if before > 0 and after > LR_JUMP * before and self.step > self.config.detect.warmup_steps:
            self.engine.shift(f"the schedule moved the LR from {before:.4g} to {after:.4g}", self.step)

    def report_eval(self, metric: float) -> None:
        self.flush()
        metric = self.meeting.share_metric(metric)
        self._step_schedulers("eval", metric)
        self.hooks.call("on_eval_end", metric)

    # ---- going back

    def rewind(self, step: Step) -> None:
        """Random streams and buffers as they were before the step's data was loaded, and the schedule with them."""
        assert self.source is not None
        rng = self.source.rewound_to(step.draws[0]) if step.draws else None
        if rng is not None:
            self.rng.restore(rng)
        self.state.buffers.restore(step.buffers)
        if step.schedule is not None:
            self.state.reschedule(step.schedule)

    def returned_to(self, step: int) -> None:
        """A snapshot has been put back: what was counted since is undone."""
        self.step, self._attempt, self._overflows = step, 1, 0
        self.checking.returned_to(step)
        for number in [n for n in self.positions if n > step]:
            del self.positions[number]
        clear_gradients(self._parameters)

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

    def _excluded(self, span: Span, batches: int, reason: str) -> None:
        self.engine.write("quarantine", durable=True, spans=[span], batches=batches, reason=reason)

    def tell(self, message: str | None) -> None:
        """Something works less well than asked: on record and in the log."""
        if message is not None:
            self.engine.write("note", step=self.step, message=message)
            log.warning("%s", message)


def _spans(step: Step) -> tuple[Span, ...]:
    """The step's stretches of data, neighbours joined."""
    joined: list[Span] = []
    for span in (d.span for d in step.draws):
        if joined and joined[-1].epoch == span.epoch and joined[-1].stop == span.start:
            joined[-1] = Span(span.epoch, joined[-1].start, span.stop)
        else:
            joined.append(span)
    return tuple(joined)


def _to_host(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.cpu()


def _any(found: Sequence[Tensor]) -> Tensor | None:
    """Whether the scaler found Inf or NaN for any optimizer; None without a scaler."""
    total: Tensor | None = None
    for flag in found:
        total = flag if total is None else total + flag
    return total
