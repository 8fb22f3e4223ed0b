"""What is done about a verdict: one file each. An action is in the journal before it takes effect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.types import Plan, Replay, Rollback, Signal, Skip, Stop
from holdfast.runtime.effects import replay, rollback, skip, stop

if TYPE_CHECKING:
    from holdfast.runtime.run import Run
    from holdfast.runtime.step import Step


def carry_out(run: Run, step: Step, following: Step | None, signal: Signal, plan: Plan, vetoed: bool) -> bool:
    """Perform a plan on the step that has just settled. Returns whether the run may go straight on with `following`."""
    if (action := plan.first(Stop)) is not None:
        stop.perform(run, step, signal, plan, action)
    if (action := plan.first(Rollback)) is not None:
        return rollback.perform(run, step, signal, plan, action)
    for kind, effect in ((Replay, replay), (Skip, skip)):
        if (action := plan.first(kind)) is not None:
            if not vetoed and not signal.overflow:
                late = run.engine.impossible(
                    plan, "the update had landed before it was found: only a rollback undoes it"
                )
                stop.perform(run, step, signal, late, late.first(Stop))
            return effect.perform(run, step, following, signal, plan, action)  # type: ignore[no-any-return]
    return skip.perform(run, step, following, signal, plan, Skip())


__all__ = ["carry_out", "replay", "rollback", "skip", "stop"]
