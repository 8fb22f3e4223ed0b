"""Skip: restore random streams and buffers to before the batch, and leave the batch out. Its update never landed."""

from __future__ import annotations

import logging
from typing import Any

from holdfast.core.base.types import Flag, Outcome, Status
from holdfast.runtime.data.bad_rows import nonfinite_samples
from holdfast.runtime.data.source import Draw
from holdfast.runtime.effects.base import RecoveryParts, Situation, Transition, origin_fields, rewind, write_action

log = logging.getLogger("holdfast")

_NONFINITE = Flag.LOSS_NONFINITE | Flag.GRAD_NONFINITE
_LISTED_IDS = 64
_NONFINITE_ROW = "the row holds NaN or Inf"


def perform(recovery: RecoveryParts, situation: Situation) -> Transition:
    """Quarantine the step's data. The attempt after it stays valid only if it saw nothing of the skipped batch."""
    context, attempt, signal, plan = recovery.context, situation.attempt, situation.signal, situation.plan
    reason = "vetoed" if plan is None else plan.reason
    incident = None if plan is None else plan.incident
    sample_ids = _find_nonfinite_samples(recovery, situation)
    write_action(
        recovery,
        situation,
        "skip",
        attempt=signal.attempt,
        reason=reason,
        data=signal.data,
        samples=sample_ids or None,
        **origin_fields(attempt),
        batches=len(attempt.draws),
        ids=_batch_ids(attempt.draws),
    )
    _log_skip(recovery, situation, reason)
    recovery.snapshots.discard_in_progress()
    _quarantine(recovery, situation, sample_ids, reason, incident)
    rewind(recovery, attempt)
    crosses_epochs = len({draw.span.epoch for draw in attempt.draws}) > 1
    following_is_valid = situation.following is None and not crosses_epochs
    if following_is_valid:
        why = recovery.feeder.source.leave_out(attempt.draws)
        if why is not None:
            context.engine.write("note", step=signal.step, message=why, data=signal.data)
    else:
        _reposition(recovery, situation)
    return Transition(Outcome(status=Status.SKIPPED, signal=signal, plan=plan), following_is_valid)


def _log_skip(recovery: RecoveryParts, situation: Situation, reason: str) -> None:
    """Log a skip: of an incident the 1st, 2nd, 4th, 8th, ... one."""
    signal, config = situation.signal, recovery.context.config
    count = max(1, recovery.context.engine.skips_in_incident())
    if count & (count - 1):
        return
    is_quiet = signal.flags & _NONFINITE and config.recover.nan_action == "skip"
    origin = situation.attempt.origin
    ranks = "" if origin is None else f"; from rank {', '.join(map(str, origin.ranks))}"
    more = "" if count == 1 else f" ({count} in this incident)"
    log.log(
        logging.INFO if is_quiet else logging.WARNING,
        "holdfast: step %d: skipped a batch%s: %s: loss %s, gradient norm %s%s",
        *(signal.step, more, reason, signal.loss, signal.grad_norm, ranks),
    )


def _batch_ids(draws: list[Draw]) -> list[Any] | None:
    """Return the indices of the first samples, if there are any."""
    ids = [sample for draw in draws for sample in draw.ids or ()][:_LISTED_IDS]
    return ids if all(isinstance(sample, int) for sample in ids) and ids else None


def _find_nonfinite_samples(recovery: RecoveryParts, situation: Situation) -> list[int]:
    """Return the ids of rows that hold NaN or Inf themselves, on any rank, if the policy quarantines them."""
    if (origin := situation.attempt.origin) is not None:
        return origin.samples
    if not situation.signal.flags & _NONFINITE or not recovery.context.config.quarantine.nonfinite_samples:
        return []
    return nonfinite_samples(situation.attempt.draws)


def _quarantine(
    recovery: RecoveryParts, situation: Situation, samples: list[int], reason: str, incident: int | None
) -> None:
    """Quarantine the step's stretch of data and the ids of its non-finite rows. The skip's own event holds both."""
    engine, quarantine = recovery.context.engine, recovery.context.records.quarantine
    signal, batches = situation.signal, len(situation.attempt.draws)
    quarantine.add_spans(signal.data, reason, step=signal.step, incident=incident)
    engine.write("quarantine", spans=signal.data, batches=batches, reason=reason, incident=incident)
    if not engine.may_quarantine_samples(signal.step, batches):
        return
    added = quarantine.add_samples(samples, _NONFINITE_ROW, incident=incident)
    if added:
        engine.write("quarantine", samples=added, reason=_NONFINITE_ROW, incident=incident)


def _reposition(recovery: RecoveryParts, situation: Situation) -> None:
    """Move the source to right after the step's data, without it, as if the epoch had continued from there."""
    source, following = recovery.feeder.source, situation.following
    if source.exact:
        source.seek(situation.attempt.draws[0].begin)
    elif following is not None and (why := source.requeue(following.draws)) is not None:
        recovery.context.engine.write(
            "note", step=situation.attempt.number, message=why, data=[draw.span for draw in following.draws]
        )
