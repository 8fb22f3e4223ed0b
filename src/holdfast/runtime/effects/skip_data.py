"""Skip data: exclude a window of the data stream around the onset. Part of a rollback."""

from __future__ import annotations

from holdfast.core.base.types import Plan, SkipData
from holdfast.runtime.data.source import Position
from holdfast.runtime.effects.base import ExcludedWindow, RecoveryParts, Situation


def choose_window(
    recovery: RecoveryParts, situation: Situation, action: SkipData, restored: Position
) -> ExcludedWindow:
    """Return a window of `action.batches` batches, half of it before the onset, none of it before `restored`."""
    positions = {situation.signal.step: situation.attempt.draws[0].begin, **situation.positions}
    onset = positions.get(action.around, restored)
    start, half = restored, action.batches // 2
    if onset.epoch > restored.epoch:
        start = onset._replace(batch=max(0, onset.batch - half))
    elif onset.epoch == restored.epoch:
        start = onset._replace(batch=max(restored.batch, onset.batch - half))
    # Ranks may remember different stretches of the past: rank 0 decides.
    start = Position(*recovery.context.ranks.broadcast_object(list(start)))
    epoch, first = recovery.feeder.source.locate(start)
    return ExcludedWindow(epoch, first, action.batches, start)


def perform(recovery: RecoveryParts, plan: Plan, window: ExcludedWindow, step: int) -> None:
    """Exclude the window. The run is at the rollback's restored state."""
    source, context = recovery.feeder.source, recovery.context
    context.engine.write(
        "action",
        durable=True,
        action="skip_data",
        incident=plan.incident,
        step=step,
        batches=window.batches,
        start=window.start,
        exact=source.exact,
        reason=plan.reason,
    )
    source.exclude(window.start, window.batches, plan.reason)
    action = plan.first(SkipData)
    if action is None or not action.samples:
        return
    added = context.records.quarantine.add_samples(action.samples, plan.reason, incident=plan.incident)
    if added:
        context.engine.write("quarantine", samples=added, reason=plan.reason, incident=plan.incident)
