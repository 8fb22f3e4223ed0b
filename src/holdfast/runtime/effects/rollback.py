"""Roll back: restore a certified state, then exclude data and change LR or clip as the plan says.

One event holds all of it and is forced to disk before anything takes effect. If the process dies in between, the next one
excludes the same data and applies the same interventions at the same step. On a device the tensors are restored before the
event: only there can they be compared with what was certified. If the event cannot be written, or no state verifies, the
snapshot manager refuses to save them.
"""

from __future__ import annotations

import logging
from typing import Any

from holdfast.core.base.types import Outcome, Rollback, SkipData, Status
from holdfast.runtime.checkpoint.serialization import RestorePoint, restore_point_in_memory
from holdfast.runtime.effects import interventions, skip_data, stop
from holdfast.runtime.effects.base import RecoveryParts, Situation, Transition, origin_fields, write_action

log = logging.getLogger("holdfast")


def perform(recovery: RecoveryParts, situation: Situation, action: Rollback) -> Transition:
    """Restore the newest certified state the action admits. Stops the run if there is none."""
    context, source, signal, plan = recovery.context, recovery.feeder.source, situation.signal, situation.plan
    assert plan is not None
    engine = context.engine
    began = context.clock.monotonic()
    point, rejected = _find(recovery, situation, action)
    if point is None:
        engine.write("note", step=signal.step, message="no snapshot to return to", passed_over=rejected)
        why = f"no certified snapshot at or before step {action.at_latest} to return to"
        if plan.experiment is not None:
            engine.cannot_return(plan, signal.step, why)
            return Transition(outcome=None, following_is_valid=True)
        return stop.instead_of(recovery, situation, why)
    window = None
    if (skip_action := plan.first(SkipData)) is not None:
        window = skip_data.choose_window(recovery, situation, skip_action, point.position)
    planned = interventions.interventions_of(plan, point.step)
    branch = recovery.checkpoints.fork(point.lineage, point.step)
    write_action(
        recovery,
        situation,
        "rollback",
        from_step=situation.committed,
        to_step=point.step,
        reason=plan.reason,
        by=plan.by,
        passed_over=rejected or None,
        evidence={"before": action.before},
        restored_from=point.name,
        **origin_fields(situation.attempt),
        branch=branch,
        lineage=recovery.checkpoints.lineage,
        interventions_kept=point.interventions,
        interventions=planned,
        skip_window=None if window is None else window._asdict(),
    )
    context.history.rolled_back(point.interventions, planned)
    if action.restore_data and source.exact and plan.incident is not None:
        _put_data_back(recovery, plan.incident, point.step)
    recovery.checkpoints.quarantine_abandoned(f"left by the rollback to step {point.step}: {plan.reason}")
    lost_seconds = (situation.committed - point.step) * (signal.seconds or 0.0)
    position_before = source.position
    for warning in point.restore():
        engine.note(point.step, warning)
    engine.rolled_back(point.detectors, point.step)
    if not source.exact and position_before != point.position:
        lost = position_before.batch - point.position.batch
        message = f"the loader cannot go back: {lost} batches drawn since step {point.step} are not served again"
        engine.write("note", step=signal.step, message=message, batches=lost)
    lost_seconds += context.clock.monotonic() - began
    log.warning("holdfast: step %d: %s: back at step %d", signal.step, plan.reason, point.step)
    return Transition(
        Outcome(status=Status.ROLLED_BACK, signal=signal, plan=plan),
        outcome_fields={"from_step": situation.committed, "to_step": point.step, "seconds_lost": lost_seconds},
        rolled_back_to=point.step,
        excluded=window,
        interventions=planned,
    )


def _put_data_back(recovery: RecoveryParts, incident: int, step: int) -> None:
    """Serve the batches again that an incident has left out."""
    quarantine, engine = recovery.context.records.quarantine, recovery.context.engine
    spans = quarantine.left_out_by(incident)
    if spans:
        why = "the data was not the cause"
        engine.write("released", durable=True, incident=incident, step=step, spans=spans, reason=why)
        quarantine.release(spans)
        log.warning("holdfast: step %d: %d batches that were left out are served again", step, len(spans))


def _find(
    recovery: RecoveryParts, situation: Situation, action: Rollback
) -> tuple[RestorePoint | None, list[dict[str, Any]]]:
    """Return the state to restore, and every rejected one with the reason. Memory comes before disk, newest first.

    A checkpoint from before the onset comes before a snapshot that is too young or far too old, if it is where a full ring
    would have had a snapshot. A process that has just started holds no older snapshots, and must land where the process
    before it would have landed. A much older checkpoint would cost more than it is worth. If few snapshots fit into
    memory, the others are checkpoints.
    """
    context, snapshots = recovery.context, recovery.snapshots
    snapshot, rejected_snapshots = snapshots.find_restore_point(action.before, action.at_latest)
    rejected: list[dict[str, Any]] = [{"step": each.step, "why": each.why} for each in rejected_snapshots]
    in_memory = None
    if snapshot is not None and snapshot.position is not None:
        in_memory = restore_point_in_memory(snapshot, snapshots, recovery.feeder.source)
        if in_memory.step <= action.before and not snapshots.ring.is_limited:
            return in_memory, rejected
    oldest, latest = 0, action.at_latest
    if in_memory is not None:
        every = context.ranks.broadcast_object(snapshots.ring.every_steps)
        oldest = situation.committed - 4 * (situation.committed - action.before) - 2 * every
        latest = action.before
        if oldest <= in_memory.step <= action.before:
            return in_memory, rejected
        if in_memory.step <= action.before:
            oldest = in_memory.step + 1
    on_disk, rejected_files = recovery.checkpoints.find(snapshots, action.before, latest, oldest)
    rejected += [{"step": each.step, "name": each.name, "why": each.why} for each in rejected_files]
    return on_disk or in_memory, rejected
