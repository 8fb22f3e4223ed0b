"""The user's side of a step: `with step:`, `step.microbatches()`, `step.backward(loss)`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from holdfast.core.base.errors import StepError, StepIncomplete
from holdfast.core.base.types import Outcome, Span
from holdfast.runtime.agree.rows import Rows
from holdfast.runtime.data.fingerprint import BatchFingerprint
from holdfast.runtime.data.source import Draw
from holdfast.runtime.data.split import Splitter, count_samples, split
from holdfast.runtime.state.buffers import BufferCapture
from holdfast.runtime.tensors.sharded import local, zero_gradients
from holdfast.runtime.tensors.torch_private import foreach_mul_
from holdfast.runtime.update.gate import UpdateHandle

if TYPE_CHECKING:
    from holdfast.runtime.agree.attribution import Blame
    from holdfast.runtime.state.run_state import ScheduleState
    from holdfast.runtime.step.run import Run


class Step:
    """One step of the loop, of `accumulate` batches. It may be served more than once before it is committed."""

    def __init__(
        self, run: Run, number: int, attempt: int, accumulate: int, first: Draw, buffers: BufferCapture
    ) -> None:
        self._run = run
        self.number = number
        """the number it will have if it is committed, counted from 1"""
        self.attempt = attempt
        """1 for the first time it is served"""
        self.accumulate = accumulate
        self.draws = [first]
        self.buffers = buffers
        self.passage: UpdateHandle | None = None
        self.loss_limit: float | None = None
        self.grad_limit: float | None = None
        self.lr = 0.0
        self.clip: float | None = None
        self.seconds = 0.0
        self.epochs_before = 0
        """epochs that ended right before it, found while the step before was pending"""
        self.ended_epochs = 0
        """epochs that ended between its batches"""
        self.schedule: ScheduleState | None = None
        """where the schedule stood before those moved it"""
        self.data_ended = False
        self.fingerprint: BatchFingerprint | None = None
        """what its batches looked like when they were handed out; None where nobody asks"""
        self.result: Outcome | None = None
        self.rows: Rows | None = None
        """what every rank brought, once the host has read it"""
        self.origin: Blame | None = None
        """where it came from, if it was vetoed and there are several ranks"""
        self.losses: list[Tensor] = []
        """the mean loss of each part that counts"""
        self.where = "forward"
        """what the user's code is at, for when it fails there"""
        self._state = "new"
        self.parts: int | None = None
        self._yielded = 0
        self._backwards = 0
        self._weights: list[float] = []
        self._current: float | None = None
        self._reference: float | None = None
        self._unit = 1.0
        self.weighted = False
        """whether the loop has said what its parts weigh"""
        self._loss: Tensor | None = None
        self._nothing: Tensor | None = None
        self._began = 0.0

    # ---- what the user calls

    def __enter__(self) -> Step:
        if self._state != "new":
            raise StepError(
                f"step {self.number} was entered twice: `with step:` belongs once into the body of "
                "`for step in guard.steps(...)`"
            )
        self._state = "open"
        self._unit = (
            self._run.state.interventions.weight_unit
        )  # as it is now: the step before may settle, and change it, meanwhile
        self._began = self._run.clock.monotonic()
        self._run.entered(self)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Literal[False]:
        self._state = "left"
        if kind is not None:
            self._run.abandon(self, error)
            return False
        if self.data_ended and self._yielded == self._backwards:
            self._run.discard_remainder(self)
            return False
        if (missing := self._missing()) is not None:
            incomplete = StepIncomplete(missing)
            self._run.abandon(self, incomplete)
            raise incomplete
        self.seconds = self._run.clock.monotonic() - self._began
        self._run.leave(self)
        return False

    def microbatches(self, parts: int = 1, *, splitter: Splitter | None = None) -> Iterator[Any]:
        """The step's batches, each cut into `parts` (1: the batch object itself). Once per step."""
        self._must_be_open("microbatches()")
        if self.parts is not None:
            raise StepError("microbatches() was called twice in one step: loop over it once")
        if not isinstance(parts, int) or parts < 1:
            raise StepError(f"microbatches({parts!r}): the number of parts is a whole number from 1")
        self.parts = parts * self.accumulate
        return _Microbatches(self, parts, splitter)

    def backward(self, loss: Tensor, weight: float | None = None) -> None:
        """Backpropagate one part's mean loss, weighted so that the step's gradient is that of the mean over all of it.

        `weight` (tokens, say) replaces the count of samples where given.
        """
        self._must_be_open("backward()")
        self._check_loss(loss)
        if self.parts is None or self._backwards >= self._yielded:
            raise StepError(
                f"backward() was called {self._backwards + 1} times for {self._yielded} parts: call it once for each "
                "batch of step.microbatches()"
            )
        own = float(weight) if weight is not None else self._current
        own = 1.0 if own is None else own
        if not own >= 0 or own == float("inf"):
            raise StepError(f"backward(weight={weight!r}): a weight is a finite number, not negative")
        several = self._run.ranks.size > 1
        self.weighted = self.weighted or weight is not None
        self._backwards += 1
        value = loss if loss.dim() == 0 else loss.reshape(())
        if own == 0:  # nothing in it counts (every label ignored): left out, for its loss may be NaN
            self._nothing = _here(value.detach()).float() * float("nan")
            if several:  # the others wait for this rank's gradients: none
                with ExitStack() as none:
                    for _, module in self._run.state.modules:
                        none.enter_context(zero_gradients(module))
                    self._backward(value * 0.0, counts=False)
            return
        if self._reference is None:
            # Several ranks must weigh by the same unit: their gradients are added up before anybody knows the sum.
            self._reference = self._unit if several and weight is not None else own
        share = own / self._reference
        self._weights.append(share)
        mean = _here(value.detach()).float()
        self.losses.append(mean)
        mean = mean if share == 1.0 else mean * share
        self._loss = mean if self._loss is None else self._loss + mean
        if several and weight is None:
            share = 1.0  # each part counts alike, as it does where ranks average their gradients
        if share != 1.0:
            value = value * (share / self.parts)
        elif self.parts != 1:
            value = value / self.parts
        self._backward(value)

    def _backward(self, value: Tensor, counts: bool = True) -> None:
        scaler = self._run.state.scaler
        self.where = "backward"
        (value if scaler is None else scaler.scale(value)).backward()  # type: ignore[no-untyped-call]
        self._run.witness.finish_backward(counts)
        self.where = "forward"

    @property
    def outcome(self) -> Outcome:
        """What became of it. Reading it settles the step, which waits for the device."""
        if self._state != "left":
            raise StepError("step.outcome is known after the `with step:` block")
        if self.result is None:
            self._run.flush()
        if self.result is None:
            raise StepError(f"step {self.number} has no outcome: an error came out of it, and nothing was applied")
        return self.result

    @property
    def loss(self) -> float:
        """The step's mean loss so far. Waits for the device."""
        value = self.mean_loss()
        return float("nan") if value is None else float(value)

    # ---- what the run asks

    @property
    def entered(self) -> bool:
        return self._state != "new"

    @property
    def is_open(self) -> bool:
        return self._state == "open"

    def mean_loss(self) -> Tensor | None:
        """The mean over the parts, by weight; NaN where none of them counts."""
        if self._loss is None:
            return self._nothing
        total = sum(self._weights)
        return self._loss if total == 1.0 else self._loss / total

    def correction(self) -> float:
        """What the gradients are to be multiplied by, once the weights of all parts are known; 1 where all were equal.
        Of several ranks none knows it alone: `unit_total`."""
        total = sum(self._weights)
        assert self.parts is not None
        return 1.0 if total == self.parts or not total or self._run.ranks.size > 1 else self.parts / total

    @property
    def weight(self) -> float:
        """What all its parts weigh together; 0 where none of them counts."""
        return sum(self._weights) * (self._reference or 0.0)

    def unit_total(self) -> float | None:
        """What all parts of this rank would weigh if each weighed the unit; None where the loop says nothing of weights."""
        assert self.parts is not None
        return self.parts * (self._reference or self._unit) if self.weighted else None

    @property
    def samples(self) -> int | None:
        if len(self.draws) == 1:
            return self.draws[0].samples
        counts = [d.samples for d in self.draws]
        return None if any(c is None for c in counts) else sum(c for c in counts if c is not None)

    def spans(self) -> tuple[Span, ...]:
        """Its stretches of data, neighbours joined."""
        if len(self.draws) == 1:
            return (self.draws[0].span,)
        joined: list[Span] = []
        for span in (d.span for d in self.draws):
            if joined and joined[-1].epoch == span.epoch and joined[-1].stop == span.start:
                joined[-1] = Span(span.epoch, joined[-1].start, span.stop)
            else:
                joined.append(span)
        return tuple(joined)

    def _missing(self) -> str | None:
        if self.parts is None:
            return (
                f"step {self.number} was left without step.microbatches(): draw its batches with "
                "`for batch in step.microbatches():` and call step.backward(loss) for each; nothing was applied"
            )
        if self._backwards < self._yielded or not self._drained():
            return (
                f"step {self.number} was left after {self._backwards} of {self.parts} backwards: `break` or `continue` "
                "in the micro-batch loop leaves a part of the batch out; call step.backward(loss) for every part, and "
                "use guard.stop() to end the run; nothing was applied"
            )
        return None

    def _drained(self) -> bool:
        return len(self.draws) == self.accumulate and self._pieces_left == 0

    def _must_be_open(self, what: str) -> None:
        if self._state == "new":
            raise StepError(f"step.{what} outside of the step: write `with step:` around it")
        if self._state == "left":
            raise StepError(f"step.{what} after the step was left: it belongs inside `with step:`")

    def _check_loss(self, loss: Any) -> None:
        if not isinstance(loss, Tensor):
            raise StepError(f"backward({loss!r}): the loss is a {type(loss).__name__}; pass the tensor, not its value")
        if loss.numel() != 1:
            raise StepError(
                f"backward(): the loss has shape {tuple(loss.shape)}; reduce it to one number, as with loss.mean()"
            )
        if not loss.requires_grad:
            raise StepError(
                "backward(): the loss has no graph: it was computed under torch.no_grad() or from .item() or .detach(), "
                "or no parameter behind it requires a gradient"
            )

    _pieces_left = 0

    def _note_piece(self, weight: int | None, left: int) -> None:
        self._yielded += 1
        self._current = None if weight is None else float(weight)
        self._pieces_left = left


class _Microbatches:
    """Batches are drawn one by one, when they are asked for, as a plain loop over the loader would."""

    def __init__(self, step: Step, parts: int, splitter: Splitter | None) -> None:
        self._step, self.parts, self._splitter = step, parts, splitter
        self._taken = 0
        self._pieces: list[tuple[Any, int | None]] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        step = self._step
        step._must_be_open("microbatches()")
        if step._backwards < step._yielded:
            raise StepIncomplete(
                f"step {step.number}: the last batch was left without step.backward(loss); a `continue` in the "
                "micro-batch loop leaves a part of the batch out; nothing was applied"
            )
        if not self._pieces:
            if self._taken >= step.accumulate or step.data_ended:
                raise StopIteration
            if self._taken >= len(step.draws) and not step._run.draw_more(step):
                raise StopIteration
            draw = step.draws[self._taken]
            self._taken += 1
            if step.fingerprint is not None:
                step.fingerprint.add(draw.batch)
            self._pieces = self._cut(draw)
        piece, weight = self._pieces.pop(0)
        step._note_piece(weight, len(self._pieces))
        step._run.sync.before_forward(last=self._taken == step.accumulate and not self._pieces)
        return piece

    def _cut(self, draw: Draw) -> list[tuple[Any, int | None]]:
        if self.parts == 1:
            return [(draw.batch, draw.samples)]
        pieces = list((self._splitter or split)(draw.batch, self.parts))
        if self._splitter is not None and len(pieces) != self.parts:
            raise StepError(f"splitter returned {len(pieces)} parts instead of {self.parts}")
        return [(piece, count_samples(piece)) for piece in pieces]


def _here(value: Tensor) -> Tensor:
    """A loss that is spread over ranks (loss_parallel), as each of them knows it."""
    whole = getattr(value, "full_tensor", None)
    return value if whole is None else whole()


@torch.no_grad()
def discount(parameters: list[Tensor], factor: float | Tensor) -> None:
    """Multiply every gradient by `factor`; of a sharded one, the shard that is here."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    here = [local(g) for g in gradients]
    if here:
        foreach_mul_(here, factor)
