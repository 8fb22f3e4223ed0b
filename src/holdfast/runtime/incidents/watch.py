"""Finds out where a bad step came from while the run recovers from it, and hands its bundle to be written.

The engine runs a vetoed step again by itself. That attempt is observed: it costs no further step. What the ranks saw is
exchanged, so that every rank has the same verdict.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from holdfast.core.base.plain import plain
from holdfast.core.base.types import FP32_MODULE, WITHOUT_ROWS, Finding, Kind, Plan, Replay, Rollback, Signal
from holdfast.runtime.checkpoint.manager import CheckpointManager
from holdfast.runtime.context import Context
from holdfast.runtime.effects.attempt import StepAttempt
from holdfast.runtime.incidents.batch import batches_nbytes
from holdfast.runtime.incidents.capture import (
    copy_batches,
    copy_earlier_weights,
    copy_weights,
    describe_modules,
    newest_checkpoint,
    weights_growth,
)
from holdfast.runtime.incidents.evidence import StepEvidence
from holdfast.runtime.incidents.judgement import judge_attempt
from holdfast.runtime.incidents.remedies import Remedies
from holdfast.runtime.origin.batches import bad_rows
from holdfast.runtime.origin.precision import find_outlier
from holdfast.runtime.ports.bundle_store import BundleContents, BundleStore
from holdfast.runtime.snapshots.manager import SnapshotManager
from holdfast.runtime.tensors.device_identity import describe_device
from holdfast.runtime.tensors.inspect import nbytes

log = logging.getLogger("holdfast")

_NO_CONSENT = "[replay] keep_batch is false, since the batch is your data"
_MAX_ROWS = 64
_MAX_STEPS, _MIN_SECONDS = 5, 0.25
"""every op is watched for the time of this many steps at most, or for this long if that is longer"""


class IncidentWatch:
    """Judges steps that run again, and writes bundles. The pipeline calls it only after something went wrong."""

    def __init__(
        self, context: Context, snapshots: SnapshotManager, checkpoints: CheckpointManager, store: BundleStore | None
    ) -> None:
        self._context, self._snapshots, self._checkpoints = context, snapshots, checkpoints
        self._config = context.config.replay
        self._max_bytes = self._config.max_bundle_mb * 1_000_000
        self._store = store if self._config.when != "off" and self._max_bytes > 0 else None
        self._bundled: int | None = None
        """the incident whose bundle was written last"""
        self._remedies = Remedies(context)
        self._verdict: dict[str, Any] = {}
        """of the step that ran again last"""
        self._step = 0
        """of the newest finding"""
        self._return: tuple[Plan, Signal, int] | None = None
        """a return from bad state, the step at which that was found, and the one that is known to have left it"""
        self._explained: int | None = None
        """the incident whose bad state has a verdict"""
        self._evidence: StepEvidence | None = None
        """what watches, or has watched, the newest attempt that ran again"""

    def open(self) -> None:
        """Begin to write bundles: the run directory is open."""
        if self._store is not None:
            self._store.open(self._context.records.identity, self._context.records.check_held)

    def close(self) -> None:
        """Finish the bundles, and take all hooks off the user's modules."""
        self._remedies.close()
        if self._evidence is not None:  # the loop may have left an attempt that was watched
            self._evidence.end()
        if self._store is not None:
            self._store.close()
            self._note_failures()

    @property
    def watches_again(self) -> bool:
        """Return whether steps run again after a return from bad state: something in them may make it bad again."""
        return self._return is not None

    def watch_again(self, number: int) -> StepEvidence | None:
        """Return what is to watch a step and its update: the one that left bad state, and the one that found it.

        None for the others. Watching takes the time of twice `_MAX_STEPS` steps at most, however far the run has returned.
        """
        assert self._return is not None, "watches_again"
        plan, signal, onset = self._return
        if number not in (onset, signal.step):
            return None
        self._evidence = StepEvidence(
            self._context.state,
            self._context.rng,
            plan,
            [],
            signal.loss,
            [],
            observes=True,
            seconds=max(_MIN_SECONDS, _MAX_STEPS * (signal.seconds or 0.0)),
            weights_bytes=None,
            watches_update=True,
        )
        return self._evidence

    def examine(
        self, attempt: StepAttempt, signal: Signal, findings: list[Finding], *, is_bad: bool
    ) -> Callable[[Plan], Plan] | None:
        """Judge an attempt that was watched. Return what changes the plan of the policy, if anything. All ranks call it.

        findings: what is wrong with the state.
        """
        evidence: StepEvidence = attempt.evidence
        evidence.end()
        if self._config.when != "inline":
            return None
        incident = evidence.plan.incident
        if evidence.plan.experiment:
            self._remedies.conclude(evidence.plan, self._verdict, signal, is_bad=is_bad)
            return None
        is_over = True
        if evidence.watches_update:
            made_bad = evidence.report is not None and evidence.report.phase != "none"
            is_bad = is_bad or made_bad or any(each.kind == Kind.NONFINITE_STATE for each in findings)
            is_over = self._return is None or signal.step >= self._return[1].step
        verdict = self._agree(attempt, self._judge(attempt, is_bad=is_bad) if is_bad or is_over else None)
        if verdict is None:
            return None
        self._verdict, self._return = verdict, None
        if evidence.watches_update:
            self._explained = incident
        fields = {name: value for name, value in verdict.items() if value not in (None, "", [])}
        self._context.engine.write(
            "replay",
            durable=True,
            incident=incident,
            step=signal.step,
            attempt=signal.attempt,
            result="verdict",
            **fields,
        )
        fix = f"; {verdict['fix']}" if verdict["fix"] else ""
        log.warning("holdfast: step %d: %s%s", signal.step, verdict["text"], fix)
        if not is_bad or not self._config.act or evidence.watches_update:
            return None
        return lambda plan: self._remedies.amend(plan, verdict, signal)

    def _agree(self, attempt: StepAttempt, own: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the verdict of the rank that the step came from; None if no rank has one."""
        ranks = self._context.ranks
        if ranks.size == 1:
            return own
        found = [each for each in ranks.all_gather_object(own) if each is not None]
        if not found:
            return None
        suspects = _suspects(attempt) or attempt.evidence.ranks
        weak = {"not_established": 1, "transient": 2}  # a rank that saw nothing wrong has nothing to say about another
        found.sort(key=lambda each: (each["rank"] not in suspects, weak.get(each["cause"], 0), each["rank"]))
        return {**found[0], "samples": sorted({sample for each in found for sample in each["samples"]})}

    def _judge(self, attempt: StepAttempt, *, is_bad: bool) -> dict[str, Any] | None:
        """Return this rank's verdict in plain values."""
        rows = [(n, row) for n, draw in enumerate(attempt.draws) for row in bad_rows(draw.batch)] if is_bad else []
        growth = weights_growth(self._context.state, self._snapshots, attempt.number) if is_bad else 1.0
        outlier = find_outlier(dict(self._context.state.modules)) if is_bad else None
        verdict = judge_attempt(
            attempt.evidence,
            rows,
            attempt.evidence.loss,
            is_bad=is_bad,
            batches=[draw.batch for draw in attempt.draws],
            weights_growth=growth,
            outlier="" if outlier is None else outlier.text,
        )
        if verdict is None:
            return None
        outlying = [row for draw in attempt.draws for row in bad_rows(draw.batch, outlying=True)] if is_bad else []
        if outlying and not rows and verdict["cause"] in ("structural", "not_established"):
            text = (
                f"row {outlying[0]} of the batch is out of all proportion; holdfast replay tells if it suffices alone"
            )
            verdict["against"] = [*verdict["against"], text]
        ids = [(attempt.draws[n].ids or [])[row : row + 1] for n, row in rows]
        samples = [int(each[0]) for each in ids if each and hasattr(each[0], "__index__")]
        # Only then does the naming of a device count.
        counts = not is_bad and self._config.act and not attempt.evidence.watches_update
        return {
            "rank": self._context.ranks.rank,
            **verdict,
            "rows": [row for _, row in rows[:_MAX_ROWS]],
            "outlying": outlying[:_MAX_ROWS],
            "samples": samples,
            **(describe_device() if counts else {}),
        }

    def settle(
        self,
        attempt: StepAttempt,
        signal: Signal,
        plan: Plan | None,
        following: StepAttempt | None,
        *,
        has_landed: bool,
    ) -> StepEvidence | None:
        """Write the bundle of a new incident, and return what is to watch the next attempt at the same step, if any.

        following: the next step, if it was begun already, as behind a gate on the device.
        """
        if self._config.when == "off":
            return None
        self._step = signal.step
        evidence: StepEvidence | None = attempt.evidence
        is_new = plan is not None and (bool(plan.actions) or plan.by == "observe")
        runs_again = plan is not None and plan.first(Replay) is not None
        cause = plan if is_new else None if evidence is None else evidence.plan
        next_batches = [] if following is None else [draw.batch for draw in following.draws]
        if evidence is not None:
            next_batches = next_batches or evidence.next_batches
        if cause is not None and (evidence is not None or not runs_again):
            self._save_bundle(attempt, signal, cause, next_batches, has_landed=has_landed, is_bad_again=is_new)
        if plan is not None and plan.first(Rollback) is not None:
            bad = [each for each in self._context.engine.last_findings if each.kind == Kind.NONFINITE_STATE]
            is_wanted = self._config.when == "inline" and plan.incident != self._explained
            self._return = (plan, signal, bad[0].onset) if bad and is_wanted else None
        if plan is None or not runs_again:
            return None
        if plan.experiment in (WITHOUT_ROWS, FP32_MODULE):
            self._remedies.apply(plan, self._verdict, signal)
        is_bundled = self._store is None or plan.incident == self._bundled
        self._evidence = StepEvidence(
            self._context.state,
            self._context.rng,
            plan,
            _suspects(attempt),
            signal.loss,
            next_batches,
            observes=self._config.when == "inline" and plan.experiment is None,
            seconds=max(_MIN_SECONDS, _MAX_STEPS * (signal.seconds or 0.0)),
            weights_bytes=None if is_bundled else self._max_bytes,
        )
        return self._evidence

    def _save_bundle(
        self,
        attempt: StepAttempt,
        signal: Signal,
        plan: Plan,
        next_batches: list[Any],
        *,
        has_landed: bool,
        is_bad_again: bool,
    ) -> None:
        """Hand the bundle of an incident to the store, once, on the ranks that the step came from."""
        context, store, evidence = self._context, self._store, attempt.evidence
        if store is None or plan.incident is None or plan.incident == self._bundled:
            return
        self._bundled = plan.incident
        self._note_failures()
        checkpoint = newest_checkpoint(self._checkpoints, signal.step)
        if evidence is not None and evidence.rng is not None:
            weights, why_no_weights, rng = evidence.weights, evidence.why_no_weights, evidence.rng
        else:
            weights, why_no_weights = copy_weights(context.state, attempt.buffers, self._max_bytes)
            rng = attempt.draws[0].rng or context.rng.capture()
        if not weights and checkpoint is not None:  # on all ranks, since rank 0 deletes for all
            named = [*self._checkpoints.named_by_bundles, checkpoint["name"]]
            self._checkpoints.named_by_bundles = named[-self._config.keep :]
        suspects = _suspects(attempt) or ([] if evidence is None else evidence.ranks)
        if context.ranks.rank not in (suspects or [0]):
            return
        room = self._max_bytes - sum(map(nbytes, weights.values()))
        batches, following, why_no_batch = None, None, _NO_CONSENT
        if self._config.keep_batch:
            given = [draw.batch for draw in attempt.draws]
            batches, why_no_batch = copy_batches(given, room)
            room -= 0 if batches is None else batches_nbytes(given)
        earlier, earlier_step = copy_earlier_weights(self._snapshots, signal.step, room)
        room -= sum(map(nbytes, earlier.values()))
        if batches is not None and next_batches:
            following, _ = copy_batches(next_batches, room)
        about = {
            "findings": context.engine.last_findings,
            "plan": plan.reason,
            "signal": signal,
            "moment": "after the step" if has_landed and evidence is None else "before the step",
            "failed_again": None if evidence is None or evidence.watches_update else is_bad_again,
            "parts": max(1, (attempt.parts or 1) // max(1, len(attempt.draws))),
            "modules": describe_modules(context.state.modules),
            "weights": why_no_weights or "copied",
            "batch": why_no_batch or "copied",
            "earlier_step": earlier_step,
            "checkpoint": checkpoint,
            "sample_ids": [list(draw.ids or []) for draw in attempt.draws] if self._config.keep_batch else None,
            "fp32_modules": self._remedies.fp32_names,
            "entry": self._config.entry,
            "environment": context.records.about(),
        }
        parts = {"batches": batches, "next_batches": following, "rng": rng.plain()}
        path = store.save(BundleContents(plan.incident, signal.step, plain(about), parts, {**weights, **earlier}))
        context.engine.write("replay", incident=plan.incident, step=signal.step, result="bundle", path=path)

    def _note_failures(self) -> None:
        for why in self._store.pop_failures() if self._store is not None else ():
            self._context.engine.note(self._step, why)


def _suspects(attempt: StepAttempt) -> list[int]:
    """Return the ranks that the trouble of an attempt came from; none if nothing tells, or there is one rank."""
    return [] if attempt.origin is None else attempt.origin.ranks
