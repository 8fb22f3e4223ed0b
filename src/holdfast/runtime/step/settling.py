"""What became of a step: its numbers read, judged, and acted on; or it is committed, and all that moves with it."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any

from holdfast.core.base.types import Finding, Flag, Outcome, Signal, Skip, Status
from holdfast.core.detectors.expected_shifts import LR_JUMP
from holdfast.runtime.step import effects
from holdfast.runtime.update.measurements import HostMeasurements

if TYPE_CHECKING:
    from holdfast.runtime.step.run import Run
    from holdfast.runtime.step.step import Step

_LOOK_AT_STREAKS = (4, 16)
_FORGET_EVERY = 16
_NONFINITE = int(Flag.LOSS_NONFINITE | Flag.GRAD_NONFINITE)


class Settling:
    """One run's pending steps, one at a time."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._overflows = 0
        """in a row"""

    def returned(self) -> None:
        """To an earlier step."""
        self._overflows = 0

    def settle(self, following: Step | None) -> bool:
        """Find out what became of the pending step and act on it. False: the data was put back; `following` is void."""
        run = self._run
        step, run.pending = run.pending, None
        assert step is not None and step.passage is not None
        reading = step.passage.read()
        run.meeting.read(step, reading.extra)
        signal = run.meeting.over_all(self._signal(step, reading), step)
        vetoed = bool(reading.flags) and run.armed
        if vetoed or signal.overflow:
            step.passage.drop_new_optimizer_state(overflow=not vetoed)
            run.checking.forget()
        step.origin = run.meeting.blame(step, signal)
        origin = None if step.origin is None else step.origin.evidence
        findings = [*self._look_deeper(step, signal), *run.checking.findings(step, signal)]
        plan = run.engine.judge(signal, findings, origin)
        run.meeting.decided(signal, plan)
        if plan is None or not plan.actions:
            if vetoed:
                return effects.skip.perform(run, step, following, signal, plan, Skip())
            self.stands(step, signal, healthy=plan is None or plan.by != "observe")
            return True
        run.snapshots.reset_healthy_counts()
        run.checkpoints.unhealthy()
        return effects.carry_out(run, step, following, signal, plan, vetoed)

    def stands(self, step: Step, signal: Signal, healthy: bool = True) -> None:
        """Nothing undoes the step: its update has landed, or the loss scaler kept it from landing."""
        if signal.overflow:
            self._overflowed(step, signal)
        else:
            self._commit(step, signal, healthy)

    def _signal(self, step: Step, reading: HostMeasurements) -> Signal:
        return Signal(
            step=step.number,
            attempt=step.attempt,
            loss=reading.loss,
            grad_norm=reading.grad_norm,
            lr=step.lr,
            loss_scale=reading.loss_scale,
            update_rms=reading.update_rms,
            weight_norm=reading.weight_norm,
            batch=None if step.fingerprint is None else step.fingerprint.checksum,
            clip=step.clip,
            flags=reading.flags,
            overflow=reading.overflow,
            loss_limit=step.loss_limit,
            grad_limit=step.grad_limit,
            data=step.spans(),
            samples=step.samples,
            length=None if step.fingerprint is None else step.fingerprint.sequence_length,
            seconds=step.seconds,
        )

    def _look_deeper(self, step: Step, signal: Signal) -> list[Finding]:
        """Is it the batch, or was the state broken before it? Asked only when something is wrong already."""
        run = self._run
        self._overflows = self._overflows + 1 if signal.overflow else 0
        nonfinite = signal.flags & _NONFINITE
        asked = run.config.detect.nonfinite and (nonfinite or self._overflows in _LOOK_AT_STREAKS)
        name = run.state.first_nonfinite(step.buffers) if asked else None
        onset, how = signal.step - 1, "found when the step was not finite"
        if name is None and not run.meeting.several and (alarm := run.snapshots.pop_nonfinite()) is not None:
            name, onset, how = alarm.tensor, alarm.step, "found in a snapshot"
        if name is None and not run.meeting.alarmed and not (asked and run.meeting.several):
            return []
        return run.meeting.broken_state(name, onset, how, signal)

    def _commit(self, step: Step, signal: Signal, healthy: bool) -> None:
        run = self._run
        run.step += 1
        assert run.step == signal.step, "committed steps are numbered without gaps"
        run.attempt = 1
        run.positions[run.step] = step.draws[0].begin
        before = run.state.interventions.lr_factor()
        run.step_schedulers("step")
        run.state.interventions.commit()
        run.meeting.weigh(step)
        if (after := run.state.interventions.lr_factor()) > LR_JUMP * before:
            run.engine.shift(f"the LR returned from {before:.4g} to {after:.4g} of its schedule", run.step)
        if len(run.history.interventions) > run.state.interventions.applied:
            effects.interventions.again(run)
        if healthy:
            if run.engine.commit(signal) is not None:
                run.checking.incident_closed()
            run.snapshots.count_healthy_step(run.step)
            run.checkpoints.healthy(run.step)
        step.result = Outcome(status=Status.COMMITTED, signal=signal)
        run.records.metrics(step.result)
        run.hooks.call("on_step_end", step.result)
        run.leaving.hooked = True
        run.snapshots.on_commit(run.step, run.engine.state_dict)
        if run.step % _FORGET_EVERY == 0:
            self._forget()

    def _forget(self) -> None:
        """What lies further back than anything in memory could return to; without snapshots, than they would reach."""
        run = self._run
        number = max(1, run.step - run.config.snapshot.reach_steps)
        position = run.positions.get(number)
        oldest = run.snapshots.oldest_position() or (None if position is None else (number, position))
        if oldest is None:
            return
        assert run.source is not None
        run.source.forget_before(oldest[1])
        for number in list(takewhile(lambda n: n < oldest[0], run.positions)):  # in the order of their numbers
            del run.positions[number]

    def _overflowed(self, step: Step, signal: Signal) -> None:
        """As torch does it: data, RNG and buffers are consumed, the scale has backed off, the schedule stays."""
        run = self._run
        run.snapshots.discard_in_progress()
        run.attempt += 1
        step.result = Outcome(status=Status.OVERFLOWED, signal=signal)
        run.engine.record_outcome(step.result, loss_scale=signal.loss_scale)
        run.records.metrics(step.result)

    def not_committed(self, step: Step, outcome: Outcome, **fields: Any) -> None:
        """An effect has dealt with the step in another way than committing it."""
        run = self._run
        run.attempt += 1
        step.result = outcome
        run.engine.record_outcome(outcome, **fields)
        run.records.metrics(outcome)
