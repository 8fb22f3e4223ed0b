"""One try of one step: its data, its losses, its update and its outcome. The pipeline fills it in; drivers read it."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from holdfast.core.base.types import Outcome, Signal, Span
from holdfast.runtime.agree.attribution import Origin
from holdfast.runtime.agree.rows import Rows
from holdfast.runtime.data.fingerprint import BatchFingerprint
from holdfast.runtime.data.source import Draw
from holdfast.runtime.state.buffers import BufferCapture
from holdfast.runtime.state.run_state import ScheduleState
from holdfast.runtime.tensors.norms import Norm
from holdfast.runtime.update.gate import UpdateHandle
from holdfast.runtime.update.measurements import HostMeasurements

Phase = Literal["drawn", "open", "left"]
UserCode = Literal["forward", "backward"]


class StepAttempt:
    """Holds one try of a step of `accumulate` batches. A step may take several tries before it is committed."""

    def __init__(
        self,
        number: int,
        attempt: int,
        accumulate: int,
        draws: list[Draw],
        buffers: BufferCapture,
        inputs: BatchFingerprint,
    ) -> None:
        self.number = number
        """the step's number if it is committed, counted from 1"""
        self.attempt = attempt
        """1 for the first try"""
        self.accumulate = accumulate
        self.phase: Phase = "drawn"
        self.running: UserCode = "forward"
        """what the user's code is doing, for the report when it fails"""
        # Data.
        self.draws = draws
        self.buffers = buffers
        """module buffers as they were before the step"""
        self.inputs = inputs
        """fingerprint and sequence length of its batches"""
        self.data_ended = False
        self.is_filler = False
        """this rank ran out of memory: the attempt only joins the collectives of the others, and is undone on all ranks"""
        self.epochs_before = 0
        """epochs that ended right before the step, while the step before was pending"""
        self.epochs_inside = 0
        """epochs that ended between its batches"""
        self.schedule: ScheduleState | None = None
        """the LR schedule before those epoch ends moved it"""
        self.flags: list[str] | None = None
        """which modules train and which parameters require a gradient, if the loop may change that before the update"""
        # Losses.
        self.parts: int | None = None
        """micro-batches in the step; None until the driver has said"""
        self.losses: list[Tensor] = []
        """mean loss of each part that counts"""
        self.group: str | None = None
        """the kind of loss, if the loop names one"""
        self.is_weighted = False
        """the loop passes weight= to backward"""
        self.unit = 1.0
        """weight of one part on which all ranks agreed before the step"""
        self._shares: list[float] = []
        self._reference: float | None = None
        self._loss_sum: Tensor | None = None
        self._empty_loss: Tensor | None = None
        # Update.
        self.norm: Norm | None = None
        """the gradient norm before the driver has clipped, if the driver clips"""
        self.clipped_to: float | None = None
        """the norm to which the driver clips, if it is known"""
        self.seconds = 0.0
        self.lr = 0.0
        self.set_lr = 0.0
        """the LR that the schedule or the loop set, if an intervention changes it"""
        self.clip: float | None = None
        self.loss_limit: float | None = None
        self.grad_limit: float | None = None
        self.handle: UpdateHandle | None = None
        self.update_ns = self.wait_ns = 0
        """how long the gate took to submit the update, and the host waited for the numbers of the step"""
        # Outcome.
        self.rows: Rows | None = None
        """what every rank measured, once the host has read it"""
        self.origin: Origin | None = None
        """the ranks and samples a vetoed step came from; None for one process"""
        self.result: Outcome | None = None
        self.evidence: Any = None
        """what watches it, if an earlier attempt at the step was bad"""

    @property
    def is_open(self) -> bool:
        """Return whether the user's forward and backward are running."""
        return self.phase == "open"

    # ---- losses

    def add_part(
        self, loss: Tensor, weight: float, *, is_explicit: bool, is_distributed: bool, fraction: float = 1.0
    ) -> float:
        """Count one part's mean loss. Return the factor its gradient is multiplied by, before dividing by `parts`.

        A part of weight 0 counts nothing: its loss may be NaN (every label ignored). `fraction`: the part is a piece of one
        that was too large, of this weight, and counts so much of it.
        """
        self.is_weighted = self.is_weighted or is_explicit
        mean = _whole(loss.detach()).float()
        if weight == 0 or fraction == 0:
            self._empty_loss = mean * float("nan")
            return 0.0
        if self._reference is None:
            # Ranks add their gradients up before any of them knows the total weight: all must divide by the same unit.
            self._reference = self.unit if is_distributed and is_explicit else weight
        share = weight / self._reference * fraction
        self._shares.append(share)
        self.losses.append(mean)
        mean = mean if share == 1.0 else mean * share
        self._loss_sum = mean if self._loss_sum is None else self._loss_sum + mean
        # Without weight= every part counts alike on several ranks, as it does when DDP averages gradients.
        return fraction if is_distributed and not is_explicit else share

    def add_group(self, group: str | None) -> None:
        """Note the group of one part. A step of several groups is a group of its own."""
        if group is not None and group != self.group:
            names = {group} if self.group is None else {*self.group.split("+"), group}
            self.group = "+".join(sorted(names))

    def mean_loss(self) -> Tensor | None:
        """Return the weighted mean loss over the parts; NaN if none of them counts, None if there is none."""
        if self._loss_sum is None:
            return self._empty_loss
        total = sum(self._shares)
        return self._loss_sum if total == 1.0 else self._loss_sum / total

    def complete(self, is_distributed: bool) -> tuple[Tensor, float]:
        """Return the mean loss, and the factor that makes the gradient the mean over all parts; 1 if all weighed the same.

        On several ranks no rank knows the factor alone: see `total_if_equal`.
        """
        loss, total = self.mean_loss(), sum(self._shares)
        assert loss is not None and self.parts is not None, "a complete step has a loss"
        return loss, 1.0 if total == self.parts or not total or is_distributed else self.parts / total

    @property
    def weight(self) -> float:
        """Return the total weight of its parts; 0 if none of them counts. That of a filler makes its missing loss count."""
        return 1.0 if self.is_filler else sum(self._shares) * (self._reference or 0.0)

    def total_if_equal(self) -> float | None:
        """Return the weight this rank's parts would have at one unit each; None if the loop passes no weight=."""
        assert self.parts is not None
        return self.parts * (self._reference or self.unit) if self.is_weighted else None

    @property
    def loss(self) -> float:
        """Return the mean loss so far as a number. Waits for the device."""
        value = self.mean_loss()
        return float("nan") if value is None else float(value)

    def loss_since(self, counted: int) -> tuple[float, float]:
        """Return the weighted mean loss of the parts after the first `counted`, and the largest. Waits for the device."""
        losses, shares = [float(loss) for loss in self.losses[counted:]], self._shares[counted:]
        if not losses:
            return float("nan"), 0.0
        weighted = sum(loss * share for loss, share in zip(losses, shares, strict=True))
        return weighted / sum(shares), max(map(abs, losses))

    # ---- data

    @property
    def samples(self) -> int | None:
        """Return how many samples its batches hold, if all of them can be counted."""
        counts = [draw.samples for draw in self.draws]
        return None if None in counts else sum(count for count in counts if count is not None)

    def spans(self) -> tuple[Span, ...]:
        """Return its stretches of the data stream, neighbours joined."""
        if len(self.draws) == 1:
            return (self.draws[0].span,)
        joined: list[Span] = []
        for span in (draw.span for draw in self.draws):
            if joined and joined[-1].epoch == span.epoch and joined[-1].stop == span.start:
                joined[-1] = Span(span.epoch, joined[-1].start, span.stop)
            else:
                joined.append(span)
        return tuple(joined)

    # ---- signal

    def signal(self, reading: HostMeasurements) -> Signal:
        """Return the attempt in numbers, as this rank measured it."""
        return Signal(
            step=self.number,
            attempt=self.attempt,
            loss=reading.loss,
            grad_norm=reading.grad_norm,
            lr=self.lr,
            loss_scale=reading.loss_scale,
            update_rms=reading.update_rms,
            weight_norm=reading.weight_norm,
            batch=self.inputs.checksum,
            clip=self.clip,
            flags=reading.flags,
            overflow=reading.overflow,
            loss_limit=self.loss_limit,
            grad_limit=self.grad_limit,
            data=self.spans(),
            samples=self.samples,
            length=self.inputs.sequence_length,
            seconds=self.seconds,
            batches=len(self.draws),
            group=self.group,
        )

    def unmeasured_signal(self) -> Signal:
        """Return the signal of an attempt whose update was never submitted. Waits for the device."""
        return Signal(step=self.number, attempt=self.attempt, loss=self.loss, data=self.spans(), seconds=self.seconds)


def _whole(value: Tensor) -> Tensor:
    """Return a sharded loss (loss_parallel) as the full tensor."""
    full_tensor = getattr(value, "full_tensor", None)
    result: Tensor = value if full_tensor is None else full_tensor()
    return result
