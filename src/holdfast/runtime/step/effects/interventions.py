"""What a plan lays over the schedule: now, with a rollback, or again in a later life that comes by the same step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.core.base.types import CutLR, Plan, TightenClip
from holdfast.core.checkpoints.recovery_history import Turn
from holdfast.runtime.step.effects import cut_lr, tighten_clip

if TYPE_CHECKING:
    from holdfast.runtime.step.run import Run


def turns_of(plan: Plan, step: int) -> list[Turn]:
    """The interventions of a plan, as they are to be made when `step` steps are committed."""
    chosen = [plan.first(CutLR), plan.first(TightenClip)]
    return [Turn(step, action, plan.incident, plan.reason) for action in chosen if action is not None]


def intervene(run: Run, plan: Plan) -> None:
    """Without a rollback: from the next update on."""
    for turn in turns_of(plan, run.step):
        run.history.turns.append(turn)
        _perform(run, turn, part=False)


def with_rollback(run: Run, turns: Sequence[Turn]) -> None:
    """The rollback has landed, and its event says what comes with it."""
    for turn in turns:
        _perform(run, turn, part=True)


def again(run: Run) -> None:
    """The run goes on from before an intervention of an earlier life: it is made again where it was made."""
    for turn in run.history.due(run.state.interventions.turns, run.step):
        _perform(run, turn, part=False, again=True)


def _perform(run: Run, turn: Turn, *, part: bool, again: bool = False) -> None:
    if isinstance(turn.action, CutLR):
        cut_lr.perform(run, turn, turn.action, part=part, again=again)
    else:
        tighten_clip.perform(run, turn, turn.action, part=part, again=again)
