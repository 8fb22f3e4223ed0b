"""The loop that ships: `for step in guard.steps(...)`, `with step:`, `step.microbatches()`, `step.backward(loss)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

from torch import OutOfMemoryError, Tensor, strided

from holdfast.core.base.clock import Clock
from holdfast.core.base.errors import HoldfastError, Shutdown, StepError, StepIncomplete
from holdfast.core.base.types import Outcome, Span
from holdfast.runtime.data.pieces import COPIED, FailedPart, Piece
from holdfast.runtime.data.source import Draw
from holdfast.runtime.data.split import Splitter, count_samples, split
from holdfast.runtime.effects.attempt import StepAttempt
from holdfast.runtime.guard.loop import DrivenLoop
from holdfast.runtime.step.interface import Pipeline


class Steps:
    """Yields steps until `max_steps` are committed, the data ends, or the run is asked to stop.

    A class, not a generator: an error raised while `break` closes a generator is lost.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        clock: Clock,
        accumulate: int,
        max_steps: int | None,
        loop: DrivenLoop,
        save: Callable[[Shutdown], None] = lambda error: None,
    ) -> None:
        self._pipeline, self._clock, self._accumulate, self._max_steps = pipeline, clock, accumulate, max_steps
        self._loop = loop
        self._save = save
        """called before a Shutdown leaves the loop"""
        self._last: Step | None = None
        self._is_done = False

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if self._last is not None:
            self._last.require_finished()
        pipeline = self._pipeline
        while not self._is_done:
            try:
                drawer = self._loop if self._loop.is_resuming else pipeline
                attempt = drawer.draw_step(self._accumulate, self._max_steps)
            except Shutdown as error:
                self._save(error)
                raise
            if attempt is not None:
                self._last = Step(pipeline, attempt, self._clock)
                return self._last
            # Settling the last step may undo it and requeue its data: then there is more to do.
            self._is_done = pipeline.flush() or pipeline.progress.stopping is not None
            if self._is_done:
                self._loop.end_for()
        raise StopIteration


class Step:
    """One step of `guard.steps()`: `accumulate` batches, one update. It may be tried more than once."""

    def __init__(self, pipeline: Pipeline, attempt: StepAttempt, clock: Clock) -> None:
        self._pipeline, self._attempt, self._clock = pipeline, attempt, clock
        self._began = 0.0
        self._drawn_parts = 0
        self._backwards = 0
        self._pieces_left = 0
        self._part_samples: int | None = None
        self._piece: Piece | None = None
        """what is served of a micro-batch that is too large for memory"""
        self._served: FailedPart | None = None
        """the micro-batch that is served now"""

    @property
    def number(self) -> int:
        """The step's number if it is committed, counted from 1."""
        return self._attempt.number

    @property
    def attempt(self) -> int:
        """1 for the first try of this step."""
        return self._attempt.attempt

    @property
    def data(self) -> tuple[Span, ...]:
        """The stretches of the data stream drawn for it so far."""
        return self._attempt.spans() if self._attempt.draws else ()

    def __enter__(self) -> Self:
        if self._attempt.phase != "drawn":
            raise StepError(
                f"step {self.number} was entered twice: `with step:` belongs once into the body of "
                "`for step in guard.steps(...)`"
            )
        self._pipeline.enter(self._attempt)
        self._began = self._clock.monotonic()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        attempt, pipeline = self._attempt, self._pipeline
        may_heal, oom = isinstance(error, OutOfMemoryError), pipeline.oom
        if oom is not None and oom.trial.is_running:
            oom.trial.end(pipeline)
            if isinstance(error, Exception) and not isinstance(error, HoldfastError):
                oom.stop_trial(attempt.number, error, is_in_step=True)
                may_heal = True
        if error is not None and may_heal and pipeline.heal_out_of_memory(attempt, error, self._served):
            return True  # the next step is this one again
        if error is not None and self._piece is not None and oom is not None:
            oom.explain_part(error, self._piece)
        if error is not None:
            pipeline.abandon(attempt, error)
        elif attempt.data_ended and self._drawn_parts == self._backwards:
            pipeline.discard_remainder(attempt)
        elif (missing := self._missing()) is not None:
            incomplete = StepIncomplete(missing)
            pipeline.abandon(attempt, incomplete)
            raise incomplete
        else:
            attempt.seconds = self._clock.monotonic() - self._began
            pipeline.submit(attempt)
        return False

    def microbatches(self, parts: int = 1, *, splitter: Splitter | None = None) -> Iterator[Any]:
        """Yield the step's batches, each split into `parts` (1: the batch object itself). Call it once a step."""
        self._require_open("microbatches()")
        if self._attempt.parts is not None:
            raise StepError("microbatches() was called twice in one step: loop over it once")
        if not isinstance(parts, int) or parts < 1:
            raise StepError(f"microbatches({parts!r}): the number of parts is a whole number from 1")
        self._attempt.parts = parts * self._attempt.accumulate
        return _Microbatches(self, parts, splitter)

    def backward(self, loss: Tensor, weight: float | None = None, *, group: str | None = None) -> None:
        """Backpropagate one part's mean loss. Parts are weighted so that the gradient is that of the mean over all.

        `weight` (tokens, say) replaces the number of samples. `group` names the kind of loss, such as a task: the losses
        of each group are compared with their own past only.
        """
        self._require_open("backward()")
        attempt, piece, oom = self._attempt, self._piece, self._pipeline.oom
        is_trial = piece is not None and piece.is_trial
        check_loss(loss, needs_graph=not is_trial)
        if attempt.parts is None or self._backwards >= self._drawn_parts:
            raise StepError(
                f"backward() was called {self._backwards + 1} times for {self._drawn_parts} parts: call it once for each "
                "batch of step.microbatches()"
            )
        samples = 1.0 if self._part_samples is None else float(self._part_samples)
        part_weight = samples if weight is None else float(weight)
        if not part_weight >= 0 or part_weight == float("inf"):
            raise StepError(f"backward(weight={weight!r}): a weight is a finite number, not negative")
        if group is not None and not (isinstance(group, str) and group and "@" not in group):
            raise StepError(f"backward(group={group!r}): a group is a name, without '@'")
        self._backwards += 1
        if piece is not None and oom is not None and is_trial:
            counts = piece.share if weight is None else part_weight
            oom.add_trial_loss(attempt, piece, loss.detach() * (piece.scale * counts), counts)
            return
        attempt.add_group(group)
        value, fraction = loss if loss.dim() == 0 else loss.reshape(()), 1.0
        if piece is not None:
            part_weight = 0.0 if piece.is_filler else part_weight
            fraction = piece.share if weight is None else 1.0  # a weight of the loop's own is that of the piece
            value = value if piece.scale == 1.0 else value * piece.scale
        factor = attempt.add_part(
            value,
            part_weight,
            is_explicit=weight is not None,
            is_distributed=self._pipeline.is_distributed,
            fraction=fraction,
        )
        self._pipeline.backward(attempt, value, factor)
        if piece is not None and oom is not None:
            oom.check_piece(attempt, piece)

    @property
    def outcome(self) -> Outcome:
        """What became of the step. Reading it settles the step, which waits for the device."""
        if self._attempt.phase != "left":
            raise StepError("step.outcome is known after the `with step:` block")
        if self._attempt.result is None:
            self._pipeline.flush()
        if self._attempt.result is None:
            raise StepError(f"step {self.number} has no outcome: an error came out of it, and nothing was applied")
        return self._attempt.result

    @property
    def loss(self) -> float:
        """The step's mean loss so far. Reading it waits for the device."""
        return self._attempt.loss

    def mean_loss(self) -> Tensor | None:
        """Return the step's mean loss so far as a tensor, without waiting; None before the first backward."""
        return self._attempt.mean_loss()

    # ---- for the loop

    def require_finished(self) -> None:
        """Raise StepError unless the step was entered and left."""
        if self._attempt.phase == "drawn":
            raise StepError(
                f"step {self.number} was never entered: write `with step:` around the body of "
                "`for step in guard.steps(...)`"
            )
        if self._attempt.phase == "open":
            raise StepError(f"step {self.number} is still open: leave its `with step:` before the next one is served")

    def _missing(self) -> str | None:
        parts = self._attempt.parts
        if parts is None:
            return (
                f"step {self.number} was left without step.microbatches(): draw its batches with "
                "`for batch in step.microbatches():` and call step.backward(loss) for each; nothing was applied"
            )
        is_drained = len(self._attempt.draws) == self._attempt.accumulate and self._pieces_left == 0
        if self._backwards < self._drawn_parts or not is_drained:
            return (
                f"step {self.number} was left after {self._backwards} of {parts} backwards: `break` or `continue` "
                "in the micro-batch loop leaves a part of the batch out; call step.backward(loss) for every part, and "
                "use guard.stop() to end the run; nothing was applied"
            )
        return None

    def _require_open(self, what: str) -> None:
        if self._attempt.phase == "drawn":
            raise StepError(f"step.{what} outside of the step: write `with step:` around it")
        if self._attempt.phase == "left":
            raise StepError(f"step.{what} after the step was left: it belongs inside `with step:`")


class _Microbatches:
    """Draws batches one by one, when they are asked for, as a plain loop over the loader does."""

    def __init__(self, step: Step, parts: int, splitter: Splitter | None) -> None:
        self._step, self._parts, self._splitter = step, parts, splitter
        self._taken = 0
        self._parts_left: list[tuple[Any, int | None]] = []
        self._pieces: list[Piece] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        step, attempt = self._step, self._step._attempt
        step._require_open("microbatches()")
        if step._backwards < step._drawn_parts:
            raise StepIncomplete(
                f"step {step.number}: the last batch was left without step.backward(loss); a `continue` in the "
                "micro-batch loop leaves a part of the batch out; nothing was applied"
            )
        if attempt.is_filler and not self._taken:  # if the data ends inside the step, no rank averages gradients in it
            while len(attempt.draws) < attempt.accumulate and step._pipeline.draw_batch(attempt):
                pass
        if not self._pieces and not self._parts_left:
            if self._taken >= attempt.accumulate or attempt.data_ended:
                raise StopIteration
            if self._taken >= len(attempt.draws) and not step._pipeline.draw_batch(attempt):
                raise StopIteration
            draw = attempt.draws[self._taken]
            self._taken += 1
            self._parts_left = self._split(draw)
        if not self._pieces:
            part, step._part_samples = self._parts_left.pop(0)
            as_served = part.copy() if isinstance(part, COPIED) else part
            step._served = FailedPart(as_served, step._part_samples, self._splitter, step._drawn_parts + 1)
            oom = step._pipeline.oom
            if oom is None or not oom.is_splitting:
                step._drawn_parts += 1
                step._pieces_left = len(self._parts_left)
                self._before_forward(attempt)
                return part
            self._pieces = oom.pieces(attempt, part, step._part_samples, self._splitter)
            if attempt.is_filler:
                self._parts_left.clear()
                self._taken = attempt.accumulate
        step._piece = piece = self._pieces.pop(0)
        oom = step._pipeline.oom
        if oom is not None and oom.trial.is_running != piece.is_trial:
            (oom.trial.begin if piece.is_trial else oom.trial.end)(step._pipeline)
        step._drawn_parts += 1
        step._pieces_left = len(self._parts_left) + len(self._pieces)
        self._before_forward(attempt)
        return piece.batch

    def _before_forward(self, attempt: StepAttempt) -> None:
        pipeline = self._step._pipeline
        if pipeline.averages_gradients:
            is_last = self._taken == attempt.accumulate and not self._pieces and not self._parts_left
            pipeline.before_forward(is_last=is_last)

    def _split(self, draw: Draw) -> list[tuple[Any, int | None]]:
        if self._parts == 1:
            return [(draw.batch, draw.samples)]
        pieces = list((self._splitter or split)(draw.batch, self._parts))
        if self._splitter is not None and len(pieces) != self._parts:
            raise StepError(f"splitter returned {len(pieces)} parts instead of {self._parts}")
        return [(piece, count_samples(piece)) for piece in pieces]


def check_loss(loss: Any, *, needs_graph: bool = True) -> None:
    """Raise StepError if a loss cannot be minimised."""
    if not isinstance(loss, Tensor):
        raise StepError(f"backward({loss!r}): the loss is a {type(loss).__name__}; pass the tensor, not its value")
    if loss.numel() != 1:
        raise StepError(
            f"backward(): the loss has shape {tuple(loss.shape)}; reduce it to one number, as with loss.mean()"
        )
    if not loss.dtype.is_floating_point:
        cure = "take its real part or its absolute value" if loss.is_complex() else "convert the parts to floats before"
        raise StepError(f"backward(): the loss is of {loss.dtype}, and only a real number can be minimised; {cure}")
    if loss.is_meta or loss.layout is not strided:
        where = "on the meta device and has no value" if loss.is_meta else f"of layout {loss.layout}"
        raise StepError(
            f"backward(): the loss is {where}; compute it with the model and data on a device, as a plain tensor"
        )
    if needs_graph and not loss.requires_grad:
        raise StepError(
            "backward(): the loss has no graph: it was computed under torch.no_grad() or from .item() or .detach(), "
            "or no parameter behind it requires a gradient"
        )
