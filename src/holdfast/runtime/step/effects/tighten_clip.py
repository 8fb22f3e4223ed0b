"""Tighten the clip: a lower maximum norm for a number of committed steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.checkpoints.recovery_history import Intervention

if TYPE_CHECKING:
    from holdfast.core.base.types import TightenClip
    from holdfast.runtime.step.run import Run


def perform(
    run: Run, intervention: Intervention, action: TightenClip, *, part_of_rollback: bool, again: bool = False
) -> None:
    """`part_of_rollback`: a rollback's own event has it on record already. `again`: an earlier life did it, at this step."""
    run.engine.write(
        "note" if again else "action",
        durable=True,
        action="tighten_clip",
        message="an earlier life of the run tightened the clip here" if again else None,
        incident=intervention.incident,
        step=run.step,
        max_norm=action.max_norm,
        steps=action.steps,
        reason=intervention.reason,
        intervention=intervention,
        part_of_rollback=part_of_rollback or None,
    )
    run.state.interventions.tightened_clip = action.max_norm
    run.state.interventions.clip_steps_left = action.steps
    run.state.interventions.applied += 1
