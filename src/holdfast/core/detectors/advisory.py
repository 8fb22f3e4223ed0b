"""Advisory detectors: their findings are notes, and nothing is done about them.

A loss that no longer falls (Plateau), a learning rate that jumps or freezes (LearningRate), batches that repeat
(DuplicateBatch), a weight norm that changes by a factor (WeightNorm), a run that trains nothing (ZeroGradient, DeadRun).
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, ClassVar

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Kind, Severity, Signal
from holdfast.core.detectors.base import LimitlessDetector
from holdfast.core.detectors.divergence import median_of
from holdfast.core.detectors.expected_shifts import LR_JUMP

_PLATEAU_BLOCK = 16
_PLATEAU_SMOOTHING = 0.28
_PLATEAU_GAIN = 0.002
_DECAY_RECORDS, _FROZEN_RECORDS = 50, 200
_STILL_HIGH_LR = 0.2
_ZERO_LR_RECORDS = 50
_REMEMBERED_BATCHES = 512
_REPEATS, _RECENT_BATCHES = 3, 8
_WEIGHT_NORM_STEPS = 200
_ZERO_GRAD_RECORDS = 8
_DEAD_ZERO_RECORDS, _DEAD_SAME_RECORDS = 32, 200


class Plateau(LimitlessDetector):
    """Reports, once per plateau, that the smoothed loss has set no new best level for `plateau_steps` steps."""

    name = "plateau"
    per_group = True
    confidence = 0.7
    field, needs_loss, max_block = "loss", True, _PLATEAU_BLOCK
    saved: ClassVar = {
        "block": ("_block", list), "level": "_level", "best": "_best", "since": "_since", "said": "_reported",
    }  # fmt: skip

    def __init__(self, config: DetectSection) -> None:
        self._plateau_steps = config.plateau_steps
        self._block: list[float] = []
        self._level: float | None = None
        self._best = 0.0
        self._since: int | None = None
        self._reported = False

    def observe(self, signal: Signal) -> Finding | None:
        loss = signal.loss
        if not math.isfinite(loss) or signal.overflow or signal.flags:
            return None
        self._block.append(loss)
        if len(self._block) < _PLATEAU_BLOCK:
            return None
        middle, self._block = median_of(self._block), []
        self._level = middle if self._level is None else self._level + _PLATEAU_SMOOTHING * (middle - self._level)
        if self._since is None or self._level < self._best - _PLATEAU_GAIN * abs(self._best):
            self._best, self._since, self._reported = self._level, signal.step, False
            return None
        if self._reported or signal.step - self._since < self._plateau_steps:
            return None
        self._reported = True
        steps = signal.step - self._since
        message = f"the loss has not improved on {self._best:.6g} for {steps} steps"
        evidence = {"best": self._best, "level": self._level, "steps": steps}
        return self.report(signal, Kind.PLATEAU, Severity.NOTE, self._since, message, evidence)

    def absorb_normal(self, losses: Sequence[float], steps: Sequence[float]) -> int:
        """Take in the losses that only fill the block, and return their number; its last loss is for `observe`."""
        filling = losses[: _PLATEAU_BLOCK - 1 - len(self._block)]
        self._block.extend(filling)
        return len(filling)

    def rebaseline(self) -> None:
        self._block = []
        self._level, self._since, self._reported = None, None, False


class LearningRate(LimitlessDetector):
    """Reports a jump and a frozen rate.

    Jump: more than `LR_JUMP` times the rate of the previous record, after a steady or smooth stretch. Frozen: the rate
    fell at nearly every record for a while and then stopped well above zero; or it stays zero.
    """

    name = "learning_rate"
    field, needs_loss, max_block = "lr", False, 1024
    saved: ClassVar = {
        "_last": "_last", "_peak": "_peak", "_smooth": "_smooth_records", "_falls": "_falls", "_still": "_still_records",
        "_since": "_since", "_said": "_reported",
    }  # fmt: skip

    def __init__(self, config: DetectSection) -> None:
        del config
        self._last: float | None = None
        self._peak = 0.0
        self._smooth_records = 0
        self._falls = 0
        self._still_records = 0
        self._since = 0
        self._reported = False

    def observe(self, signal: Signal) -> Finding | None:
        lr, last = signal.lr, self._last
        if lr is None or not math.isfinite(lr) or lr < 0 or signal.overflow or signal.flags:
            return None
        self._last = lr
        if last is None:
            self._peak = max(self._peak, lr)
            return None
        peak, self._peak = self._peak, max(self._peak, lr)
        if last > 0 and lr > LR_JUMP * last and self._smooth_records >= _ZERO_LR_RECORDS:
            self._smooth_records = self._falls = self._still_records = 0
            return self._jump(signal, last, lr, peak)
        self._smooth_records = self._smooth_records + 1 if last == 0 or lr <= 1.05 * last else 0
        if lr != last:
            self._falls = self._falls + 1 if lr < last else 0
            self._still_records, self._reported = 0, False
            return None
        if self._still_records == 0:
            self._since = signal.step
        self._still_records += 1
        return self._frozen(signal, lr)

    def absorb_normal(self, rates: Sequence[float], steps: Sequence[float]) -> int:
        """Take in the leading rates that `observe` would find nothing wrong with, and return their number."""
        last = self._last
        if last is None:
            return 0
        for i, lr in enumerate(rates):
            if (
                lr < 0
                or (last > 0 and lr > LR_JUMP * last)
                or (lr == last and (self._still_records == 0 or self._may_freeze(lr)))
            ):
                return i
            self._smooth_records = self._smooth_records + 1 if last == 0 or lr <= 1.05 * last else 0
            if lr == last:
                self._still_records += 1
            else:
                self._falls = self._falls + 1 if lr < last else 0
                self._still_records, self._reported = 0, False
            self._peak = max(self._peak, lr)
            self._last = last = lr
        return len(rates)

    def _may_freeze(self, lr: float) -> bool:
        return not self._reported and (lr == 0.0 or self._falls >= _DECAY_RECORDS)

    def _jump(self, signal: Signal, last: float, lr: float, peak: float) -> Finding:
        is_restart = lr <= 1.05 * peak
        where = "back towards its peak, as in a restart of the schedule" if is_restart else "above any earlier rate"
        message = f"the learning rate went from {last:.4g} to {lr:.4g} in one step, {where}"
        evidence = {"lr": lr, "before": last, "ratio": lr / last, "peak": peak, "restart": is_restart}
        return self.report(signal, Kind.LR_JUMP, Severity.NOTE, signal.step, message, evidence)

    def _frozen(self, signal: Signal, lr: float) -> Finding | None:
        zero = lr == 0.0 and self._still_records >= _ZERO_LR_RECORDS and self._peak > 0
        stopped = (
            self._falls >= _DECAY_RECORDS
            and self._still_records >= _FROZEN_RECORDS
            and lr > _STILL_HIGH_LR * self._peak
        )
        if self._reported or not (zero or stopped):
            return None
        self._reported = True
        how = "has been zero" if zero else f"stopped at {lr:.4g} in the middle of its decay"
        message = f"the learning rate {how} since step {self._since}"
        return self.report(signal, Kind.LR_FROZEN, Severity.NOTE, self._since, message, {"lr": lr, "peak": self._peak})

    def rebaseline(self) -> None:
        """Start over at the next record: an expected shift may move the rate."""
        self._last, self._smooth_records = None, 0


class DuplicateBatch(LimitlessDetector):
    """Compares batches by fingerprint; `_REPEATS` repeats among the last `_RECENT_BATCHES` batches are a finding.

    It remembers `_REMEMBERED_BATCHES`. A data set with shorter epochs repeats by design: then the distance between
    repeats is the length of an epoch, and it is reported once.
    """

    name, needs = "duplicate_batch", "batch"
    field = "batch"

    def __init__(self, config: DetectSection) -> None:
        del config
        self._last_step: OrderedDict[int, int] = OrderedDict()
        """fingerprint -> the step it was last used at, oldest first"""
        self._distances: list[int] = []
        """for each recent batch, the steps since it was last used; 0: it is new"""
        self._reported_distance: int | None = None

    def observe(self, signal: Signal) -> Finding | None:
        if signal.batch is None or signal.attempt > 1:
            return None
        last_step, distances = self._last_step, self._distances
        before = last_step.pop(signal.batch, None)
        last_step[signal.batch] = signal.step
        if len(last_step) > _REMEMBERED_BATCHES:
            last_step.popitem(last=False)
        distance = 0 if before is None else signal.step - before
        distances.append(max(0, distance))
        del distances[:-_RECENT_BATCHES]
        if not any(distances):
            self._reported_distance = None
            return None
        repeats = [d for d in distances if d > 0]
        if len(repeats) < _REPEATS or distance <= 0 or self._reported_distance is not None:
            return None
        self._reported_distance = distance
        message = f"{len(repeats)} of the last {len(distances)} batches are repeats, this one of {distance} steps ago"
        if distance >= _RECENT_BATCHES:
            message += "; an epoch of that length in the same order would look like this"
        evidence = {"distance": distance, "repeats": len(repeats), "batch": signal.batch}
        return self.report(signal, Kind.DUPLICATE_BATCH, Severity.NOTE, signal.step - distance, message, evidence)

    def rebaseline(self) -> None:
        self._last_step.clear()
        self._distances = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self._last_step.items()), "recent": list(self._distances), "said": self._reported_distance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last_step = OrderedDict((int(k), int(v)) for k, v in state["seen"])
        self._distances, self._reported_distance = list(state["recent"]), state["said"]


_IMPOSSIBLE_GROWTH = 10.0
"""no run of updates between two measurements makes the weights this much larger"""


class WeightNorm(LimitlessDetector):
    """Compares each norm after `warmup_steps` with the oldest of the last `_WEIGHT_NORM_STEPS` steps."""

    name = needs = "weight_norm"
    field = "weight_norm"

    def __init__(self, config: DetectSection) -> None:
        self._ratio, self._warmup = config.weight_norm_ratio, config.warmup_steps
        self._recent: deque[tuple[int, float]] = deque(maxlen=_WEIGHT_NORM_STEPS + 1)
        self._reported = False

    def observe(self, signal: Signal) -> Finding | None:
        norm, recent = signal.weight_norm, self._recent
        if norm is None or norm <= 0 or signal.flags or signal.step <= self._warmup:
            return None
        if recent and not norm < _IMPOSSIBLE_GROWTH * recent[-1][1]:
            since, before = recent[-1]
            message = f"the norm of the weights went from {before:.6g} to {norm:.6g} in {signal.step - since} steps"
            jump = {"weight_norm": norm, "before": before, "steps": signal.step - since}
            onset = min(since + 1, signal.step)
            return self.report(signal, Kind.STATE_JUMP, Severity.ROLLBACK, onset, message, jump)
        if not math.isfinite(norm):
            return None
        recent.append((signal.step, norm))
        while recent[0][0] < signal.step - _WEIGHT_NORM_STEPS:
            recent.popleft()
        since, before = recent[0]
        change = norm / before
        if max(norm, before) / min(norm, before) < self._ratio:
            self._reported = False
            return None
        if self._reported:
            return None
        self._reported = True
        verb = "grew" if change > 1 else "shrank"
        steps, ratio = signal.step - since, change if math.isfinite(change) else None
        message = f"the norm of the weights {verb} from {before:.6g} to {norm:.6g} in {steps} steps"
        evidence = {"weight_norm": norm, "before": before, "ratio": ratio, "steps": steps}
        return self.report(signal, Kind.WEIGHT_NORM, Severity.NOTE, since, message, evidence)

    def rebaseline(self) -> None:
        self._recent.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"recent": [list(r) for r in self._recent], "said": self._reported}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._recent = deque(((int(s), float(n)) for s, n in state["recent"]), maxlen=_WEIGHT_NORM_STEPS + 1)
        self._reported = state["said"]


class ZeroGradient(LimitlessDetector):
    """Reports, once a run, that the gradient norm has been exactly 0 for `_ZERO_GRAD_RECORDS` records in a row.

    The finding is a note, logged as a warning. A loss of exactly 0 has no gradient by nature (a satisfied hinge loss): such
    records count only until the first gradient above 0.
    """

    name, needs = "zero_gradient", "grad_norm"
    field, needs_loss, max_block = "grad_norm", True, 1024
    saved: ClassVar = {"count": "_count", "since": "_since", "has_trained": "_has_trained", "reported": "_reported"}

    def __init__(self, config: DetectSection) -> None:
        del config
        self._count = 0
        self._since = 0
        self._has_trained = False
        self._reported = False

    def observe(self, signal: Signal) -> Finding | None:
        norm = signal.grad_norm
        is_finite = norm is not None and math.isfinite(norm) and math.isfinite(signal.loss)
        if norm is None or not is_finite or signal.overflow or signal.flags:
            return None
        if norm != 0.0 or (signal.loss == 0.0 and self._has_trained):
            self._has_trained = self._has_trained or norm > 0.0
            self._count = 0
            return None
        if self._count == 0:
            self._since = signal.step
        self._count += 1
        if self._reported or self._count < _ZERO_GRAD_RECORDS:
            return None
        self._reported = True
        at = "" if signal.lr is None else f" and LR {signal.lr:.4g}"
        message = (
            f"every gradient has been None or exactly 0 for {self._count} steps, at loss {signal.loss:.6g}{at}: nothing is "
            "trained; look for a zero_grad() inside `with step:`, a detach() or frozen layer between parameters and loss, "
            "labels that are all ignored, and fp16 gradients that underflow without a GradScaler"
        )
        evidence = {"loss": signal.loss, "grad_norm": norm, "lr": signal.lr, "records": self._count}
        return self.report(signal, Kind.ZERO_GRADIENT, Severity.NOTE, self._since, message, evidence)

    def absorb_normal(self, norms: Sequence[float], steps: Sequence[float]) -> int:
        """Take in the leading norms above 0 and return their number."""
        count = next((i for i, norm in enumerate(norms) if not norm > 0.0), len(norms))
        if count > 0:
            self._count, self._has_trained = 0, True
        return count

    def rebaseline(self) -> None:
        self._count = 0


class DeadRun(LimitlessDetector):
    """Reports loss and gradient norm that are both zero, or both exactly the same as before, for a long time.

    The finding is a note, logged as a warning. Without a gradient norm the loss alone decides, after twice as long.
    """

    name = "dead_run"
    field, needs_loss, max_block = "loss", True, 1024

    def __init__(self, config: DetectSection) -> None:
        del config
        self._last: tuple[float, float | None] | None = None
        self._count = 0
        self._since = 0

    def observe(self, signal: Signal) -> Finding | None:
        norm = signal.grad_norm if signal.grad_norm is not None and math.isfinite(signal.grad_norm) else None
        now = (signal.loss, norm)
        if not math.isfinite(signal.loss) or signal.overflow or signal.flags:
            return None
        if now != self._last:
            self._last, self._count, self._since = now, 1, signal.step
            return None
        self._count += 1
        zero = signal.loss == 0.0 and norm in (0.0, None)
        enough = (_DEAD_ZERO_RECORDS if zero else _DEAD_SAME_RECORDS) * (1 if norm is not None else 2)
        if self._count != enough:
            return None
        what = "zero" if zero else f"exactly {signal.loss!r}"
        message = f"the loss has been {what} for {self._count} records: nothing is being trained"
        evidence = {"loss": signal.loss, "grad_norm": signal.grad_norm, "lr": signal.lr, "records": self._count}
        return self.report(signal, Kind.DEAD_RUN, Severity.NOTE, self._since, message, evidence)

    def absorb_normal(self, losses: Sequence[float], steps: Sequence[float]) -> int:
        """Take in losses that differ from the one before, except the last, and return their number."""
        previous, count = None if self._last is None else self._last[0], len(losses) - 1
        for i, loss in enumerate(losses):
            if loss == previous:
                count = i - 1
                break
            previous = loss
        if count > 0:
            self._last = None
        return max(0, count)

    def rebaseline(self) -> None:
        self._last = None

    def state_dict(self) -> dict[str, Any]:
        return {"last": None if self._last is None else list(self._last), "count": self._count, "since": self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        last = state["last"]
        self._last = None if last is None else (last[0], last[1])
        self._count, self._since = state["count"], state["since"]
