"""Cut the LR: a factor around every update, ramped back linearly, never written where the scheduler reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.types import CutLR, Plan
from holdfast.runtime.schedule import Ramp

if TYPE_CHECKING:
    from holdfast.runtime.run import Run


def perform(run: Run, plan: Plan, action: CutLR) -> None:
    """From the next committed step on: factor, factor + (1 - factor) / ramp, ..., 1."""
    scheduled = run.state.optimizers.lr()
    run.engine.write(
        "action",
        durable=True,
        action="cut_lr",
        incident=plan.incident,
        step=run.step,
        factor=action.factor,
        ramp_steps=action.ramp_steps,
        lr_from=scheduled * run.state.interventions.factor(),
        lr_to=scheduled * action.factor,
        reason=plan.reason,
    )
    run.state.interventions.ramp = Ramp(action.factor, action.ramp_steps)
