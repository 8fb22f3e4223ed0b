"""Roll back: everything returns to a certified snapshot; then data, LR and clip as the plan says."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from holdfast.core.types import CutLR, Outcome, Plan, Rollback, Signal, SkipData, Status, Stop, TightenClip
from holdfast.runtime.effects import cut_lr, skip_data, stop, tighten_clip

if TYPE_CHECKING:
    from holdfast.runtime.run import Run
    from holdfast.runtime.step import Step

log = logging.getLogger("holdfast")


def perform(run: Run, step: Step, signal: Signal, plan: Plan, action: Rollback) -> bool:
    """The run stands at the snapshot when this returns, or is stopped where there is none to trust. Always False."""
    assert run.source is not None
    began = run.clock.monotonic()
    snapshot, passed = run.keeper.find(action.before, action.at_latest)
    told: list[dict[str, Any]] = [{"step": p.step, "why": p.why} for p in passed]
    if snapshot is None or snapshot.position is None:
        run.engine.write("note", step=signal.step, message="no snapshot to return to", passed_over=told)
        why = f"no certified snapshot at or before step {action.at_latest} to return to"
        late = run.engine.impossible(plan, why)
        stop.perform(run, step, signal, late, late.first(Stop))
    assert snapshot is not None and snapshot.position is not None
    run.engine.write(
        "action",
        durable=True,
        action="rollback",
        incident=plan.incident,
        step=signal.step,
        from_step=run.step,
        to_step=snapshot.step,
        reason=plan.reason,
        by=plan.by,
        passed_over=told or None,
        evidence={"loss": signal.loss, "grad_norm": signal.grad_norm, "before": action.before},
    )
    undone, positions = run.step, dict(run.positions)
    positions.setdefault(signal.step, step.draws[0].begin)
    lost = (undone - snapshot.step) * (signal.seconds or 0.0)
    run.keeper.restore(snapshot)
    run.engine.load_state_dict(snapshot.detectors)
    if not run.source.exact and run.source.position != snapshot.position:
        gone = run.source.position.batch - snapshot.position.batch
        message = f"the loader does not go back: {gone} batches drawn since step {snapshot.step} are not served again"
        run.engine.write("note", step=signal.step, message=message, batches=gone)
    run.source.seek(snapshot.position)
    run.returned_to(snapshot.step)
    run.engine.policy.landed(snapshot.step)
    if (data := plan.first(SkipData)) is not None:
        skip_data.perform(run, plan, data, positions, snapshot.position)
    if (cut := plan.first(CutLR)) is not None:
        cut_lr.perform(run, plan, cut)
    if (tighten := plan.first(TightenClip)) is not None:
        tighten_clip.perform(run, plan, tighten)
    outcome = Outcome(status=Status.ROLLED_BACK, signal=signal, plan=plan)
    lost += run.clock.monotonic() - began
    run.not_committed(step, outcome, from_step=undone, to_step=snapshot.step, seconds_lost=lost)
    log.warning("step %d: %s: rolled back to step %d", signal.step, plan.reason, snapshot.step)
    run.hooks.call("on_recovery", outcome)
    return False
