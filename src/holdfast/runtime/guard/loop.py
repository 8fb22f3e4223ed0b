"""Drives a run from a loop that belongs to someone else: a classic loop over batches, or the loop of a trainer.

The loop draws batches, calls `loss.backward()`, and asks for the update. A step begins with the first batch after an update
and ends with the next update. If an update does not land, the next batch is the one the run continues with. What the loop
has done in between (schedule, counters, random draws) is taken back before it is drawn.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from traceback import walk_tb
from typing import Any, Self

import torch
from torch import Tensor

from holdfast.core.base.clock import Clock
from holdfast.core.base.errors import HoldfastError, PolicyStop, SetupError, StepError
from holdfast.core.base.types import Outcome, Status
from holdfast.runtime.data.pieces import COPIED, FailedPart, Piece
from holdfast.runtime.data.split import Splitter
from holdfast.runtime.effects.attempt import StepAttempt
from holdfast.runtime.step.interface import Run
from holdfast.runtime.tensors.norms import Norm
from holdfast.runtime.tensors.torch_private import call_before_threads_end

_LANDED = (Status.COMMITTED, Status.OVERFLOWED)
"""an overflow is no fault: torch goes on with the next batch, and so does the loop"""
_ENDED_EARLIER = (
    "an earlier process has finished this epoch: draw with `for batch in guard.data(loader)`, inside `while True:` if the "
    "loop has no epochs, instead of next(); or use guard.data(function)"
)
_CLIPPED = 0.999
"""gradients whose norm is below this share of what the backward left were clipped"""


class StepUndone(Exception):
    """Raised through a trainer's loop by an update that did not land: the loop goes back to where the run is now."""


class DrivenLoop:
    """Turns draws, losses and updates of a loop into steps of the run."""

    def __init__(self, run: Run, clock: Clock) -> None:
        self._run, self._pipeline, self._clock = run, run.pipeline, clock
        self._attempt: StepAttempt | None = None
        self._began = 0.0
        self._before: dict[str, Any] = {}
        """small registered objects as they were before the step"""
        self._had_gradients: list[Tensor] = []
        """parameters that had a gradient when the step began: zeros, if the loop clears with zeros"""
        self._between: Any = None
        """what the loop may have changed since an update that did not land, or since the run was resumed"""
        self.is_resuming = False
        """no batch was drawn since the run was resumed: epochs that end at once ended in an earlier process"""
        self._is_in_epoch = False
        """a batch was drawn, and the end of its epoch was not reached"""
        self._microbatches = 0
        """those that the step has begun, if the loop asks for their parts"""
        self._served: FailedPart | None = None
        """the last of them"""
        self._trial: list[Piece] = []
        self._sum: Tensor | None = None
        """the sum of what the loop has called backward on in this step, if it does not name its losses"""
        self._clip: float | None = None
        """the norm to which the loop was seen to clip"""
        self.finds_clip = False
        """the loop clips by itself, without saying so"""
        self.outcome: Outcome | None = None
        """what became of the last update"""
        self.current_epoch: Callable[[], int] | None = None
        """returns the epoch of the data that the loop is in, if the loop counts epochs itself"""

    @property
    def is_in_step(self) -> bool:
        """Return whether batches were drawn since the last update."""
        return self._attempt is not None and self._attempt.is_open

    def attach(
        self, loader: Iterable[Any] | Callable[[int], Any], epochs: int | None, start: tuple[int, int] | None = None
    ) -> bool:
        """Take batches from `loader`, for this many further epochs. The first call resumes the run. Return whether it did.

        start: the epoch, and the batches of it that are trained on already, if a trainer resumes by itself.
        """
        self._pipeline.settle_at_once()
        is_resumed = self._run.attach(loader, epochs, 1, None, start)  # type: ignore[arg-type]
        self.begin(is_resumed=is_resumed)
        return is_resumed

    def begin(self, *, is_resumed: bool) -> None:
        """Keep what was restored: in the process before, what the loop does before its first draw was done already."""
        if is_resumed:
            self._between, self.is_resuming = self._pipeline.capture_between_steps(is_resumed=True), True

    def leave_epoch(self) -> None:
        """End the epoch in which the loop was left with `break`. Nothing to do if it has ended by itself."""
        if self._is_in_epoch:
            self._is_in_epoch = False
            self._pipeline.leave_epoch()

    def forget_resume(self) -> None:
        """Count what the loop does from now on: the resumed process had ended between two of the loop's epochs."""
        self._between, self.is_resuming = None, False

    def next_batch(self, max_steps: int | None = None) -> Any:
        """Return the next batch. StopIteration at the end of the epochs that were asked for, or if the run stops."""
        self._is_in_epoch = False
        batch = self._draw(max_steps)
        self._is_in_epoch = True
        return batch

    def _draw(self, max_steps: int | None) -> Any:
        pipeline, attempt = self._pipeline, self._attempt
        if attempt is not None and attempt.is_open:
            attempt.data_ended = False
            self._serve_epoch()
            if not pipeline.draw_batch(attempt):
                pipeline.end_epochs_inside(attempt)  # the loop goes on with what it does at the end of an epoch
                raise StopIteration
            return attempt.draws[-1].batch
        attempt = self.draw_step(1, max_steps)
        if attempt is None:
            self.end_for()
            raise StopIteration(_ENDED_EARLIER if self.is_resuming else "")
        self._attempt, self._sum, self._microbatches = attempt, None, 0
        self._before = pipeline.copy_registered()
        self._had_gradients = pipeline.with_gradients() if pipeline.keeps_gradients else []
        pipeline.keep_schedule(attempt)
        pipeline.enter(attempt)
        self._began = self._clock.monotonic()
        return attempt.draws[0].batch

    def draw_step(self, accumulate: int, max_steps: int | None) -> StepAttempt | None:
        """Take back what the loop has done since an update that did not land, or since the run was resumed, and draw."""
        if self._between is not None:
            self._pipeline.restore_between_steps(self._between)
            if not self.is_resuming:  # if the epoch ends here, what the loop does after it belongs to the run
                self._between = None
        self._serve_epoch()
        attempt = self._pipeline.draw_step(accumulate, max_steps)
        if attempt is not None:
            self.forget_resume()
        return attempt

    def end_for(self) -> None:
        """Note that a `for` of the loop ends."""
        if self._pipeline.end_for(repeats=self.current_epoch is None) and self.is_resuming:
            self.forget_resume()  # the earlier process has ended before the lines at the end of this epoch

    def _serve_epoch(self) -> None:
        if self.current_epoch is not None:  # read only now: an update that did not land may have taken it back
            self._pipeline.serve_epoch(self.current_epoch())

    def batches_left(self) -> int | None:
        """Return how many batches of the current epoch are still to come; None if that is not known."""
        return self._pipeline.batches_left()

    def serve_in_parts(self, splitter: Splitter | None = None) -> None:
        """Note that the loop asks for the parts of micro-batches. After an error, ranks are restarted, split alike.

        splitter: that of the loop, if the user has none.
        """
        if self._pipeline.oom is not None:
            self._pipeline.oom.default_splitter = splitter
            self._pipeline.oom.restart_ranks()

    def keep_gradients(self) -> None:
        """Leave the gradients of an update that lands to the loop, which clears them itself."""
        self._pipeline.keeps_gradients = True

    @property
    def has_loss(self) -> bool:
        """Return whether the step has a loss so far."""
        return self._attempt is not None and bool(self._attempt.losses)

    def add_loss(self, loss: Tensor) -> None:
        """Count the loss of one part of the step, after its backward. The step's loss is the mean over its parts."""
        attempt = self._in_step("the loss")
        attempt.add_part(
            loss.detach().reshape(()), 1.0, is_explicit=False, is_distributed=self._pipeline.is_distributed
        )
        self._pipeline.after_backward(attempt)

    def parts_of(self, batch: Any) -> list[Piece] | None:
        """Return the parts in which a micro-batch is to be run, if the whole does not fit into memory; else None."""
        attempt, oom = self._in_step("the forward"), self._pipeline.oom
        self._microbatches += 1
        as_served = batch.copy() if isinstance(batch, COPIED) else batch
        self._served = FailedPart(as_served, self.samples_drawn(), None, self._microbatches)
        if oom is None or not oom.is_splitting:
            return None
        pieces = oom.pieces(attempt, batch, self._served.samples)
        self._trial = [piece for piece in pieces if piece.is_trial]
        return None if len(pieces) == 1 else pieces[len(self._trial) :]

    def run_trial(self, run: Callable[[Piece], Tensor | None]) -> None:
        """Run smaller parts of the micro-batch without gradients, if their loss is to be compared with that of its parts.

        run: returns what a part adds to the loss of the whole.
        """
        attempt, oom = self._in_step("the forward"), self._pipeline.oom
        if oom is None or not self._trial:
            return
        try:
            oom.trial.begin(self._pipeline)
            for piece in self._trial:
                oom.add_trial_loss(attempt, piece, run(piece), piece.share)
        except HoldfastError:
            raise
        except Exception as error:
            oom.stop_trial(attempt.number, error)
        finally:
            oom.trial.end(self._pipeline)

    def samples_drawn(self) -> int | None:
        """Return how many samples the sampler has drawn for the micro-batch: its tensors may have two rows for each."""
        attempt = self._in_step("a micro-batch")
        return attempt.draws[min(self._microbatches, len(attempt.draws)) - 1].samples

    def end_part(self, piece: Piece) -> None:
        """Note that the backward of a part is over."""
        attempt = self._in_step("a part of a micro-batch")
        self._pipeline.after_backward(attempt)
        if self._pipeline.oom is not None:
            self._pipeline.oom.check_piece(attempt, piece)

    def report_inexact_parts(self, why: str) -> None:
        """Report that parts do not give the gradient of the whole. StepError if the policy forbids that."""
        if self._pipeline.oom is not None:
            self._pipeline.oom.report_inexact(self._in_step("a part of a micro-batch").number, why)

    @contextlib.contextmanager
    def without_trace(self) -> Iterator[None]:
        """Take back what is done inside to random state, buffers, schedule and registered objects."""
        before = self._pipeline.capture_between_steps()
        try:
            yield
        finally:
            torch.clear_autocast_cache()  # weights that were cast without gradients would get none
            self._pipeline.restore_between_steps(before)

    def heal_out_of_memory(self, error: BaseException) -> bool:
        """Undo a step that ran out of memory in forward or backward, so that its data comes again, in parts.

        Return False if the error must end the loop.
        """
        attempt = self._in_step("the forward")
        if any(frame.f_code.co_name == "backward" for frame, _ in walk_tb(error.__traceback__)):
            attempt.running = "backward"
        if not self._pipeline.heal_out_of_memory(attempt, error, self._served):
            return False
        assert attempt.result is not None, "ranks do not heal each other here"
        self._undo(attempt.result)
        return True

    def add_backward(self, value: Tensor) -> None:
        """Count a tensor that the loop has called backward on. The step's loss is the sum, as its gradient is."""
        attempt = self._in_step("backward()")
        self._sum = value if self._sum is None else self._sum + value
        self._pipeline.after_backward(attempt)
        self._pipeline.measure(attempt)

    def measure(self, max_norm: float | None = None) -> Tensor:
        """Measure the gradients before the loop clips them to `max_norm`. Return their norm on this rank."""
        attempt = self._in_step("clipping")
        attempt.clipped_to = max_norm
        return self._pipeline.measure(attempt)

    def take_norm(self, norm: Tensor, max_norm: float) -> None:
        """Take the norm that the loop itself has measured before it clipped to `max_norm`, on a single rank."""
        attempt = self._in_step("clipping")
        attempt.clipped_to, attempt.norm = max_norm, Norm(norm.detach())

    def _find_clip(self, attempt: StepAttempt) -> None:
        """Find out by measuring whether the loop has clipped the gradients, and to which norm.

        Shards are left out: each rank would find another norm, and ranks must have the same limits.
        """
        if attempt.norm is not None and attempt.norm.is_total:
            after = self._pipeline.measure_clipped()
            if after < _CLIPPED * float(attempt.norm.value):
                self._clip = after
        attempt.clipped_to = self._clip

    def update(self) -> Outcome:
        """Apply the update, or do not, and return what became of it. The optimizers must not be stepped otherwise."""
        attempt = self._in_step("the update")
        if not attempt.losses and self._sum is not None:
            attempt.add_part(self._sum, 1.0, is_explicit=False, is_distributed=self._pipeline.is_distributed)
        if self.finds_clip:
            self._find_clip(attempt)
        if not attempt.losses:
            raise StepError(
                f"step {attempt.number} has no loss: call guard.step(loss) after loss.backward(), or, with Guard.wrap, "
                "loss.backward() itself"
            )
        attempt.parts = len(attempt.losses)
        attempt.seconds = self._clock.monotonic() - self._began
        self._pipeline.submit(attempt)
        outcome = self.outcome = attempt.result
        assert outcome is not None, "the host decides, so the step has settled"
        if outcome.status not in _LANDED:
            self._undo(outcome)
        return outcome

    def _undo(self, outcome: Outcome) -> None:
        """Take back what the loop has done in a step that did not land."""
        self.outcome = outcome
        if self._pipeline.keeps_gradients:
            self._pipeline.clear_gradients(self._had_gradients)
        is_rolled_back = outcome.status is Status.ROLLED_BACK
        if not is_rolled_back:
            self._pipeline.restore_registered(self._before)
        self._between = self._pipeline.capture_between_steps(None if is_rolled_back else self._attempt)

    def update_or_raise(self) -> Outcome:
        """Apply the update. StepUndone if it does not land, for a trainer's loop that is to go back."""
        outcome = self.update()
        if outcome.status not in _LANDED:
            raise StepUndone(outcome.status)
        return outcome

    @property
    def landed(self) -> bool:
        """Return whether the last update was applied."""
        return self.outcome is not None and self.outcome.status is Status.COMMITTED

    def abandon(self, error: BaseException) -> None:
        """Apply nothing of a step that an error came out of."""
        if self._attempt is not None and self._attempt.is_open:
            self._pipeline.abandon(self._attempt, error)

    def _in_step(self, what: str) -> StepAttempt:
        if self._attempt is None or not self._attempt.is_open:
            raise StepError(
                f"{what} belongs to no step: draw a batch with `for batch in guard.data(loader):` before it, and update "
                "once for each step"
            )
        return self._attempt


class GuardedData:
    """Batches of a run, for `for` loops. Each loop runs to the end of its own epoch, whatever is served again on the way."""

    def __init__(self, loader: Any, begin: Callable[[], None], draw: Callable[[], Any]) -> None:
        self._loader, self._begin, self._draw = loader, begin, draw
        self._is_begun = True
        """the epoch that was asked for when the object was made has not been iterated yet"""

    def __iter__(self) -> Self:
        if not self._is_begun:
            self._begin()
        self._is_begun = False
        return self

    def __next__(self) -> Any:
        return self._draw()

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class Counters:
    """Numbers that a loop counts, and that go back with the run: `seen = guard.counters(tokens=0)`, `seen.tokens += n`."""

    def __init__(self, **start: float) -> None:
        for name, value in start.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise SetupError(f"counters({name}={value!r}): a counter is a number")
        vars(self).update(start)

    def __setattr__(self, name: str, value: float) -> None:
        if name not in vars(self):
            raise AttributeError(f"no counter {name!r}: there are {', '.join(vars(self))}; name it in guard.counters()")
        vars(self)[name] = value

    def __repr__(self) -> str:
        return f"Counters({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def state_dict(self) -> dict[str, float]:
        """Return the numbers by name."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Set the numbers of the names it has."""
        vars(self).update({name: value for name, value in state.items() if name in vars(self)})


class CommittedSteps(int):
    """The number of committed steps. Called with a loss, it ends the step of a classic loop."""

    _end_step: Callable[..., Outcome | None]

    def __new__(cls, value: int, end_step: Callable[..., Outcome | None]) -> Self:
        steps = super().__new__(cls, value)
        steps._end_step = end_step
        return steps

    def __call__(self, loss: Tensor, *, update: bool = True) -> Outcome | None:
        return self._end_step(loss, update=update)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def is_batch_function(loader: Any) -> bool:
    """Return whether `loader` returns the batch of a number. A dataset has no `__iter__` either, and is no function."""
    return callable(loader) and not hasattr(loader, "__iter__")


class PlainData:
    """The same batches with the guard switched off, for a loop that keeps its own lines."""

    def __init__(self, loader: Any, is_over: Callable[[], bool]) -> None:
        self._loader, self._is_over = loader, is_over
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> Self:
        self._batches = map(self._loader, count()) if is_batch_function(self._loader) else iter(self._loader)
        return self

    def __next__(self) -> Any:
        if self._is_over():
            raise StopIteration
        return next(self._batches or iter(self))

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def close_at_exit(guard: Any) -> None:
    """Close the guard when the process ends, if the loop has not: the last steps are saved, and the record has an end."""
    if not _to_close:  # not `atexit`: by then the threads that write checkpoints are gone
        call_before_threads_end(_close_all)
    _to_close.append(weakref.ref(guard))


def _close_all() -> None:
    for guard in filter(None, (reference() for reference in _to_close)):
        with contextlib.suppress(PolicyStop):  # it is logged, and the process ends with the loop's own status
            guard.close(getattr(sys, "last_value", None))


_to_close: list[weakref.ref[Any]] = []
"""guards whose loop may end without closing them; closing one that is closed does nothing"""
