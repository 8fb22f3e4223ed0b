"""Roll back: everything returns to a certified state; then data, LR and clip as the plan says.

All of it is in one event, forced to disk before anything takes effect: a life that ends in between is followed by one that
finds the data excluded and makes the same interventions at the same step. On a device the tensors are back before that,
since only there is it seen whether they are what was certified, and so how far back it goes. That outlives no process; and
if the event cannot be written, or nothing holds, the snapshot manager refuses to save them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from holdfast.core.base.types import Outcome, Plan, Rollback, Signal, SkipData, Status, Stop
from holdfast.runtime.checkpoint.serialization import Found, in_memory
from holdfast.runtime.step.effects import interventions, skip_data, stop

if TYPE_CHECKING:
    from holdfast.runtime.step.run import Run
    from holdfast.runtime.step.step import Step

log = logging.getLogger("holdfast")


def perform(run: Run, step: Step, signal: Signal, plan: Plan, action: Rollback) -> bool:
    """The run stands at the snapshot when this returns, or is stopped where there is none to trust. Always False."""
    assert run.source is not None
    began = run.clock.monotonic()
    found, told = _find(run, action)
    if found is None:
        run.engine.write("note", step=signal.step, message="no snapshot to return to", passed_over=told)
        why = f"no certified snapshot at or before step {action.at_latest} to return to"
        late = run.engine.stop_instead(plan, why)
        stop.perform(run, step, signal, late, late.first(Stop))
    assert found is not None
    undone, positions = run.step, dict(run.positions)
    positions.setdefault(signal.step, step.draws[0].begin)
    data: SkipData | None = plan.first(SkipData)
    window = None if data is None else skip_data.window(run, data, positions, found.position)
    then = interventions.interventions_of(plan, found.step)
    branch = run.checkpoints.go_back(found)
    run.engine.write(
        "action",
        durable=True,
        action="rollback",
        incident=plan.incident,
        step=signal.step,
        from_step=undone,
        to_step=found.step,
        reason=plan.reason,
        by=plan.by,
        passed_over=told or None,
        evidence={"loss": signal.loss, "grad_norm": signal.grad_norm, "before": action.before},
        restored_from=found.where,
        ranks=None if step.origin is None else step.origin.ranks,
        suspects=None if step.origin is None else step.origin.evidence["suspects"],
        branch=branch,
        lineage=run.checkpoints.lineage,
        interventions_kept=found.turns,
        interventions=then,
        skip_window=None if window is None else window._asdict(),
    )
    run.history.rolled_back(found.turns, then)
    run.checkpoints.leave_behind(f"left by the rollback to step {found.step}: {plan.reason}")
    lost = (undone - found.step) * (signal.seconds or 0.0)
    before = run.source.position
    found.put_back()
    run.engine.load_state_dict(found.detectors)
    if not run.source.exact and before != found.position:
        gone = before.batch - found.position.batch
        message = f"the loader does not go back: {gone} batches drawn since step {found.step} are not served again"
        run.engine.write("note", step=signal.step, message=message, batches=gone)
    run.returned_to(found.step)
    run.engine.policy.rolled_back_to(found.step)
    if window is not None:
        skip_data.perform(run, plan, window)
    interventions.with_rollback(run, then)
    outcome = Outcome(status=Status.ROLLED_BACK, signal=signal, plan=plan)
    lost += run.clock.monotonic() - began
    run.settling.not_committed(step, outcome, from_step=undone, to_step=found.step, seconds_lost=lost)
    log.warning("step %d: %s: rolled back to step %d", signal.step, plan.reason, found.step)
    run.hooks.call("on_recovery", outcome)
    return False


def _find(run: Run, action: Rollback) -> tuple[Found | None, list[dict[str, Any]]]:
    """Memory before disk, newest first; and every one that was passed over, with the reason.

    One that is old enough on disk comes before one in memory that is not, if it lies where a full ring would have had one:
    a life that has just begun remembers nothing older than where it began, and is to land where the life before it would
    have landed. One that is much older would cost more than it is worth.
    """
    snapshot, passed = run.snapshots.find_restore_point(action.before, action.at_latest)
    told: list[dict[str, Any]] = [{"step": p.step, "why": p.why} for p in passed]
    memory = None if snapshot is None or snapshot.position is None else in_memory(run, snapshot)
    if memory is not None and memory.step <= action.before:
        return memory, told
    oldest, latest = 0, action.at_latest
    if memory is not None:
        every = run.ranks.broadcast_object(run.snapshots.ring.every_steps)
        oldest, latest = run.step - 4 * (run.step - action.before) - 2 * every, action.before
    found, over = run.checkpoints.find(action.before, latest, oldest)
    return found or memory, [*told, *({"step": p.step, "name": p.name, "why": p.why} for p in over)]
