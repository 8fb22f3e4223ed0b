"""Carry out the actions of a plan, one file each.

An effect journals its action before it takes effect, and returns a `Transition`. The pipeline applies the transition: no
effect writes the run's progress.
"""

from __future__ import annotations

from holdfast.core.base.types import Replay, Rollback, Skip, SkipData, Stop
from holdfast.runtime.effects import interrupted, interventions, replay, rollback, skip, skip_data, stop
from holdfast.runtime.effects.base import RecoveryParts, Situation, Transition

_TOO_LATE = "the update had landed before it was found: only a rollback undoes it"


def carry_out(recovery: RecoveryParts, situation: Situation) -> Transition:
    """Carry out the plan for a settled step.

    A hook's plan may hold an intervention alone. The step then keeps its outcome: skipped if the gate vetoed it.
    """
    plan, signal = situation.plan, situation.signal
    assert plan is not None
    if (stop_action := plan.first(Stop)) is not None:
        return stop.perform(recovery, situation, stop_action)
    if (rollback_action := plan.first(Rollback)) is not None:
        return rollback.perform(recovery, situation, rollback_action)
    has_landed = not situation.is_vetoed and not signal.overflow
    if has_landed and (plan.first(Replay) or plan.first(Skip)) is not None:
        return stop.instead_of(recovery, situation, _TOO_LATE)
    if plan.first(SkipData) is not None:
        recovery.context.engine.write(
            "note", step=signal.step, message="skip_data needs a rollback; this plan has none, so no data is excluded"
        )
    if plan.first(Replay) is not None:
        transition = replay.perform(recovery, situation)
    elif situation.is_vetoed or plan.first(Skip) is not None:
        transition = skip.perform(recovery, situation)
    else:
        transition = Transition(outcome=None, following_is_valid=True)
    return transition._replace(interventions=interventions.interventions_of(plan, situation.committed))


__all__ = ["RecoveryParts", "Situation", "Transition", "carry_out", "interrupted", "interventions", "skip", "skip_data"]
