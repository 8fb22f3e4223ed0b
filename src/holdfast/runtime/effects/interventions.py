"""Change the LR or the clip for a while: with a recovery, or again when a later process reaches the same step.

They apply to one update at a time and are taken off after it. No scheduler reads them.
"""

from __future__ import annotations

import logging
from typing import Any

from holdfast.core.base.types import CutLR, HoldLR, Plan, TightenClip
from holdfast.core.checkpoints.recovery_history import Intervention
from holdfast.runtime.context import Context

log = logging.getLogger("holdfast")


def interventions_of(plan: Plan, step: int) -> list[Intervention]:
    """Return the interventions of a plan, to be applied when `step` steps are committed."""
    actions = [plan.first(CutLR), plan.first(HoldLR), plan.first(TightenClip)]
    return [Intervention(step, action, plan.incident, plan.reason) for action in actions if action is not None]


def apply(
    context: Context, step: int, intervention: Intervention, *, part_of_rollback: bool = False, is_repeat: bool = False
) -> None:
    """Journal one intervention and apply it from the next update on.

    part_of_rollback: the rollback's own event holds it already. is_repeat: a previous process applied it at this step.
    """
    action, current, scheduled = intervention.action, context.state.interventions, context.state.optimizers.lr()
    details: dict[str, Any]
    if isinstance(action, CutLR):
        name, what = "cut_lr", f"the LR is cut to {action.factor:g} of {scheduled:g}, back in {action.ramp_steps} steps"
        details = {"factor": action.factor, "ramp_steps": action.ramp_steps, "lr_to": scheduled * action.factor}
        details["lr_from"] = scheduled * current.lr_factor(scheduled, step)
    elif isinstance(action, HoldLR):
        name, what = "hold_lr", f"from step {action.from_step} on the LR is {action.ratio:.3g} of the one that is set"
        details = {"max_lr": action.max_lr, "ratio": action.ratio, "from_step": action.from_step}
    else:
        name, what = "tighten_clip", f"the gradient clip is {action.max_norm:g} for {action.steps} steps"
        details = {"max_norm": action.max_norm, "steps": action.steps}
    message = f"{what}, as a previous process did here" if is_repeat else what
    context.engine.write(
        "note" if is_repeat else "action",
        durable=True,
        action=name,
        message=message if is_repeat else None,
        incident=intervention.incident,
        step=step,
        **details,
        reason=intervention.reason,
        intervention=intervention,
        part_of_rollback=part_of_rollback or None,
    )
    current.apply(action)
    log.warning("holdfast: step %d: %s", step, message)


def repeat_due(context: Context, step: int) -> None:
    """Apply again what a previous process applied, if the run resumed from before it and has reached its step."""
    for intervention in context.history.due(context.state.interventions.applied, step):
        apply(context, step, intervention, is_repeat=True)
