"""Replay: serve the same data again from the same state. A transient fault does not come back."""

from __future__ import annotations

from holdfast.core.base.types import Outcome, Status
from holdfast.runtime.effects import skip
from holdfast.runtime.effects.base import RecoveryParts, Situation, Transition, rewind, write_action


def perform(recovery: RecoveryParts, situation: Situation) -> Transition:
    """Requeue the step's data and that of the attempt after it. Skips the step if the source cannot serve it again."""
    attempt, signal, plan = situation.attempt, situation.signal, situation.plan
    assert plan is not None
    draws = [*attempt.draws, *(situation.following.draws if situation.following is not None else ())]
    why = recovery.coordinator.first_reason(recovery.feeder.source.requeue(draws))
    if why is not None:
        recovery.context.engine.write("note", step=signal.step, message=why, data=signal.data)
        return skip.perform(recovery, situation)
    write_action(recovery, situation, "replay", attempt=signal.attempt, reason=plan.reason, data=signal.data)
    recovery.snapshots.discard_in_progress()
    rewind(recovery, attempt)
    return Transition(Outcome(status=Status.REPLAYED, signal=signal, plan=plan))
