"""Stop: the end of the run, with what is known of the reason."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NoReturn

from holdfast.core.base.errors import InstabilityError, PolicyStop
from holdfast.core.base.types import Outcome, Plan, Signal, Status, Stop

if TYPE_CHECKING:
    from holdfast.runtime.step.run import Run
    from holdfast.runtime.step.step import Step

log = logging.getLogger("holdfast")


def perform(run: Run, step: Step, signal: Signal, plan: Plan, action: Stop) -> NoReturn:
    """Write it down and raise: PolicyStop (exit status 70), or InstabilityError where the policy says to raise."""
    run.engine.write(
        "action",
        durable=True,
        action="stop",
        incident=plan.incident,
        step=signal.step,
        reason=action.reason,
        code=action.code,
        by=plan.by,
        evidence={"loss": signal.loss, "grad_norm": signal.grad_norm},
    )
    run.snapshots.discard_in_progress()
    run.stopping = action.reason
    outcome = Outcome(status=Status.STOPPED, signal=signal, plan=plan)
    run.settling.not_committed(step, outcome)
    if action.code != 70:
        raise InstabilityError(
            f"{action.reason}; loss {signal.loss}, gradient norm {signal.grad_norm}; nothing was applied"
        )
    message = _diagnosis(run, signal, action)
    # A SystemExit that nobody catches ends the process without a word.
    log.error("%s", message)
    raise PolicyStop(message, action.code)


def _diagnosis(run: Run, signal: Signal, action: Stop) -> str:
    lines = [
        f"holdfast stopped the run: {action.reason}",
        f"  at step {signal.step}: loss {signal.loss}, gradient norm {signal.grad_norm}, LR {signal.lr}",
    ]
    rundir = run.records.rundir
    if rundir is not None:
        lines.append(f"  what was found and tried: {rundir.journal}")
        lines.append(f"  when a person has looked: holdfast ack {rundir.path}")
    return "\n".join(lines)
