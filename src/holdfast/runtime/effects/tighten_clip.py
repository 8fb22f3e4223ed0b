"""Tighten the clip: a lower maximum norm for a number of committed steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.types import Plan, TightenClip

if TYPE_CHECKING:
    from holdfast.runtime.run import Run


def perform(run: Run, plan: Plan, action: TightenClip) -> None:
    run.engine.write(
        "action",
        durable=True,
        action="tighten_clip",
        incident=plan.incident,
        step=run.step,
        max_norm=action.max_norm,
        steps=action.steps,
        reason=plan.reason,
    )
    run.state.interventions.clip = action.max_norm
    run.state.interventions.clip_left = action.steps
