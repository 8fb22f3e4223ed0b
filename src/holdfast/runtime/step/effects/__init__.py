"""What is done about a verdict: one file each. An action is in the journal before it takes effect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.base.types import Plan, Replay, Rollback, Signal, Skip, SkipData, Stop
from holdfast.runtime.step.effects import interventions, replay, rollback, skip, stop

if TYPE_CHECKING:
    from holdfast.runtime.step.run import Run
    from holdfast.runtime.step.step import Step


def carry_out(run: Run, step: Step, following: Step | None, signal: Signal, plan: Plan, vetoed: bool) -> bool:
    """Perform a plan on the step that has just settled. Returns whether the run may go straight on with `following`.

    A plan of a hook may hold an intervention alone: the step is then what it was, skipped if the gate had vetoed it.
    """
    if (action := plan.first(Stop)) is not None:
        stop.perform(run, step, signal, plan, action)
    if (action := plan.first(Rollback)) is not None:
        return rollback.perform(run, step, signal, plan, action)
    landed = not vetoed and not signal.overflow
    if landed and (plan.first(Replay) or plan.first(Skip)) is not None:
        late = run.engine.stop_instead(plan, "the update had landed before it was found: only a rollback undoes it")
        stop.perform(run, step, signal, late, late.first(Stop))
    if plan.first(SkipData) is not None:
        run.engine.write(
            "note", step=signal.step, message="skip_data belongs to a rollback; without one it is left out"
        )
    if (action := plan.first(Replay)) is not None:
        goes_on = replay.perform(run, step, following, signal, plan, action)
    elif vetoed or plan.first(Skip) is not None:
        goes_on = skip.perform(run, step, following, signal, plan, plan.first(Skip) or Skip())
    else:
        run.settling.stands(step, signal)
        goes_on = True
    interventions.intervene(run, plan)
    return goes_on


__all__ = ["carry_out", "interventions", "replay", "rollback", "skip", "stop"]
