"""Stop: keep the newest certified state on disk, and end the run with its diagnosis."""

from __future__ import annotations

import logging

from holdfast.core.base.errors import InstabilityError, PolicyStop
from holdfast.core.base.types import Outcome, Signal, Status, Stop, family
from holdfast.runtime.effects.base import RecoveryParts, Situation, Transition, write_action
from holdfast.runtime.record.records import Records

log = logging.getLogger("holdfast")


def perform(recovery: RecoveryParts, situation: Situation, action: Stop) -> Transition:
    """End the run with PolicyStop (exit status 70), or with InstabilityError if the policy says to raise."""
    signal, plan, context = situation.signal, situation.plan, recovery.context
    assert plan is not None
    write_action(recovery, situation, "stop", reason=action.reason, code=action.code, by=plan.by)
    before, latest = _sound_steps(recovery, situation)
    kept = recovery.checkpoints.save_certified(recovery.snapshots, before, latest)
    recovery.snapshots.discard_in_progress()
    message = _describe(context.records, signal, action, kept)
    error: BaseException
    if action.code != 70:
        error = InstabilityError(
            f"{action.reason}; loss {signal.loss}, gradient norm {signal.grad_norm}; nothing was applied"
        )
    else:
        # A SystemExit ends the process without a message, and an `except Exception` around the loop hides it.
        log.error("%s", message)
        error = PolicyStop(message, action.code)
    outcome = Outcome(status=Status.STOPPED, signal=signal, plan=plan)
    return Transition(outcome, stop_reason=action.reason, error=error)


def instead_of(recovery: RecoveryParts, situation: Situation, why: str) -> Transition:
    """Stop because the plan cannot be carried out."""
    assert situation.plan is not None
    plan = recovery.context.engine.stop_instead(situation.plan, why)
    action = plan.first(Stop)
    assert action is not None
    return perform(recovery, situation._replace(plan=plan), action)


def _sound_steps(recovery: RecoveryParts, situation: Situation) -> tuple[int, int]:
    """Return the step up to which states are sound with a margin, and the step up to which they may be.

    They are those of a rollback. Non-finite steps were vetoed and harmed no state.
    """
    committed, context = situation.committed, recovery.context
    incident = context.engine.policy_state()["incident"]
    if incident is None or family(incident["kind"]) == "nonfinite":
        return committed, committed
    latest = min(committed, max(0, incident["onset"] - 1))
    return max(0, latest - context.config.recover.rollback_margin), latest


def _describe(records: Records, signal: Signal, action: Stop, kept: str | None) -> str:
    lines = [
        f"holdfast: the run was stopped: {action.reason}",
        f"  at step {signal.step}: loss {signal.loss}, gradient norm {signal.grad_norm}, LR {signal.lr}",
    ]
    if kept is not None:
        lines.append(f"  the newest good checkpoint: {kept}")
    if records.rundir is not None:
        lines.append(f"  findings and actions: {records.rundir.journal}")
        lines.append(f"  to continue after a review: holdfast ack {records.rundir.path}")
    return "\n".join(lines)
