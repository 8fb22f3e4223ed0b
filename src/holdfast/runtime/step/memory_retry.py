"""Out of memory: undo the step, give the guard's own device memory back, split the micro-batch, serve the step again.

One process heals by itself. Under DDP, a rank that ran out of memory before gradients are averaged serves a filler: the
smallest piece of its batch, with gradients of zero. The other ranks finish their backward with it. The filler's row holds
no loss, so no update lands on any rank. A request in the same exchange tells all ranks to serve the step again, split. If a
peer may be inside a collective, the ranks end, and the next processes read the split from the record of the failure.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import OutOfMemoryError, Tensor, nn

from holdfast.core.base.config import OomSection
from holdfast.core.base.errors import HoldfastError, StepError, first_line
from holdfast.core.base.types import Outcome, Plan, Replay, Rollback, Status
from holdfast.core.decide.batch_splits import ANY_SHAPE, BatchSplits
from holdfast.runtime.data.pieces import (
    FailedPart,
    LabelRule,
    Piece,
    Weigh,
    cut,
    misplaced_samples,
    shape_of,
    shares_of,
    sizes_of,
)
from holdfast.runtime.data.split import Splitter, tensors_of
from holdfast.runtime.effects.attempt import StepAttempt
from holdfast.runtime.effects.base import RecoveryParts, rewind
from holdfast.runtime.state.rng import RngState
from holdfast.runtime.step.loss_trial import LossTrial
from holdfast.runtime.tensors.free_frames import free_pinned
from holdfast.runtime.update.gradient_sync import GradientSync

log = logging.getLogger("holdfast")

_ADVICE = (
    "to make it fit: a shorter sequence, activation checkpointing, a smaller or lower-precision model, an optimizer with "
    "less state, sharding over more devices, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True if much memory is "
    "reserved but unallocated"
)
_MAX_UPDATE_FAILURES = 2
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class _Retry(NamedTuple):
    """What to do about a micro-batch that did not fit."""

    shape: str
    parts: int
    reason: str


class MemoryRetry:
    """Decides how a step that ran out of memory is served again, and cuts micro-batches as learned."""

    def __init__(self, recovery: RecoveryParts, sync: GradientSync) -> None:
        self._recovery, self._sync = recovery, sync
        self._context = context = recovery.context
        self._config: OomSection = context.config.oom
        self._is_distributed = recovery.coordinator.is_distributed
        self.is_armed = self._config.action == "split" and context.config.recover.mode == "heal"
        """the policy allows splits"""
        self._can_fill = self._config.ranks == "auto" and sync.has_only_ddp and not self._has_collectives_in_forward()
        self.splits: BatchSplits = context.state.splits
        self.splits.is_for_ranks = self._is_distributed
        # A trial that fails costs a restart if the ranks cannot agree in time.
        may_grow = not self._is_distributed or self._can_fill
        self.splits.grow_after = self._config.grow_after_steps if may_grow else 0
        self.is_splitting = False
        """micro-batches go through `pieces`"""
        self.is_filling = False
        """the next step drawn is a filler for the other ranks"""
        self.wanted_parts = 0
        """for the record of a failure: what the next processes split micro-batches into; 0: it was no such failure"""
        self.splitter: Splitter | None = None
        """the user's own"""
        self.default_splitter: Splitter | None = None
        """the driver's, if the user has none"""
        self.weigh: Weigh | None = None
        self._requests: list[dict[str, Any]] = []
        self._update_failures: tuple[int, int] = (0, 0)
        self._said: set[str] = set()
        self._served_rng: RngState | None = None
        self.trial = LossTrial()
        self._serves_again = False
        """the step failed in a trial"""
        self._tries_again = False
        """also in a process that takes a split over: its driver loses no step if a trial fails"""
        self._has_own_splitter = False
        self._begun_in: StepAttempt | None = None
        self._begun = 0
        """micro-batches of that attempt that went through `pieces`"""
        self._counted = 0
        """parts of the attempt that had a loss before the last of them"""

    def restart_ranks(self) -> None:
        """After an error on one of several ranks have all of them restarted: the loop cannot serve a filler."""
        self._can_fill, self._tries_again = False, True
        if self._is_distributed:
            self.splits.grow_after = 0

    def begin(self, journaled: dict[str, int]) -> None:
        """Take over what earlier processes have learned. All ranks call it, and take over what rank 0 has."""
        self.splits.adopt(journaled)
        if self._is_distributed:
            self.splits.replace(self._context.ranks.broadcast_object(self.splits.state_dict()))
        self.is_splitting = self.splits.is_active
        may_try = self._tries_again and not self._is_distributed  # ranks could run different numbers of forwards
        self.trial.is_wanted = may_try and self.is_splitting and not self._inexact_reasons()

    # ---- serving pieces

    def pieces(
        self, attempt: StepAttempt, part: Any, samples: int | None, splitter: Splitter | None = None
    ) -> list[Piece]:
        """Return the pieces in which a micro-batch is served."""
        splitter = splitter or self.splitter
        self._has_own_splitter = splitter is not None
        splitter = splitter or self.default_splitter
        if attempt.is_filler:
            finest = min(samples or self._config.max_split, self._config.max_split)
            return [Piece(cut(part, finest, samples, splitter)[0], samples, 0.0, is_filler=True)]
        parts = self.splits.parts_for(shape_of(part))
        self._begun = 1 if self._begun_in is not attempt else self._begun + 1
        self._begun_in, self._counted = attempt, len(attempt.losses)
        if parts == 1:
            return [Piece(part, samples)]
        pieces = self._weighted(attempt.number, cut(part, parts, samples, splitter), samples, splitter)
        cuts = [piece.batch for piece in pieces]
        if self._is_distributed:  # all ranks take equally many parts, or a sharded model would wait forever
            pieces += [Piece(cuts[-1], samples, 0.0, is_filler=True)] * (parts - len(pieces))
        if self.trial.is_wanted and attempt.evidence is None:
            if self._has_own_splitter and (why := misplaced_samples(part, cuts, samples)) is not None:
                raise StepError(f"step {attempt.number}: your splitter of a micro-batch {why}; nothing was applied")
            pieces = self._trial_pieces(attempt, part, len(cuts), samples, splitter) + pieces
        self._served_rng = self._context.rng.capture()
        return pieces

    def _weighted(
        self, number: int, cuts: Sequence[Any], samples: int | None, splitter: Splitter | None
    ) -> list[Piece]:
        shares, why = shares_of(cuts, sizes_of(cuts, samples, splitter), self._label_rule())
        if why is not None:
            self._say_once(number, f"a micro-batch is served in parts, and its gradient may differ: {why}")
        scale = float(len(cuts)) if self._config.loss == "sum" else 1.0
        if self._config.loss == "sum":
            shares = [1.0 / len(cuts)] * len(cuts)
        pieces = [Piece(each, samples, share, scale, is_last=False) for each, share in zip(cuts, shares, strict=True)]
        return [*pieces[:-1], pieces[-1]._replace(is_last=True)]

    def _trial_pieces(
        self, attempt: StepAttempt, part: Any, parts: int, samples: int | None, splitter: Splitter | None
    ) -> list[Piece]:
        """Return a copy of a micro-batch cut otherwise, or nothing if it cannot be: then its loss is not verified.

        A copy, because the parts that are trained on share the memory of the micro-batch.
        """
        try:
            other = 2 * parts if samples is None or samples > parts else parts // 2
            cuts = cut(copy.deepcopy(part), other, samples, splitter)
            if len(cuts) == parts:
                raise StepError(f"it cannot be cut into {other} parts")
        except Exception as error:  # of the user's own types, or of a splitter
            self.stop_trial(attempt.number, error)
            return []
        return [piece._replace(is_trial=True) for piece in self._weighted(attempt.number, cuts, samples, splitter)]

    def _label_rule(self) -> LabelRule:
        names = [type(m).__name__ for _, root in self._context.state.modules for m in root.modules()]
        is_shifted = any("CausalLM" in name or "LMHead" in name for name in names)
        return LabelRule(self._config.ignore_index, is_shifted, self.weigh)

    def check_piece(self, attempt: StepAttempt, piece: Piece) -> None:
        """Report, once, that parts are not exact: their forward draws random numbers, or they give another loss."""
        before, self._served_rng = self._served_rng, None
        if before is not None and not before.same(self._context.rng.capture()):
            self.trial.stop()
            self._report_random(attempt)
        what = self.trial.compare(attempt, self._begun, self._counted) if piece.is_last else None
        if what is None:
            return
        if self._has_own_splitter:
            raise StepError(
                f"step {attempt.number}: a micro-batch is served in parts by your splitter, and {what}; nothing was "
                "applied. Each sample belongs into one part, with its labels, and the parts must be weighted by that over "
                "which the loss is a mean. If the loss compares samples, set [oom] batch_loss = true"
            )
        self.report_inexact(
            attempt.number,
            f"{what}. So the loss is no mean over what the parts are weighted by: pass step.backward(loss, weight=n), or "
            "guard.set_splitter(f, weight=g)",
        )

    def _report_random(self, attempt: StepAttempt) -> None:
        what = "forward draws random numbers (dropout or noise), and draws others for parts than for the whole"
        self.report_inexact(attempt.number, what)

    def add_trial_loss(self, attempt: StepAttempt, piece: Piece, loss: Tensor | None, weight: float) -> None:
        """Take the loss of a part that is not trained on, multiplied by its weight."""
        self.trial.add(attempt, self._begun, piece, loss, weight)
        if self._served_rng is not None and not self._served_rng.same(self._context.rng.capture()):
            self.trial.stop()
            self._report_random(attempt)

    def stop_trial(self, number: int, error: BaseException, *, is_in_step: bool = False) -> None:
        """Report, once, that the loss of the parts is not verified. `heal` serves a step that it has failed in again."""
        self.trial.stop()
        self._serves_again = is_in_step
        self._say_once(
            number,
            f"the parts of a micro-batch are weighted for a loss that is a {self._config.loss} over its samples or valid "
            f"labels. That is not verified: cut otherwise, and without gradients, it fails: {first_line(error)}",
        )

    def report_inexact(self, number: int, what: str) -> None:
        """Report, once, that parts are not exact. StepError if the policy forbids that."""
        if not self._config.allow_inexact:
            raise StepError(
                f"step {number}: a micro-batch is served in parts after it ran out of memory, and {what}; nothing was "
                "applied, because [oom] allow_inexact = false"
            )
        self._say_inexact(number, what)

    # ---- healing

    def heal(
        self,
        attempt: StepAttempt,
        error: BaseException,
        failed: FailedPart | None,
        drop_gradients: Callable[[], None],
        *,
        was_observed: bool,
    ) -> bool:
        """Have a step that ran out of memory served again. Return False if the error must end the loop.

        was_observed: the step ran again under an observer, whose memory is free now.
        """
        is_synchronising = attempt.running == "backward" and self._sync.is_on
        may_fill = self._can_fill and not attempt.is_filler and not is_synchronising
        may_fill = may_fill and self._sync.skip_buffers_if_sent(error, is_first=not attempt.losses)
        retry = self._choose(attempt, error, failed, was_observed=was_observed)
        if isinstance(retry, str):
            self._advise(attempt, error, retry)
            return False
        if self._is_distributed and not may_fill:
            self.wanted_parts = retry.parts
            text = f"step {attempt.number}: {retry.reason}. Other ranks may wait in a collective, so all ranks end; "
            text += f"the next start serves every micro-batch in {retry.parts} parts"
            log.error("holdfast: %s", text)
            error.add_note(f"holdfast: {text}")
            return False
        if not self._is_distributed:
            if not self._serves_again:
                self.trial.is_wanted = retry.parts > 1 and not self.trial.is_over and not self._inexact_reasons()
                self._record(attempt.number, retry, where=attempt.running)
            self._serves_again = False
        drop_gradients()
        source = self._recovery.feeder.source
        if (why := source.requeue(attempt.draws)) is not None:
            self._advise(attempt, error, why)
            return False
        rewind(self._recovery, attempt)
        source.defer_epoch_ends(attempt.epochs_before)
        if self._is_distributed:
            value = {**retry._asdict(), "step": attempt.number, "attempt": attempt.attempt, "where": attempt.running}
            self._recovery.coordinator.request("split", value)
            self.is_filling = self.is_splitting = True
            return True
        attempt.result = Outcome(status=Status.REPLAYED, signal=attempt.unmeasured_signal())
        self._context.engine.record_outcome(attempt.result)
        self._context.hooks.call("on_recovery", attempt.result)
        return True

    def _choose(
        self, attempt: StepAttempt, error: BaseException, failed: FailedPart | None, *, was_observed: bool
    ) -> _Retry | str:
        """Return how to go on, or why the run cannot."""
        what, state = f"out of memory in {attempt.running}", self._context.state
        problem = first_line(error)
        free_pinned(error, [module for _, module in state.modules])
        given_back = self._recovery.snapshots.release_device_memory()
        if given_back is None and was_observed:
            given_back = "the step is not observed any more"
        if not self.is_armed:
            return f"{what}; the policy forbids a retry"
        shape = "" if failed is None else failed.shape
        parts = 1 if failed is None else self.splits.parts_for(shape)
        shape = ANY_SHAPE if self._is_distributed else shape
        if given_back is not None or self._serves_again:
            return _Retry(shape, parts, f"{what} ({problem}): {given_back or 'the step is run without a trial'}")
        if failed is None or not attempt.draws:
            return f"{what} before a micro-batch was served"
        more = min(2 * parts, self._config.max_split)
        if failed.samples is not None:
            more = min(more, failed.samples)
        splitter = failed.splitter or self.splitter or self.default_splitter
        try:
            is_smaller = more > parts and len(cut(failed.batch, more, failed.samples, splitter)) > parts
        except Exception as refusal:  # StepError, or what a splitter of the user raises
            return f"{what}; it cannot be split: {refusal}; see guard.set_splitter"
        if not is_smaller:
            size = "one sample" if failed.samples == parts else f"a part of {parts}, the most ([oom] max_split)"
            why = f"{what} with {size} at a time: the micro-batch cannot be split further"
            return why + _uncut(failed.batch, parts, failed.samples, splitter)
        reasons = self._inexact_reasons()
        if reasons and not self._config.allow_inexact:
            return f"{what}; a split would not be exact: {'; '.join(reasons)} ([oom] allow_inexact = false)"
        for reason in reasons:
            self._say_inexact(attempt.number, reason)
        return _Retry(shape, more, f"{what} of micro-batch {failed.number} ({failed.shape}): {problem}")

    def _inexact_reasons(self) -> list[str]:
        """Return what makes a split differ from the whole."""
        reasons = []
        found: dict[str, str] = {}
        for _, root in self._context.state.modules:
            for name, module in root.named_modules():
                if module.training and (kind := _inexact_kind(module)) is not None:
                    found.setdefault(kind, f"{type(module).__name__} {name!r}" if name else type(module).__name__)
        reasons += [f"{example} {kind}" for kind, example in found.items()]
        if self._config.batch_loss:
            reasons.append("the loss compares samples of a micro-batch ([oom] batch_loss = true)")
        return reasons

    def _has_collectives_in_forward(self) -> bool:
        modules = [m for _, root in self._context.state.modules for m in root.modules()]
        return any(isinstance(m, nn.SyncBatchNorm) for m in modules)

    def explain_part(self, error: BaseException, piece: Piece) -> None:
        """Add to an error of the loop that it came with a part of a micro-batch, and what to do if that is why."""
        if not isinstance(error, HoldfastError | OutOfMemoryError):
            error.add_note(
                f"holdfast: this was a part ({shape_of(piece.batch)}) of a micro-batch that does not fit into memory. If "
                "the loop cannot take parts (offsets into a flattened tensor, a hidden state carried on), pass "
                "guard.set_splitter(f), or set [oom] action = 'stop'"
            )

    def learn(self, number: int, shape: str, parts: int, reason: str) -> None:
        """Serve micro-batches of a shape in parts from now on."""
        self._write(number, _Retry(shape, parts, reason))
        self.splits.learn(shape, parts)
        self.is_splitting = True

    # ---- several ranks

    def take_requests(self, requests: list[dict[str, Any]]) -> None:
        """Keep what ranks ask for until the step that they name settles."""
        self._requests = requests

    def agreed_retry(self, attempt: StepAttempt) -> Plan | None:
        """Return a plan to serve the step again, now in parts, on all ranks; None if no rank asks for it."""
        requests, self._requests = self._requests, []
        named = [r for r in requests if (r["step"], r["attempt"]) == (attempt.number, attempt.attempt)]
        if not named:
            return None
        retry = max((_Retry(r["shape"], r["parts"], r["reason"]) for r in named), key=lambda each: each.parts)
        ranks = ", ".join(str(r["rank"]) for r in named)
        retry = retry._replace(reason=f"rank {ranks}: {retry.reason}")
        self._record(attempt.number, retry, where=named[0]["where"])
        return Plan(actions=(Replay(),), reason=retry.reason)

    # ---- updates

    def undo_update(self, number: int, error: BaseException) -> Plan | None:
        """Return a plan to undo an update that ran out of memory, by a return to certified state. None: the run must end."""
        failed_step, times = self._update_failures
        times = times + 1 if failed_step == number else 1
        self._update_failures = number, times
        problem = first_line(error)
        free_pinned(error)
        self._recovery.snapshots.release_device_memory()
        why = f"step {number}: out of memory in optimizer.step(), which may have updated a part of the parameters"
        if self._is_distributed or not self.is_armed or times > _MAX_UPDATE_FAILURES:
            log.error(
                "holdfast: %s: nothing of it is saved, and the error ends the run (%s); %s", why, problem, _ADVICE
            )
            return None
        log.warning("holdfast: %s: the guard returns to certified state (%s)", why, problem)
        reason = f"out of memory in optimizer.step(): {problem}"
        return Plan(actions=(Rollback(before=number - 1, at_latest=number - 1),), reason=reason)

    def count_clean_step(self, number: int) -> None:
        """Count a committed step, and try fewer parts after enough of them."""
        for changed in self.splits.commit():
            reason = f"{self.splits.grow_after} or more clean steps in {changed.before} parts"
            retry = _Retry(changed.shape, changed.parts, reason)
            self._write(number, retry, trial=True)
            log.info("holdfast: step %d: %s: %d are tried from now on", number, reason, changed.parts)
        self.is_splitting = self.splits.is_active

    # ---- records

    def _record(self, number: int, retry: _Retry, where: str) -> None:
        self._write(number, retry, where=where)
        log.warning(
            "holdfast: step %d: %s. The step is undone and served again, this micro-batch in %d part%s; batch and loss stay "
            "what they were",
            *(number, retry.reason, retry.parts, "" if retry.parts == 1 else "s"),
        )
        if retry.shape and retry.parts > self.splits.parts_for(retry.shape):
            self.splits.learn(retry.shape, retry.parts)
        self.is_splitting = self.splits.is_active

    def _write(self, number: int, retry: _Retry, **fields: Any) -> None:
        shape, parts, reason = retry
        self._context.engine.write(
            "action", durable=True, action="split", step=number, shape=shape, parts=parts, reason=reason, **fields
        )

    def _advise(self, attempt: StepAttempt, error: BaseException, why: str) -> None:
        text = f"step {attempt.number}: {why}; nothing was applied; {_ADVICE}"
        log.error("holdfast: %s", text)
        error.add_note(f"holdfast: {text}")
        self._context.engine.write("note", step=attempt.number, message=text)

    def _say_inexact(self, number: int, reason: str) -> None:
        self._say_once(
            number,
            f"A SPLIT MICRO-BATCH IS NOT EXACT HERE: {reason}; the batch is the same, the gradient is not; to forbid it, "
            "set [oom] allow_inexact = false",
        )

    def _say_once(self, number: int, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            self._context.engine.note(number, message)


def _uncut(batch: Any, parts: int, samples: int | None, splitter: Splitter | None) -> str:
    """Return that the largest tensor of a batch is not cut, in words; nothing if it is."""
    largest = max(tensors_of(batch), key=Tensor.numel, default=None)
    if parts == 1 or largest is None:
        return ""
    is_whole = any(each.shape == largest.shape for each in tensors_of(cut(batch, parts, samples, splitter)[0]))
    shape = tuple(largest.shape)
    return f", and its tensor of shape {shape} is in every part: see guard.set_splitter" if is_whole else ""


def _inexact_kind(module: nn.Module) -> str | None:
    """Return why a module in train mode computes something else for parts of a batch; None if it does not."""
    name = type(module).__name__
    if isinstance(module, _BATCH_NORMS) or "BatchNorm" in name:
        return "normalizes by the statistics of the micro-batch"
    share = getattr(module, "p", getattr(module, "drop_prob", None))
    if ("Dropout" in name or "DropPath" in name) and isinstance(share, int | float) and share > 0:
        return "draws its mask for each part"
    return None
