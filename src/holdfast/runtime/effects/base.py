"""What effects work with, what they are given, and what they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.core.base.types import Outcome, Plan, Signal
from holdfast.core.checkpoints.recovery_history import Intervention
from holdfast.runtime.agree.coordinator import RankCoordinator
from holdfast.runtime.checkpoint.manager import CheckpointManager
from holdfast.runtime.context import Context
from holdfast.runtime.data.feeder import Feeder
from holdfast.runtime.data.source import Position
from holdfast.runtime.effects.attempt import StepAttempt
from holdfast.runtime.snapshots.manager import SnapshotManager


class RecoveryParts(NamedTuple):
    """The parts of a run that effects use."""

    context: Context
    feeder: Feeder
    coordinator: RankCoordinator
    snapshots: SnapshotManager
    checkpoints: CheckpointManager


class ExcludedWindow(NamedTuple):
    """`batches` batches, from batch `first` of an epoch on."""

    epoch: int
    first: int
    batches: int
    start: Position


class Situation(NamedTuple):
    """Holds a settled step that needs an action."""

    attempt: StepAttempt
    following: StepAttempt | None
    """the attempt that was computed meanwhile, on top of this one"""
    signal: Signal
    plan: Plan | None
    is_vetoed: bool
    committed: int
    """steps committed so far"""
    positions: Mapping[int, Position]
    """data position at which each committed step began"""


class Transition(NamedTuple):
    """Holds what an effect decided about the run's progress; the pipeline applies it."""

    outcome: Outcome | None
    """None: the step keeps its update"""
    following_is_valid: bool = False
    """whether the attempt computed meanwhile may be used; otherwise its data was requeued"""
    outcome_fields: Mapping[str, Any] = {}
    """further fields of the outcome's event"""
    rolled_back_to: int | None = None
    excluded: ExcludedWindow | None = None
    """the data to exclude once the run is back at that step"""
    interventions: Sequence[Intervention] = ()
    stop_reason: str | None = None
    error: BaseException | None = None
    """raised once the outcome is on record"""


def origin_fields(attempt: StepAttempt) -> dict[str, Any]:
    """Return the journal fields that name the ranks and samples an attempt's trouble came from."""
    if attempt.origin is None:
        return {}
    return {"ranks": attempt.origin.ranks, "suspects": attempt.origin.evidence["suspects"]}


def write_action(
    recovery: RecoveryParts, situation: Situation, action: str, *, evidence: Mapping[str, Any] = {}, **fields: Any
) -> None:
    """Journal an action on a step, forced to disk, before it takes effect."""
    signal, plan = situation.signal, situation.plan
    recovery.context.engine.write(
        "action",
        durable=True,
        action=action,
        incident=None if plan is None else plan.incident,
        step=signal.step,
        **fields,
        evidence={"loss": signal.loss, "grad_norm": signal.grad_norm, **evidence},
    )


def rewind(recovery: RecoveryParts, attempt: StepAttempt) -> None:
    """Restore random streams, buffers and LR schedule to what they were before the attempt's data was loaded."""
    context = recovery.context
    rng = recovery.feeder.source.rewind_to(attempt.draws[0]) if attempt.draws else None
    if rng is not None:
        context.rng.restore(rng)
    context.state.buffers.restore(attempt.buffers)
    if attempt.schedule is not None:
        context.state.restore_schedule(attempt.schedule)
