"""What a plan lays over the schedule: now, with a rollback, or again in a later life that comes by the same step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.core.base.types import CutLR, Plan, TightenClip
from holdfast.core.checkpoints.recovery_history import Intervention
from holdfast.runtime.step.effects import cut_lr, tighten_clip

if TYPE_CHECKING:
    from holdfast.runtime.step.run import Run


def interventions_of(plan: Plan, step: int) -> list[Intervention]:
    """The interventions of a plan, as they are to be made when `step` steps are committed."""
    chosen = [plan.first(CutLR), plan.first(TightenClip)]
    return [Intervention(step, action, plan.incident, plan.reason) for action in chosen if action is not None]


def intervene(run: Run, plan: Plan) -> None:
    """Without a rollback: from the next update on."""
    for intervention in interventions_of(plan, run.step):
        run.history.interventions.append(intervention)
        _perform(run, intervention, part_of_rollback=False)


def with_rollback(run: Run, interventions: Sequence[Intervention]) -> None:
    """The rollback has landed, and its event says what comes with it."""
    for intervention in interventions:
        _perform(run, intervention, part_of_rollback=True)


def again(run: Run) -> None:
    """The run goes on from before an intervention of an earlier life: it is made again where it was made."""
    for intervention in run.history.due(run.state.interventions.applied, run.step):
        _perform(run, intervention, part_of_rollback=False, again=True)


def _perform(run: Run, intervention: Intervention, *, part_of_rollback: bool, again: bool = False) -> None:
    if isinstance(intervention.action, CutLR):
        cut_lr.perform(run, intervention, intervention.action, part_of_rollback=part_of_rollback, again=again)
    else:
        tighten_clip.perform(run, intervention, intervention.action, part_of_rollback=part_of_rollback, again=again)
