"""Replay: the same data once more, from the same state. What was transient does not come back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.base.types import Outcome, Plan, Replay, Signal, Skip, Status
from holdfast.runtime.step.effects import skip

if TYPE_CHECKING:
    from holdfast.runtime.step.run import Run
    from holdfast.runtime.step.step import Step


def perform(run: Run, step: Step, following: Step | None, signal: Signal, plan: Plan, action: Replay) -> bool:
    """The step is served again next; `following` is void. A stream that cannot give it again drops it instead."""
    assert run.source is not None
    draws = [*step.draws, *(following.draws if following is not None else ())]
    why = run.meeting.reason(run.source.requeue(draws))
    if why is not None:
        run.engine.write("note", step=signal.step, message=why, data=signal.data)
        return skip.perform(run, step, following, signal, plan, Skip())
    run.engine.write(
        "action",
        durable=True,
        action="replay",
        incident=plan.incident,
        step=signal.step,
        attempt=signal.attempt,
        reason=plan.reason,
        data=signal.data,
        evidence={"loss": signal.loss, "grad_norm": signal.grad_norm},
    )
    run.snapshots.discard_in_progress()
    run.rewind(step)
    outcome = Outcome(status=Status.REPLAYED, signal=signal, plan=plan)
    run.settling.not_committed(step, outcome)
    run.hooks.call("on_recovery", outcome)
    return False
