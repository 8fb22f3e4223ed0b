"""Skip: the vetoed update never landed; random streams and buffers go back to before the batch, and it is left out."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from holdfast.core.base.types import Flag, Outcome, Plan, Signal, Skip, Status, family
from holdfast.runtime.data.nonfinite_rows import nonfinite_samples

if TYPE_CHECKING:
    from holdfast.runtime.step.run import Run
    from holdfast.runtime.step.step import Step

log = logging.getLogger("holdfast")


def perform(run: Run, step: Step, following: Step | None, signal: Signal, plan: Plan | None, action: Skip) -> bool:
    """False where the data was put back: `following`, computed on what the batch left behind, is void."""
    assert run.source is not None
    reason = "vetoed" if plan is None else plan.reason
    incident = None if plan is None else plan.incident
    rows = _bad_rows(run, step, signal)
    run.engine.write(
        "action",
        durable=True,
        action="skip",
        incident=incident,
        step=signal.step,
        attempt=signal.attempt,
        reason=reason,
        data=signal.data,
        samples=rows or None,
        ranks=None if step.origin is None else step.origin.ranks,
        suspects=None if step.origin is None else step.origin.evidence["suspects"],
        batches=len(step.draws),
        evidence={"loss": signal.loss, "grad_norm": signal.grad_norm},
    )
    if family(reason) == "nonfinite" and run.config.recover.nan_action != "skip":
        ranks = [] if step.origin is None else step.origin.ranks
        whose = f"; from rank {', '.join(map(str, ranks))}" if ranks else ""
        log.warning("step %d skipped: loss %s, gradient norm %s%s", signal.step, signal.loss, signal.grad_norm, whose)
    run.snapshots.discard_in_progress()
    leave_out(run, step, signal, rows, reason, incident)
    run.rewind(step)
    crossed = len({d.span.epoch for d in step.draws}) > 1
    goes_on = following is None and not crossed
    if not goes_on:
        put_back(run, step, following)
    outcome = Outcome(status=Status.SKIPPED, signal=signal, plan=plan)
    run.settling.not_committed(step, outcome)
    run.hooks.call("on_recovery", outcome)
    return goes_on


def _bad_rows(run: Run, step: Step, signal: Signal) -> list[int]:
    """The ids of rows that are themselves broken, where they are to be remembered; on any rank."""
    if step.origin is not None:
        return step.origin.samples
    broken = signal.flags & (Flag.LOSS_NONFINITE | Flag.GRAD_NONFINITE)
    return nonfinite_samples(step.draws) if broken and run.config.quarantine.nonfinite_samples else []


def leave_out(run: Run, step: Step, signal: Signal, rows: list[int], reason: str, incident: int | None) -> None:
    """Quarantine the step's stretch of data, and the ids of its broken rows. The skip's own event has both."""
    quarantine = run.records.quarantine
    quarantine.add_spans(signal.data, reason, step=signal.step, incident=incident)
    run.engine.write("quarantine", spans=signal.data, batches=len(step.draws), reason=reason, incident=incident)
    added = quarantine.add_samples(rows, "the row holds NaN or Inf", incident=incident)
    if added:
        run.engine.write("quarantine", samples=added, reason="the row holds NaN or Inf", incident=incident)


def put_back(run: Run, step: Step, following: Step | None) -> None:
    """Stand right after the step's data, without it, as if its epoch had gone on from there."""
    assert run.source is not None
    if run.source.exact:
        run.source.seek(step.draws[0].begin)
    elif following is not None and (why := run.source.requeue(following.draws)) is not None:
        run.engine.write("note", step=step.number, message=why, data=[d.span for d in following.draws])
