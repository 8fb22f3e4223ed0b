"""Cut the LR: a factor around every update, ramped back linearly, never written where the scheduler reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.checkpoints.recovery_history import Intervention
from holdfast.runtime.state.schedule import LrRamp

if TYPE_CHECKING:
    from holdfast.core.base.types import CutLR
    from holdfast.runtime.step.run import Run


def perform(
    run: Run, intervention: Intervention, action: CutLR, *, part_of_rollback: bool, again: bool = False
) -> None:
    """From the next committed step on: factor, factor + (1 - factor) / ramp, ..., 1.

    `part_of_rollback`: a rollback's own event has it on record already. `again`: an earlier life did it, at this step.
    """
    scheduled = run.state.optimizers.lr()
    run.engine.write(
        "note" if again else "action",
        durable=True,
        action="cut_lr",
        message="an earlier life of the run cut the LR here" if again else None,
        incident=intervention.incident,
        step=run.step,
        factor=action.factor,
        ramp_steps=action.ramp_steps,
        lr_from=scheduled * run.state.interventions.lr_factor(),
        lr_to=scheduled * action.factor,
        reason=intervention.reason,
        intervention=intervention,
        part_of_rollback=part_of_rollback or None,
    )
    run.state.interventions.lr_ramp = LrRamp(action.factor, action.ramp_steps)
    run.state.interventions.applied += 1
