"""The step pipeline, top to bottom: draw, the user's forward and backward, measure, settle the step before, agree, gate.

`submit` makes a step pending. It settles before the next update, so that on a device the host never waits for work it has
just enqueued; when the host decides, it settles at once. Settling judges the step, then commits it or recovers. A recovery
may undo the step and so make the one after it, already computed, void.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from time import monotonic_ns
from typing import Any, NamedTuple

import msgspec
from torch import OutOfMemoryError, Tensor, float64, zeros_like

from holdfast.core.base.errors import InstabilityError, PolicyStop, RanksDisagree, Shutdown, StepError
from holdfast.core.base.types import Finding, Flag, Outcome, Plan, Signal, Status
from holdfast.core.decide.engine import Limits
from holdfast.core.detectors.expected_shifts import LR_JUMP
from holdfast.core.hang.heartbeat import BACKWARD, COLLECTIVE, DATA, FORWARD, OPTIMIZER, SAVE, USER
from holdfast.runtime import effects
from holdfast.runtime.agree.attribution import describe_data
from holdfast.runtime.agree.coordinator import RankCoordinator
from holdfast.runtime.agree.rows import AgreedStep, HostFields, LocalMeasurements
from holdfast.runtime.agree.step_timer import StepTimer
from holdfast.runtime.checkpoint.manager import CheckpointManager
from holdfast.runtime.context import Context
from holdfast.runtime.data.feeder import Feeder
from holdfast.runtime.data.fingerprint import BatchFingerprint
from holdfast.runtime.data.pieces import FailedPart
from holdfast.runtime.data.source import Draw
from holdfast.runtime.effects import RecoveryParts, Situation, Transition
from holdfast.runtime.effects.attempt import StepAttempt
from holdfast.runtime.effects.base import rewind
from holdfast.runtime.incidents.evidence import StepEvidence
from holdfast.runtime.incidents.watch import IncidentWatch
from holdfast.runtime.integrity.first_steps import FirstSteps
from holdfast.runtime.integrity.monitor import IntegrityMonitor
from holdfast.runtime.integrity.spoilt_statistics import find_spoilt_statistics
from holdfast.runtime.ports.hang_watch import HangWatch
from holdfast.runtime.ports.ranks import LateWatchdog
from holdfast.runtime.ports.shutdown import ShutdownSignals
from holdfast.runtime.record.memory_watch import MemoryWatch, save_snapshot
from holdfast.runtime.snapshots.manager import NonfiniteSnapshot, SnapshotManager
from holdfast.runtime.state.between_steps import BetweenSteps
from holdfast.runtime.state.buffers import NO_BUFFERS, BufferCapture
from holdfast.runtime.state.optimizers import clear_gradients
from holdfast.runtime.state.schedule import UnknownSchedulers
from holdfast.runtime.step.epoch_ends import EpochEnds
from holdfast.runtime.step.memory_retry import MemoryRetry
from holdfast.runtime.step.progress import Progress
from holdfast.runtime.step.turns import Turn
from holdfast.runtime.tensors.cuda_streams import StreamTracker
from holdfast.runtime.tensors.norms import GradientNorms, Norm, scale_gradients
from holdfast.runtime.tensors.sharded import zero_gradients
from holdfast.runtime.tensors.torch_private import drop_accumulated_gradients
from holdfast.runtime.update.gate import Gate
from holdfast.runtime.update.gradient_sync import GradientSync
from holdfast.runtime.update.local_grad_norms import LocalGradNorms
from holdfast.runtime.update.measurements import DeviceMeasurements
from holdfast.runtime.update.update_size import UpdateSize

log = logging.getLogger("holdfast")

_WEIGHT_NORM_EVERY = 50
_FORGET_EVERY = 16
_STATE_CHECK_AT_OVERFLOWS = (4, 16)
_NONFINITE = int(Flag.LOSS_NONFINITE | Flag.GRAD_NONFINITE)


@dataclass(frozen=True)
class Parts:
    """The stages of a pipeline. Built once by `guard/build.py`."""

    feeder: Feeder
    gate: Gate
    norms: GradientNorms
    update_size: UpdateSize | None
    local_grad_norms: LocalGradNorms
    gradient_sync: GradientSync
    coordinator: RankCoordinator
    snapshots: SnapshotManager
    checkpoints: CheckpointManager
    incidents: IncidentWatch
    integrity: IntegrityMonitor
    first_steps: FirstSteps
    unknown_schedulers: UnknownSchedulers
    streams: StreamTracker | None
    watchdog: LateWatchdog
    signals: ShutdownSignals
    hang_watch: HangWatch
    memory: MemoryWatch


class GradientStats(NamedTuple):
    """A step's loss and gradients as this rank measured them, on the device."""

    loss: Tensor
    norm: Norm
    found_inf: dict[int, Tensor]
    """the loss scaler's flag, by the optimizer's id"""


class GuardedPipeline:
    """Runs the steps of one guarded run. It is the only writer of `progress`."""

    def __init__(self, context: Context, parts: Parts, clip: float | None) -> None:
        self.context, self.parts, self.progress = context, parts, Progress()
        self.is_distributed = parts.coordinator.is_distributed
        self._timer = StepTimer(context.clock.monotonic, parts.local_grad_norms.span) if self.is_distributed else None
        self._is_armed = context.config.recover.mode == "heal"
        self._has_statistics = self._is_armed and bool(context.state.buffers.running_variances)
        self.averages_gradients = parts.gradient_sync.has_modules
        self.keeps_gradients = False
        self._settles_at_once = False
        self.epoch_ends = EpochEnds(context, parts.feeder, parts.snapshots)
        self._clip = clip
        self._recovery = RecoveryParts(context, parts.feeder, parts.coordinator, parts.snapshots, parts.checkpoints)
        self.oom = MemoryRetry(self._recovery, parts.gradient_sync)
        self._parameters: list[Tensor] = []
        self._parameter_ids: frozenset[int] | None = None
        self._emptied: str | None = None
        """why the optimizers cannot train any more"""
        self._overflows = 0
        """overflowed attempts in a row"""
        self._next_evidence: StepEvidence | None = None
        """what is to watch the next attempt, which runs a bad step again"""
        self._watches_again = False
        """every attempt is watched: the run has returned from bad state"""
        self._first_steps: FirstSteps | None = parts.first_steps
        """None once the first steps are checked"""
        self._last_lr: float | None = None
        """the LR as the guard left it; None if the next update is to take any LR as it is"""
        self._turn = Turn(context.ranks, is_armed=self._is_armed)
        self.has_failed = False
        """this rank has reported to the others that it cannot continue"""
        self.on_next_commit: Callable[[], None] | None = None
        """called once, after the next committed step; another thread may set it"""
        self.gives_up: str | None = None
        """why the run must not be restarted after this failure"""
        self._signals = parts.signals
        self._has_announced_signal = False

    def open(self) -> None:
        """Note that the run is open."""
        self._turn.open()

    def end(self) -> None:
        """Note that the run is closed: another one may draw steps now."""
        self._turn.close()

    @property
    def is_forked(self) -> bool:
        """Return whether this process is a child of the one that opened the run."""
        return self._turn.is_forked

    def require_own_process(self) -> None:
        """Raise StepError in a forked child."""
        if self._turn.is_forked:
            self._turn.refuse_fork()

    def settle_at_once(self) -> None:
        """Settle every step when it is submitted: the driver acts on the outcome at once.

        A single process without a loss scaler may still submit the update before it waits for the numbers.
        """
        self._settles_at_once = True
        if self.is_distributed or self.context.state.scaler is not None:
            self.parts.gate.on_device = False

    def begin_loop(self, step: int, *, is_new_loader: bool) -> None:
        """Begin or continue a loop at `step` committed steps. Positions in another loader's data are forgotten."""
        self.progress.step, self.progress.exhausted, self._last_lr = step, False, None
        if is_new_loader:
            self.progress.positions.clear()

    def _enter_phase(self, phase: int) -> None:
        """Note which phase the training thread is in, as `Heartbeat.enter` does, without a call into another file."""
        beat = self.context.heartbeat
        beat.phase = phase
        beat.pack_into(beat.memory, next(beat.slots), phase, beat.step, monotonic_ns())

    # ---- 1. draw

    def draw_step(self, accumulate: int, max_steps: int | None = None) -> StepAttempt | None:
        """Return the next step with its first batch.

        None if the run was asked to stop, `max_steps` are committed, or the data has ended. Shutdown after a signal.
        """
        self.require_own_process()
        progress = self.progress
        self.parts.feeder.ended_epochs.clear()
        if not self._turn.may_draw:
            self._turn.take()
        if self.context.hooks.runs_between_steps:  # an average or a teacher moves before the next forward sees it
            self.flush()
        if max_steps is not None and progress.step + (progress.pending is not None) >= max_steps:
            self.flush()  # a pending step counts only once it has settled
        if self._signals.reason is not None:
            self._announce_signal(self._signals.reason)
        is_enough = max_steps is not None and progress.step >= max_steps
        if is_enough or progress.exhausted:
            return None
        if progress.stopping is not None:
            self._leave_if_signalled()
            return None
        if self.parts.snapshots.restorer.is_partial:
            raise StepError("the run's state was restored in part and could not be verified: start the process again")
        if self.parts.streams is not None:
            self.parts.streams.wait_for_last_stream()
        try:
            return self._draw_step(accumulate)
        except BaseException as error:
            self.report_failure(error, "the loader")
            raise

    def _announce_signal(self, reason: str) -> None:
        """Stop because of a signal; on several ranks, after the next step they agree on."""
        if self._has_announced_signal:
            return
        self._has_announced_signal = True
        if self.is_distributed:
            self.parts.coordinator.request("shutdown", reason)
        else:
            self._stop_for_signal(reason, self.progress.step)

    def _stop_for_signal(self, reason: str, step: int, rank: int | None = None) -> None:
        self.progress.stopping, self.progress.is_shutdown = reason, True
        self.context.engine.write("stop_requested", step=step, reason=reason, rank=rank)
        log.warning("holdfast: step %d: %s: the run ends and is saved", step, reason)

    def _leave_if_signalled(self) -> None:
        """Raise Shutdown if a signal is why the run stops."""
        if self.progress.is_shutdown:
            self.flush()
            raise Shutdown(self.progress.stopping or "a signal")

    def _draw_step(self, accumulate: int) -> StepAttempt | None:
        progress, feeder = self.progress, self.parts.feeder
        self.context.heartbeat.step = progress.step + 1
        self._enter_phase(DATA)
        while True:
            buffers = self._begin_step()
            if self.epoch_ends.is_due:
                self.note(self.epoch_ends.enter())
            draw, ended_epochs = self._draw()
            if draw is not None:
                break
            self.note(self.parts.snapshots.take_postponed())
            if progress.pending is None:
                self._end_epochs(ended_epochs)
                self._enter_phase(USER)  # an evaluation may follow
                return None
            # Settling the last step may undo it and requeue its data.
            feeder.source.defer_epoch_ends(ended_epochs)
            self.flush()
        is_behind_pending = progress.pending is not None
        inputs = BatchFingerprint(fingerprint=self.context.config.detect.advisory)
        number = progress.step + 1 + is_behind_pending
        attempt_number = 1 if is_behind_pending else progress.attempt
        attempt = StepAttempt(number, attempt_number, accumulate, [draw], buffers, inputs)
        if is_behind_pending:
            attempt.epochs_before = ended_epochs
        elif ended_epochs:
            self._end_epochs(ended_epochs)
        if self.oom.is_filling:
            self.oom.is_filling, attempt.is_filler = False, True
        progress.served = attempt
        return attempt

    def _draw(self) -> tuple[Draw | None, int]:
        """Return one batch, or None at the end of the data, and how many epochs ended right before it."""
        feeder, timer = self.parts.feeder, self._timer
        feeder.ended_epochs.clear()
        began = 0.0 if timer is None else timer.now()
        try:
            draw: Draw | None = feeder.source.draw()
        except StopIteration:
            draw = None
        if timer is not None:
            timer.add_data(began)
        return draw, len(feeder.ended_epochs)

    def _begin_step(self) -> BufferCapture:
        """Capture the buffers, and complete a snapshot of the step before with random state and data position."""
        context, parts = self.context, self.parts
        buffers = context.state.buffers.capture() if context.state.buffers.places else NO_BUFFERS
        message = parts.snapshots.on_step_begin(
            context.rng.capture,
            buffers,
            parts.feeder.source,
            context.engine.state_dict,
            may_postpone=self._settles_at_once or not parts.gate.on_device,
        )
        if message is not None:
            self.note(message)
        return buffers

    def draw_batch(self, attempt: StepAttempt) -> bool:
        """Draw one more batch for a step in progress. Return False if the data ended inside it."""
        self.require_own_process()
        self._enter_phase(DATA)
        if attempt.evidence is not None:
            attempt.evidence.pause(True)
        draw, ended_epochs = self._draw()
        if attempt.evidence is not None:
            attempt.evidence.pause(False)
        self._enter_phase(FORWARD if draw is not None else USER)
        attempt.epochs_inside += ended_epochs
        if draw is None:
            attempt.data_ended = True
        else:
            attempt.draws.append(draw)
            attempt.inputs.add(draw.batch)
        return draw is not None

    def redraw(self, attempt: StepAttempt) -> None:
        """Give an attempt that was drawn but not entered its data again: the step before it was undone."""
        attempt.buffers = self._begin_step()
        draw, ended_epochs = self._draw()
        attempt.draws, attempt.data_ended = ([], True) if draw is None else ([draw], False)
        attempt.number, attempt.attempt, attempt.epochs_before = self.progress.step + 1, self.progress.attempt, 0
        self._end_epochs(ended_epochs)

    def return_data(self, attempt: StepAttempt | None) -> bool:
        """Put the data of an attempt that has no update back. Return whether there was any to put back."""
        feeder = self.parts.feeder
        if attempt is None or attempt.phase == "left" or not attempt.draws or not feeder.source.exact:
            return False
        if attempt.is_open and attempt.data_ended:  # the loop has done with the batches left over what it does
            return False
        self._end_epochs(attempt.epochs_before)
        attempt.epochs_before = 0
        rewind(self._recovery, attempt)
        feeder.source.seek(attempt.draws[0].begin)
        return True

    # ---- 2. the user's forward and backward

    def enter(self, attempt: StepAttempt) -> None:
        """Note that the user's forward and backward begin."""
        attempt.phase = "open"
        self._enter_phase(FORWARD)
        for draw in attempt.draws:  # none if settling the step before has redrawn it at the end of the data
            attempt.inputs.add(draw.batch)
        # As it is now: settling the step before may change it meanwhile.
        attempt.unit = self.context.state.interventions.weight_unit
        if self.parts.streams is not None:
            self.parts.streams.wait_for_last_stream()
        if self._watches_again and self._next_evidence is None:
            self._next_evidence = self.parts.incidents.watch_again(attempt.number)
        if self._next_evidence is not None:
            attempt.evidence, self._next_evidence = self._next_evidence.begin(attempt.buffers), None
        if self.is_distributed and not attempt.is_filler:  # this rank is in that step already
            self.parts.watchdog.get().enter_step(attempt.number)
        if self._timer is not None:
            self._timer.enter()

    def before_forward(self, *, is_last: bool) -> None:
        """Have DDP and FSDP2 average gradients in the backward of the step's last part, and in no other."""
        self.parts.gradient_sync.before_forward(is_last=is_last)

    def backward(self, attempt: StepAttempt, value: Tensor, factor: float) -> None:
        """Run the scaled backward of one part. A factor of 0 adds nothing to any gradient."""
        if factor == 0:
            if self.is_distributed:  # the other ranks wait for this rank's gradients in the collective
                with ExitStack() as stack:
                    for _, module in self.context.state.modules:
                        stack.enter_context(zero_gradients(module))
                    self._backward(attempt, value * 0.0, counts=False)
            return
        assert attempt.parts is not None
        if factor != 1.0:
            value = value * (factor / attempt.parts)
        elif attempt.parts != 1:
            value = value / attempt.parts
        self._backward(attempt, value, counts=True)

    def _backward(self, attempt: StepAttempt, value: Tensor, *, counts: bool) -> None:
        scaler = self.context.state.scaler
        attempt.running = "backward"
        self._enter_phase(BACKWARD)
        first_steps = self._first_steps if counts else None
        if first_steps is not None:
            self._follow_param_groups()
            first_steps.before_backward(attempt, self._parameters)
        (value if scaler is None else scaler.scale(value)).backward()  # type: ignore[no-untyped-call]
        if self.is_distributed:
            self.parts.local_grad_norms.finish_backward(counts)
        if first_steps is not None:
            first_steps.after_backward(self._parameters)
        if self.parts.snapshots.postponed is not None and attempt.evidence is None:  # it would observe the copies
            self.note(self.parts.snapshots.take_postponed())
        attempt.running = "forward"
        self._enter_phase(FORWARD)

    def after_backward(self, attempt: StepAttempt) -> None:
        """Note that a backward of the driver's own is over."""
        if self.is_distributed:
            self.parts.local_grad_norms.finish_backward()
        if self.parts.snapshots.postponed is not None and attempt.evidence is None:  # it would observe the copies
            self.note(self.parts.snapshots.take_postponed())

    # ---- 3. measure, settle the step before, agree, gate, submit

    def submit(self, attempt: StepAttempt) -> None:
        """Take a complete step: its update lands, or does not. Its outcome is known once it has settled.

        StepError if it is one of the first steps, and its gradients were dropped or reached other parameters.
        """
        self.require_own_process()
        self._enter_phase(OPTIMIZER)
        if attempt.evidence is not None:
            attempt.evidence.end_backward()
        if self.parts.snapshots.postponed is not None:
            self.note(self.parts.snapshots.take_postponed())
        if self._first_steps is not None:
            try:
                self._require_parameters()
                self._first_steps.check_gradients(attempt, self._parameters)
            except StepError as error:
                self.abandon(attempt, error)
                raise
        attempt.phase = "left"
        if self.parts.streams is not None:
            self.parts.streams.wait_for_last_stream()
        try:
            self._submit(attempt)
        except BaseException as error:
            self.report_failure(error, "the update")
            raise
        finally:
            if attempt.evidence is not None:
                attempt.evidence.end()
        self._enter_phase(USER)
        if self.is_distributed:
            self.parts.watchdog.get().leave_step()

    def _submit(self, attempt: StepAttempt) -> None:
        progress, gate = self.progress, self.parts.gate
        if gate.on_device:
            self.note(gate.check_step_hooks(is_distributed=self.is_distributed))
        stats = self._measure(attempt)
        if progress.pending is not None and not self._settle(attempt):
            self._discard(attempt)
            return
        if attempt.epochs_before or attempt.epochs_inside:
            self._move_epoch_schedule(attempt)
        attempt.number, attempt.attempt = progress.step + 1, progress.attempt
        agreed = self._agree(attempt, stats)
        try:
            self._update(attempt, stats, agreed)
        except OutOfMemoryError as error:
            plan = self.oom.undo_update(attempt.number, error)
            if plan is None:
                raise
            self._drop_gradients()
            self._act(attempt, None, attempt.unmeasured_signal(), plan, is_vetoed=False)
            return
        progress.pending = attempt
        if self._settles_at_once or not gate.on_device:
            self._settle(None)
        elif not self.context.hooks.runs_between_steps:
            self.note(self.parts.snapshots.on_update_submitted(attempt.number))

    def _measure(self, attempt: StepAttempt) -> GradientStats:
        """Enqueue the norm of the gradients where the step ran. The host does not wait."""
        state, is_clipped = self.context.state, self._max_norm() is not None
        self._require_parameters()
        loss, factor = attempt.complete(self.is_distributed)
        if factor != 1.0:
            scale_gradients(self._parameters, factor)
        found_inf = {} if state.scaler is None else state.scaler.unscale(state.optimizers.outer)
        if attempt.norm is not None and not is_clipped:
            return GradientStats(loss, attempt.norm, found_inf)
        norm = self.parts.norms.gradient_norm(self._parameters, to_clip=is_clipped)
        return GradientStats(loss, norm, found_inf)

    def measure(self, attempt: StepAttempt) -> Tensor:
        """Measure the gradients as the backward left them, before the driver clips them. Return the norm on this rank."""
        attempt.norm = norm = self._unscaled_norm()
        return _root(norm)

    def measure_clipped(self) -> float:
        """Return the norm of the gradients on this rank as the driver has left them. Waits for the device."""
        return float(_root(self._unscaled_norm()))

    def _unscaled_norm(self) -> Norm:
        self._follow_param_groups()
        norm = self.parts.norms.gradient_norm(self._parameters, to_clip=False)
        scaler = self.context.state.scaler
        scale = None if scaler is None else scaler.scale_tensor()
        if scaler is not None and scale is not None and not scaler.is_unscaled(self.context.state.optimizers.outer):
            norm = norm._replace(value=norm.value / (scale if norm.is_total else scale * scale).to(norm.value.device))
        return norm

    def _move_epoch_schedule(self, attempt: StepAttempt) -> None:
        """Step epoch schedulers for the epochs that ended before the step or between its batches, as a plain loop does."""
        if attempt.epochs_before:
            self._end_epochs(attempt.epochs_before)
        self.end_epochs_inside(attempt)

    def end_epochs_inside(self, attempt: StepAttempt) -> None:
        """Step epoch schedulers for the epochs that ended between the batches of a step."""
        state = self.context.state
        if attempt.epochs_inside and state.schedulers.has_interval("epoch"):
            attempt.schedule = attempt.schedule or state.schedule_state()
            self._end_epochs(attempt.epochs_inside)
            attempt.epochs_inside = 0

    def _agree(self, attempt: StepAttempt, stats: GradientStats) -> AgreedStep:
        """Return the step's numbers, over all ranks if there are several."""
        context, parts, number = self.context, self.parts, attempt.number
        limits = self._limits(attempt)
        checks = parts.integrity.before_update(number) if number >= parts.integrity.checks.next_check else None
        scaler, detect = context.state.scaler, context.config.detect
        is_weighed = detect.advisory and (number % _WEIGHT_NORM_EVERY == 0 or number == 1)
        local = LocalMeasurements(
            stats.loss,
            stats.norm,
            None if scaler is None else scaler.scale_tensor(),
            [] if scaler is None else self._found_inf_flags(stats),
            parts.update_size.sum_of_squares(stats.loss.device) if self.is_distributed and parts.update_size else None,
            parts.norms.weight_norm(self._parameters, stats.loss.device) if is_weighed else None,
            parts.local_grad_norms.pop() if self.is_distributed else None,
            checks,
        )
        timer = self._timer
        if timer is None:
            attempt.loss_limit, attempt.grad_limit = limits
            return agree_alone(limits, local)
        if (alarm := self._pop_alarm()) is not None:
            parts.coordinator.request_alarm(alarm)
        if parts.snapshots.announcements:
            parts.coordinator.request("snapshots", parts.snapshots.announcements)
            parts.snapshots.announcements = []
        host = HostFields(
            number,
            attempt.attempt,
            attempt.seconds,
            attempt.inputs.checksum,
            attempt.samples,
            attempt.inputs.sequence_length,
            attempt.weight,
            attempt.is_weighted,
            limits,
            attempt.group,
            timer.phases(parts.local_grad_norms.pop_last_arrival(), on_device=parts.gate.on_device),
        )
        self._enter_phase(COLLECTIVE)
        sent_at = timer.now()
        agreed = parts.coordinator.agree(host, local)
        if not parts.gate.on_device:
            assert agreed.extra is not None
            if self._read_rows(attempt, agreed.extra.cpu()):
                limits = self._limits(attempt)
                agreed = agreed._replace(limits=limits)
        timer.exchanged(sent_at)
        attempt.loss_limit, attempt.grad_limit = limits
        # If the host reads the rows, only after they show all ranks at the same step.
        parts.watchdog.get().ping(number)
        self._enter_phase(OPTIMIZER)
        return agreed

    def _limits(self, attempt: StepAttempt) -> Limits:
        """Return the limits of loss and gradient norm. A norm that the driver clips below its limit has none."""
        limits, clip = self.context.engine.limits(), attempt.clipped_to
        is_clipped = clip is not None and limits.grad_norm is not None and clip <= limits.grad_norm
        return limits._replace(grad_norm=None) if is_clipped else limits

    def _found_inf_flags(self, stats: GradientStats) -> list[Tensor]:
        """Return the loss scaler's flag of each optimizer, so that every rank has equally many."""
        optimizers = self.context.state.optimizers.outer
        return [stats.found_inf.get(id(o), stats.loss.new_zeros(())) for o in optimizers]

    def _update(self, attempt: StepAttempt, stats: GradientStats, agreed: AgreedStep) -> None:
        """Clip and step the optimizers unless the gate vetoes the update."""
        state, parts = self.context.state, self.parts
        max_norm = self._max_norm()  # settling the step before may have changed it
        attempt.clip = attempt.clipped_to if max_norm is None else max_norm
        found_inf, local_norm = stats.found_inf, stats.norm.value if stats.norm.is_total else agreed.norm
        if self.is_distributed:
            found_inf = self._agree_on_overflow(found_inf, agreed)
            agreed, local_norm = self._weigh_gradients(attempt, agreed, local_norm)
        measurements = DeviceMeasurements(
            agreed.loss,
            agreed.norm,
            agreed.limits,
            sum(agreed.found_inf[1:], agreed.found_inf[0]) if agreed.found_inf else None,
            None if state.scaler is None else state.scaler.scale_tensor(),
            None if self.is_distributed or parts.update_size is None else parts.update_size.sample(),
            agreed.update_rms,
            agreed.weight_norm,
            agreed.norms_differ,
            agreed.extra,
        )
        lr_factor, attempt.lr = 1.0, state.optimizers.lr()
        if attempt.lr != self._last_lr or parts.unknown_schedulers.watched:
            self._check_schedulers(attempt.lr)
        if state.interventions.lr_ramp is not None or state.interventions.hold is not None:
            attempt.set_lr = attempt.lr
            lr_factor = state.interventions.lr_factor(attempt.lr, attempt.number)
            attempt.lr *= lr_factor
        if self._first_steps is not None:
            self._check_training(self._first_steps, attempt.lr, agreed.norm)
        if parts.snapshots.copies_in_flight:
            parts.snapshots.wait_for_copies()
        if state.fsdp_modules:  # an evaluation since the last update leaves gathered parameters, which would be stale
            state.reshard()
        state.optimizers.allows_step = True
        if attempt.evidence is not None:
            attempt.evidence.pause(False)
        began = monotonic_ns()
        try:
            attempt.handle = parts.gate.apply(
                measurements, self._parameters, found_inf, max_norm, lr_factor, local_norm=local_norm
            )
        finally:
            state.optimizers.allows_step = False
            if attempt.evidence is not None:
                attempt.evidence.end()
        attempt.update_ns = monotonic_ns() - began
        if attempt.number + 1 >= parts.integrity.checks.next_check:
            parts.integrity.after_update(attempt.number)
        if not self.keeps_gradients:
            clear_gradients(self._parameters)

    def _check_schedulers(self, lr: float) -> None:
        """Report a scheduler that the loop steps, if the LR or the scheduler has moved without the guard."""
        has_changed = self._last_lr is not None and lr != self._last_lr
        self._last_lr = lr
        self._note_for_all(self.parts.unknown_schedulers.check(has_lr_changed=has_changed))

    def _check_training(self, first_steps: FirstSteps, lr: float, norm: Tensor) -> None:
        """Report parameters that do not move, and optimizers that the guard does not know."""
        for message in first_steps.unknown_optimizers():
            self._note_for_all(message)
        self.note(first_steps.unmoved(self.progress.step, self._parameters, lr, norm))
        if first_steps.is_over(self.progress.step):
            first_steps.close()
            self._first_steps = None

    def _agree_on_overflow(self, found_inf: dict[int, Tensor], agreed: AgreedStep) -> dict[int, Tensor]:
        """Return the flags over all ranks: an overflow on one rank is an overflow on all."""
        state = self.context.state
        if state.scaler is None:
            return found_inf
        pairs = zip(state.optimizers.outer, agreed.found_inf, strict=True)
        found_inf = {id(o): flag for o, flag in pairs if id(o) in found_inf}
        state.scaler.set_found_inf(found_inf)
        return found_inf

    def _weigh_gradients(
        self, attempt: StepAttempt, agreed: AgreedStep, local_norm: Tensor
    ) -> tuple[AgreedStep, Tensor]:
        """Scale the gradients by the total weight of all ranks, which is known only now."""
        total = attempt.total_if_equal()
        if total is None or agreed.total_weight is None:
            return agreed, local_norm
        share = total * self.context.ranks.size / agreed.total_weight
        local_share = share.to(local_norm.dtype)
        scale_gradients(self._parameters, local_share)
        return agreed._replace(norm=agreed.norm * share), local_norm * local_share

    def _max_norm(self) -> float | None:
        """Return the clip norm in force."""
        interventions = self.context.state.interventions
        return self._clip if interventions.tightened_clip is None else interventions.max_norm(self._clip)

    def _require_parameters(self) -> None:
        """Raise StepError if the loop has emptied the param groups: the run would look healthy and train nothing."""
        self._follow_param_groups()
        if self._emptied is not None:
            number = self.progress.step + 1
            raise StepError(
                f"step {number}: an optimizer was emptied during the run: {self._emptied}; nothing was applied"
            )

    def _follow_param_groups(self) -> None:
        """Include parameter groups that were added on the way (gradual unfreezing)."""
        ids = self.context.state.optimizers.parameter_ids()
        if ids is not self._parameter_ids:
            self._parameter_ids, self._parameters = ids, self.context.state.trained_parameters()
            self._emptied = self.context.state.optimizers.emptied()
            self.parts.checkpoints.describe_model()
            if self.parts.update_size is not None:
                self.parts.update_size.reset()

    # ---- 4. settle: judge, then commit or recover

    def flush(self) -> bool:
        """Settle the pending step now, which waits for the device. Return False if data was requeued."""
        progress = self.progress
        if progress.pending is None:
            return True
        self.require_own_process()
        served = progress.served if progress.served is not progress.pending else None
        if served is not None and served.is_open:
            raise StepError(
                f"step {progress.pending.number} cannot be settled inside step {served.number}, which runs on its result: "
                "evaluate, save, declare shifts and read step.outcome between two steps, or in on_step_end"
            )
        if served is not None and served.phase == "left":
            served = None
        before = self.context.heartbeat.enter(OPTIMIZER)
        is_settled = self._settle(served)
        self.context.heartbeat.enter(before)
        if not is_settled:
            progress.exhausted = False
            if served is not None:
                self.redraw(served)
        return is_settled

    def _settle(self, following: StepAttempt | None) -> bool:
        """Judge the pending step and act on it. Return False if data was requeued: `following` is void then."""
        progress, parts, coordinator = self.progress, self.parts, self.parts.coordinator
        attempt, progress.pending = progress.pending, None
        assert attempt is not None and attempt.handle is not None
        began, began_ns = 0.0 if self._timer is None else self._timer.now(), monotonic_ns()
        measured = attempt.handle.measurements or attempt.handle.read()
        attempt.wait_ns = monotonic_ns() - began_ns
        if self._timer is not None:
            self._timer.add_wait(began)
        if self.is_distributed or measured.extra is not None:
            self._read_rows(attempt, measured.extra)
        signal = attempt.signal(measured)
        if self.is_distributed:
            signal = coordinator.merge_signal(signal, attempt.rows)
        is_vetoed = bool(measured.flags) and self._is_armed
        if is_vetoed or signal.overflow:
            attempt.handle.drop_new_optimizer_state(overflow=not is_vetoed)
            parts.integrity.forget()
        if is_vetoed and self.is_distributed and (retry := self.oom.agreed_retry(attempt)) is not None:
            return self._act(attempt, following, signal, retry, is_vetoed)
        if self.is_distributed and signal.flags and attempt.rows is not None:
            attempt.origin = coordinator.find_origin(
                attempt.rows, signal, lambda find: describe_data(attempt.draws, attempt.losses, find_nonfinite=find)
            )
        findings: list[Finding] = []
        has_alarm = parts.snapshots.nonfinite is not None or parts.checkpoints.nonfinite is not None
        self._overflows = self._overflows + 1 if signal.overflow else 0
        if signal.flags or signal.overflow or has_alarm or self.is_distributed:
            findings = self._check_state(attempt, signal)
        if attempt.rows is not None:
            findings += parts.integrity.findings(attempt.number, attempt.rows, signal)
            findings += coordinator.find_stragglers(attempt.number, attempt.rows, self.note)
        origin = None if attempt.origin is None else attempt.origin.evidence
        inspect = partial(find_spoilt_statistics, self.context, attempt, following) if self._has_statistics else None
        amend = None
        if attempt.evidence is not None:
            amend = parts.incidents.examine(attempt, signal, findings, is_bad=is_vetoed)
        plan = self.context.engine.judge(signal, findings, origin, inspect, amend)
        if plan is not None:
            coordinator.add_decision(signal, plan)
        if plan is not None or attempt.evidence is not None:
            self._next_evidence = parts.incidents.settle(attempt, signal, plan, following, has_landed=not is_vetoed)
            self._watches_again = parts.incidents.watches_again
        has_actions = plan is not None and bool(plan.actions)
        if not has_actions and not is_vetoed:
            is_healthy = plan is None or plan.by != "observe"
            if signal.overflow:
                self._record_overflow(attempt, signal)
            else:
                self._commit(attempt, signal, is_healthy)
            return True
        if plan is None or not has_actions:
            situation = Situation(attempt, following, signal, plan, is_vetoed, progress.step, progress.positions)
            return self._apply(effects.skip.perform(self._recovery, situation), attempt, signal)
        parts.snapshots.reset_healthy_counts()
        parts.checkpoints.reset_healthy_counts()
        return self._act(attempt, following, signal, plan, is_vetoed)

    def _act(
        self, attempt: StepAttempt, following: StepAttempt | None, signal: Signal, plan: Plan, is_vetoed: bool
    ) -> bool:
        """Carry out a plan. Return False if data was requeued."""
        progress = self.progress
        situation = Situation(attempt, following, signal, plan, is_vetoed, progress.step, progress.positions)
        before = self.context.heartbeat.enter(SAVE)  # it may read the whole state from disk
        is_valid = self._apply(effects.carry_out(self._recovery, situation), attempt, signal)
        self.context.heartbeat.enter(before)
        return is_valid

    def _check_state(self, attempt: StepAttempt, signal: Signal) -> list[Finding]:
        """Find out whether the state was non-finite before the batch. Checked only when something is wrong already."""
        is_suspect = bool(signal.flags & _NONFINITE) or self._overflows in _STATE_CHECK_AT_OVERFLOWS
        is_checked = self.context.config.detect.nonfinite and is_suspect
        tensor = self.context.state.first_nonfinite(attempt.buffers) if is_checked else None
        onset, how = signal.step - 1, "found when the step was not finite"
        if tensor is None and not self.is_distributed and (alarm := self._pop_alarm()) is not None:
            tensor, onset, how = alarm.tensor, alarm.step, "found in a snapshot"
        coordinator = self.parts.coordinator
        if tensor is None and not (self.is_distributed and (is_checked or coordinator.has_alarms)):
            return []
        return coordinator.nonfinite_state(tensor, onset, how, signal)

    def _pop_alarm(self) -> NonfiniteSnapshot | None:
        """Return a snapshot or checkpoint of this rank that was found to hold NaN or Inf.

        If both were, they hold the same broken state: one alarm, one recovery.
        """
        snapshots, checkpoints = self.parts.snapshots, self.parts.checkpoints
        if snapshots.nonfinite is None and checkpoints.nonfinite is None:
            return None
        in_checkpoint = checkpoints.pop_nonfinite()
        return snapshots.pop_nonfinite() or in_checkpoint

    def _record_overflow(self, attempt: StepAttempt, signal: Signal) -> None:
        """Record an attempt that the loss scaler kept from landing.

        As torch does it: data, RNG and buffers are consumed, the scale has backed off, the schedule stays.
        """
        self.parts.snapshots.discard_in_progress()
        outcome = Outcome(status=Status.OVERFLOWED, signal=signal)
        self._record_outcome(attempt, outcome, loss_scale=signal.loss_scale)

    def _commit(self, attempt: StepAttempt, signal: Signal, is_healthy: bool) -> None:
        progress, context, parts = self.progress, self.context, self.parts
        progress.step += 1
        assert progress.step == signal.step, "committed steps are numbered without gaps"
        progress.attempt = 1
        progress.positions[progress.step] = attempt.draws[0].begin
        self.step_schedulers("step")
        interventions = context.state.interventions
        is_intervening = interventions.lr_ramp is not None or interventions.hold is not None
        if (
            is_intervening
            or interventions.tightened_clip is not None
            or attempt.is_weighted
            or context.history.interventions
        ):
            self._count_interventions(attempt)
        if is_healthy:
            if context.engine.commit(signal) is not None:
                parts.integrity.incident_closed(progress.step)
            experiments = context.engine.experiments
            is_healthy = experiments.excursion is None or not experiments.is_suspect
        if is_healthy:
            parts.checkpoints.count_healthy_step(progress.step)
            if parts.checkpoints.is_overdue:
                self._request_checkpoint()
        if progress.step % parts.memory.every == 0:
            for finding in parts.memory.read(progress.step):
                self._report_memory(finding)
        attempt.result = outcome = Outcome(status=Status.COMMITTED, signal=signal)
        if context.records.metrics is not None:
            context.records.metrics.write((outcome, monotonic_ns(), attempt.update_ns, attempt.wait_ns, attempt.rows))
        if context.records.outage.is_active:
            context.records.retry(context.engine)
        if self.oom.is_splitting:
            self.oom.count_clean_step(progress.step)
        if "on_step_end" in context.hooks.callbacks:
            context.hooks.call("on_step_end", outcome)
        self.note(parts.snapshots.on_commit(progress.step, context.engine.state_dict, is_healthy=is_healthy))
        if parts.checkpoints.tier.is_writing:
            self._request_tier_write()
        if progress.step % _FORGET_EVERY == 0:
            self._forget_positions()
            self._note_for_all(parts.hang_watch.start_if_due(context.heartbeat))
        if self.on_next_commit is not None:
            call, self.on_next_commit = self.on_next_commit, None
            call()

    def _report_memory(self, finding: Finding) -> None:
        """Report what was found about this rank's memory; on several ranks all journal it, at the next step."""
        rundir = self.context.records.rundir
        if self.parts.memory.on_device and rundir is not None:
            save_snapshot(rundir.path / "memory", f"step_{finding.step}", [msgspec.to_builtins(finding)])
        if self.is_distributed:
            evidence = {**finding.evidence, "rank": self.context.ranks.rank}
            finding = msgspec.structs.replace(finding, evidence=evidence)
            self.parts.coordinator.request("finding", msgspec.to_builtins(finding))
        else:
            self.context.engine.add_note(finding)

    def _request_checkpoint(self) -> None:
        """Have every rank save the same step. On several ranks they learn of it with the rows of the next one."""
        if self.is_distributed:
            self.parts.coordinator.request("checkpoint", None)
        else:
            self.parts.checkpoints.save_at(self.progress.step + 1)

    def _request_tier_write(self) -> None:
        """Have every rank write the same certified snapshot to shared memory, if it is time."""
        tier, ring = self.parts.checkpoints.tier, self.parts.snapshots.ring
        step = tier.due_step(ring)
        if step is not None and self.is_distributed:
            self.parts.coordinator.request("tier", step)
        elif step is not None:
            tier.write(step, ring)

    def _count_interventions(self, attempt: StepAttempt) -> None:
        """Move LR ramp, tightened clip and weight unit on by one committed step."""
        context, interventions, step = self.context, self.context.state.interventions, self.progress.step
        lr = attempt.set_lr
        before = interventions.lr_factor(lr, step)
        interventions.commit(lr, step)
        if self.is_distributed and attempt.is_weighted and attempt.rows is not None:
            unit = self.parts.coordinator.next_unit(attempt.rows, attempt.parts or 1)
            interventions.weight_unit = interventions.weight_unit if unit is None else unit
        if (after := interventions.lr_factor(lr, step + 1)) > LR_JUMP * before:
            context.engine.shift(f"the LR returned from {before:.4g} to {after:.4g} of its schedule", step)
        if len(context.history.interventions) > interventions.applied:
            effects.interventions.repeat_due(context, step)

    def _forget_positions(self) -> None:
        """Forget data positions older than any rollback could return to."""
        progress, parts = self.progress, self.parts
        number = max(next(iter(progress.positions), 1), progress.step - self.context.config.snapshot.reach_steps)
        position, oldest = progress.positions.get(number), parts.snapshots.oldest_position()
        if position is not None and (oldest is None or number < oldest[0]):
            oldest = number, position
        if oldest is None:
            return
        parts.feeder.source.forget_before(oldest[1])
        for number in list(takewhile(lambda n: n < oldest[0], progress.positions)):  # in the order of their numbers
            del progress.positions[number]

    def _apply(self, transition: Transition, attempt: StepAttempt, signal: Signal) -> bool:
        """Apply what an effect decided. Return whether the attempt computed meanwhile is valid."""
        progress, outcome = self.progress, transition.outcome
        if transition.rolled_back_to is not None:
            self._roll_back_to(transition.rolled_back_to)
            if transition.excluded is not None:
                assert outcome is not None and outcome.plan is not None
                effects.skip_data.perform(self._recovery, outcome.plan, transition.excluded, progress.step)
            self._intervene(transition, part_of_rollback=True)
        if transition.stop_reason is not None:
            progress.stopping = transition.stop_reason
        if outcome is None and signal.overflow:
            self._record_overflow(attempt, signal)
        elif outcome is None:
            self._commit(attempt, signal, is_healthy=True)
        else:
            self._record_outcome(attempt, outcome, **transition.outcome_fields)
            if transition.error is not None:
                raise transition.error
            self.context.hooks.call("on_recovery", outcome)
        if transition.rolled_back_to is None:
            self._intervene(transition, part_of_rollback=False)
        return transition.following_is_valid

    def _intervene(self, transition: Transition, *, part_of_rollback: bool) -> None:
        """Apply the interventions of a transition from the next update on."""
        for planned in transition.interventions:
            intervention = msgspec.structs.replace(planned, step=self.progress.step)
            if not part_of_rollback:  # a rollback's event has put them into the history
                self.context.history.add(intervention)
            effects.interventions.apply(
                self.context, self.progress.step, intervention, part_of_rollback=part_of_rollback
            )

    def _roll_back_to(self, step: int) -> None:
        """Undo what was counted since `step`: its state has been restored."""
        progress = self.progress
        progress.step, progress.attempt, self._overflows, self._last_lr = step, 1, 0, None
        self.parts.integrity.rolled_back_to(step)
        for number in [n for n in progress.positions if n > step]:
            del progress.positions[number]
        self.epoch_ends.roll_back()
        clear_gradients(self._parameters)

    def _record_outcome(self, attempt: StepAttempt, outcome: Outcome, **fields: Any) -> None:
        """Record the outcome of an attempt that was not committed."""
        self.progress.attempt += 1
        attempt.result = outcome
        if outcome.status is not Status.REPLAYED:
            self._next_evidence = None
        self.context.engine.record_outcome(outcome, **fields)
        if self.context.records.metrics is not None:
            row = (outcome, monotonic_ns(), attempt.update_ns, attempt.wait_ns, attempt.rows)
            self.context.records.metrics.write(row)

    # ---- steps that are not trained on

    def heal_out_of_memory(self, attempt: StepAttempt, error: BaseException, served: FailedPart | None) -> bool:
        """Have a step that ran out of memory served again. Return False if the error must end the loop: see `abandon`."""
        if self.is_forked:
            return False
        evidence, attempt.evidence = attempt.evidence, None
        if evidence is not None:  # all ranks examine the attempt, so the one that replaces it has evidence too
            self._next_evidence = evidence.give_back_memory()
        if not self.oom.heal(attempt, error, served, self._drop_gradients, was_observed=evidence is not None):
            return False
        self._enter_phase(USER)
        attempt.phase, self.progress.served = "left", None
        if not self.is_distributed and self.progress.pending is None:
            self.progress.attempt += 1
        return True

    def abandon(self, attempt: StepAttempt, error: BaseException) -> None:
        """Apply nothing of a step that an error came out of. Its data is lost."""
        attempt.phase, self._next_evidence = "left", None
        self._enter_phase(USER)
        if attempt.evidence is not None:
            attempt.evidence.end()
        if self.is_forked:
            return
        try:
            self.note(self.parts.snapshots.take_postponed())
        except Exception as problem:  # the device has failed
            log.warning("holdfast: the snapshot of step %d could not be taken: %s", self.progress.step, problem)
        self.report_failure(error, attempt.running)
        self.parts.watchdog.get().leave_step()
        self._drop_gradients()
        self.progress.served = None
        self.parts.feeder.source.defer_epoch_ends(attempt.epochs_before + attempt.epochs_inside)
        self.context.engine.write("abandoned", step=attempt.number, data=attempt.spans(), batches=len(attempt.draws))
        if (verdict := self.parts.memory.explain(error, attempt.number)) is not None:
            self.context.engine.add_note(verdict)
        if isinstance(error, OutOfMemoryError):
            self.note(self.parts.snapshots.release_device_memory())

    def discard_remainder(self, attempt: StepAttempt) -> None:
        """Drop a last step for which fewer batches than `accumulate` were left."""
        self.require_own_process()
        attempt.phase = "left"
        if attempt.evidence is not None:
            attempt.evidence.end()
        feeder, engine = self.parts.feeder, self.context.engine
        self.parts.watchdog.get().leave_step()
        self._drop_gradients()
        feeder.source.defer_epoch_ends(attempt.epochs_before + attempt.epochs_inside)
        rewind(self._recovery, attempt)
        attempt.result = Outcome(status=Status.DISCARDED, signal=attempt.unmeasured_signal())
        if self.progress.pending is not None and not self._settle(attempt):
            engine.record_outcome(attempt.result)  # the step before was undone, so there is data again
            return
        engine.write("remainder", step=attempt.number, data=attempt.spans(), batches=len(attempt.draws))
        self._end_epochs(feeder.report_epoch_ends())
        self.progress.exhausted = True

    def _discard(self, attempt: StepAttempt) -> None:
        """Drop an attempt that was computed on a step that has been undone."""
        self._drop_gradients()
        attempt.result = Outcome(status=Status.DISCARDED, signal=attempt.unmeasured_signal())
        self.context.engine.record_outcome(attempt.result)

    def _drop_gradients(self) -> None:
        self._follow_param_groups()
        clear_gradients(self._parameters)
        state = self.context.state
        for _, module in state.modules:
            drop_accumulated_gradients(module)
        if state.scaler is not None:
            state.scaler.reset_after_skip()

    # ---- what a loop of its own does around an update

    def serve_epoch(self, epoch: int) -> None:
        """Serve this epoch of the data and no later one: the loop counts epochs itself."""
        self.parts.feeder.source.serve_epoch(epoch)

    def leave_epoch(self) -> None:
        """End the epoch of the data where it is: the loop has left it."""
        feeder = self.parts.feeder
        feeder.ended_epochs.clear()
        feeder.source.leave_epoch()
        self._end_epochs(len(feeder.ended_epochs))

    def end_for(self, *, repeats: bool) -> bool:
        """Note that a `for` of the loop ends. Return whether its epoch has ended in this process.

        repeats: what the loop does now is set again, if a rollback makes the run pass this place inside another `for`.
        """
        has_ended = self.epoch_ends.has_ended or self.progress.exhausted
        if has_ended and repeats:
            self.epoch_ends.leave()
        return has_ended

    def batches_left(self) -> int | None:
        """Return how many batches of the current epoch are still to come; None if that is not known."""
        return self.parts.feeder.source.batches_left()

    def with_gradients(self) -> list[Tensor]:
        """Return the parameters that have a gradient now."""
        return [p for p in self._parameters if p.grad is not None]

    def clear_gradients(self, zeros: Sequence[Tensor]) -> None:
        """Clear the gradients of an update that did not land; those of `zeros` as `zero_grad(set_to_none=False)` does."""
        clear_gradients(self._parameters)
        for p in zeros:
            p.grad = zeros_like(p)

    def keep_schedule(self, attempt: StepAttempt) -> None:
        """Copy schedule, group options and flags, which the loop may change before the update: see `rewind`."""
        attempt.schedule = self.context.state.schedule_state()
        attempt.flags = self.context.state.named_params.flags()

    def copy_registered(self) -> dict[str, Any]:
        """Return copies of what small registered objects hold now."""
        return self.context.state.copy_registered()

    def restore_registered(self, copies: dict[str, Any]) -> None:
        """Take back what an attempt that was left out or is tried again has done to registered objects."""
        self.context.state.restore_registered(copies)

    def capture_between_steps(self, undone: StepAttempt | None = None, *, is_resumed: bool = False) -> BetweenSteps:
        """Keep what the loop may change until the next update.

        undone: the attempt that is left out or tried again. Layers that it has frozen are up to the loop, which may have
        frozen them for a while.
        is_resumed: this process has just resumed the run.
        """
        flags_before = None if undone is None else undone.flags
        return BetweenSteps(self.context.state, self.context.rng, flags_before, is_resumed=is_resumed)

    def restore_between_steps(self, saved: BetweenSteps) -> None:
        """Take back what the loop has done since `capture_between_steps`."""
        self.note(saved.restore(is_at_end=self.parts.feeder.source.is_at_end))

    # ---- schedules

    def _end_epochs(self, count: int) -> None:
        for _ in range(count):
            self.step_schedulers("epoch")

    def step_schedulers(self, interval: Any, metric: float | None = None) -> None:
        """Step the schedulers of one interval. A jump of the LR is an expected shift for the detectors."""
        state, step = self.context.state, self.progress.step
        if not state.schedulers.all:
            return
        before = state.optimizers.lr()
        state.schedulers.step(interval, metric)
        self._last_lr = after = state.optimizers.lr()
        if before > 0 and after > LR_JUMP * before and step > self.context.config.detect.warmup_steps:
            self.context.engine.shift(f"the schedule moved the LR from {before:.4g} to {after:.4g}", step)

    def quarantine_samples(self, samples: Iterable[int], reason: str, rank: int | None = None) -> None:
        added = self.context.records.quarantine.add_samples(samples, reason)
        self.context.engine.write("quarantine", durable=True, samples=added, reason=reason, rank=rank)
        self.check_sample_ids()

    def check_sample_ids(self) -> None:
        """Note that quarantined sample ids have no effect, if so."""
        feeder, samples = self.parts.feeder, self.context.records.quarantine.samples
        if samples and feeder.is_attached and not feeder.source.exact:
            self.note(
                f"{len(samples)} sample ids are quarantined, but a stream has no sample ids: they are served all the same; "
                "pass a DataLoader over a map-style dataset, or leave them out in the dataset"
            )

    def _read_rows(self, attempt: StepAttempt, extra: Tensor | None) -> bool:
        """Read the rows of all ranks, once a step, and apply their requests. Return whether limits have changed."""
        if attempt.rows is not None:
            return False
        state = self.context.state
        scaled_optimizers = 0 if state.scaler is None else len(state.optimizers.outer)
        attempt.rows = self.parts.coordinator.read_rows(extra, scaled_optimizers)
        if attempt.rows is None or not self.is_distributed or not attempt.rows.has_requests():
            return False
        return self.apply_requests(attempt.number)

    def request_stop(self, reason: str) -> None:
        """Stop after the current step."""
        self.progress.stopping = reason

    def forget_served(self) -> StepAttempt | None:
        """Return the attempt drawn last, which is not served any more."""
        served, self.progress.served = self.progress.served, None
        return served

    def apply_requests(self, number: int) -> bool:
        """Apply what any rank has requested, on all ranks from step `number` on. Return whether limits have changed."""
        engine, requests = self.context.engine, self.parts.coordinator.drain_requests()
        if requests.shutdown is not None and not self.progress.is_shutdown:
            rank, reason = requests.shutdown
            self._stop_for_signal(reason, number, rank)
        if requests.stop is not None and self.progress.stopping is None:
            rank, reason = requests.stop
            self.progress.stopping = reason
            engine.write("stop_requested", step=number, reason=reason, rank=rank)
        for reason in requests.shifts:
            engine.declare_shift(reason, number - 1)
        for rank, samples, reason in requests.quarantines:
            self.quarantine_samples(samples, reason, rank=rank)
        if requests.is_checkpoint_due:
            self.parts.checkpoints.save_at(number + 1)
        for rank, news in requests.snapshots:
            self.note(self.parts.snapshots.apply_announcement(rank, news))
        if requests.tier_step is not None:
            self.parts.checkpoints.tier.write(requests.tier_step, self.parts.snapshots.ring)
        for message in requests.notes:
            self.note(message)
        if requests.splits:
            self.oom.take_requests(requests.splits)
        for finding in requests.findings:
            self.parts.memory.mark_reported(finding.kind)
            engine.add_note(finding)
        return bool(requests.shifts)

    def report_failure(self, error: BaseException, where: str) -> None:
        """Report to the other ranks that this one cannot continue. Errors that all ranks raise alike are not reported."""
        is_agreed = isinstance(error, PolicyStop | InstabilityError | RanksDisagree | Shutdown)
        if self.is_distributed and not self.has_failed and not is_agreed:
            self.has_failed = True
            served = self.progress.served
            number = self.progress.step + 1 if served is None else served.number
            self.parts.checkpoints.abort()
            parts = self.oom.wanted_parts  # a restart with smaller micro-batches is not the same again
            self.gives_up = None if parts else self.context.engine.why_give_up(number, error)
            self.parts.watchdog.get().report_failure(
                error, number, where, gives_up=self.gives_up is not None, split=parts
            )

    def note(self, message: str | None) -> None:
        """Journal and log that something works less well than asked."""
        if message is not None:
            self.context.engine.note(self.progress.step, message)

    def _note_for_all(self, message: str | None) -> None:
        """Note what this rank alone may know: on several ranks all note it, at the next step."""
        if not self.is_distributed:
            self.note(message)
        elif message is not None:
            self.parts.coordinator.request("note", message)


def agree_alone(limits: Limits, local: LocalMeasurements) -> AgreedStep:
    """Return the step's numbers of a single process."""
    norm, weight_norm = _root(local.norm), None if local.weight_norm is None else _root(local.weight_norm)
    extra = None if local.checks is None else local.checks.view(float64)
    return AgreedStep(local.loss, norm, limits, local.found_inf, None, weight_norm, None, None, extra)


def _root(norm: Norm) -> Tensor:
    """Return the norm itself: a partial one is a sum of squares."""
    return norm.value if norm.is_total else norm.value.sqrt()
