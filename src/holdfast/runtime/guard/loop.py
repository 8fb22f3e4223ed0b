"""The iterator behind `guard.steps`. A class, not a generator: an error raised while `break` closes a generator is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from holdfast.core.base.errors import StepError
from holdfast.runtime.step.step import Step


class Serves(Protocol):
    """What the loop needs of a run."""

    step: int
    stopping: str | None
    exhausted: bool
    pending: Step | None

    def in_time(self) -> None: ...
    def serve(self, accumulate: int) -> Step | None: ...
    def flush(self) -> bool: ...


class Steps:
    """Serves steps until `max_steps` are committed, the data ends, or somebody stops the run."""

    def __init__(self, run: Serves, accumulate: int, max_steps: int | None) -> None:
        self._run, self._accumulate, self._max_steps = run, accumulate, max_steps
        self._last: Step | None = None
        self._done = False

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        self._check_last()
        run = self._run
        while not self._done:
            run.in_time()
            if run.stopping is None and not run.exhausted and not self._enough():
                step = run.serve(self._accumulate)
                if step is not None:
                    self._last = step
                    return step
            # Settling the last step may undo it and put its data back: then there is more to do.
            self._done = run.flush() or run.stopping is not None
        raise StopIteration

    def _enough(self) -> bool:
        """Whether enough steps are committed; a pending one counts only once it is."""
        run = self._run
        if self._max_steps is None:
            return False
        if run.step + (run.pending is not None) >= self._max_steps:
            run.flush()
        return run.step >= self._max_steps

    def _check_last(self) -> None:
        last = self._last
        if last is None:
            return
        if not last.entered:
            raise StepError(
                f"step {last.number} was never entered: write `with step:` around the body of "
                "`for step in guard.steps(...)`"
            )
        if last.is_open:
            raise StepError(f"step {last.number} is still open: leave its `with step:` before the next one is served")
