"""The iterator behind `guard.steps`. A class, not a generator: an error raised while `break` closes a generator is lost."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.core.base.clock import Clock
from holdfast.runtime.guard.step import Step
from holdfast.runtime.step.interface import Pipeline


class Steps:
    """Yields steps until `max_steps` are committed, the data ends, or the run is asked to stop."""

    def __init__(self, pipeline: Pipeline, clock: Clock, accumulate: int, max_steps: int | None) -> None:
        self._pipeline, self._clock, self._accumulate, self._max_steps = pipeline, clock, accumulate, max_steps
        self._last: Step | None = None
        self._is_done = False

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if self._last is not None:
            self._last.require_finished()
        pipeline, progress = self._pipeline, self._pipeline.progress
        while not self._is_done:
            pipeline.settle_for_hooks()
            if progress.stopping is None and not progress.exhausted and not self._has_enough():
                attempt = pipeline.draw_step(self._accumulate)
                if attempt is not None:
                    self._last = Step(pipeline, attempt, self._clock)
                    return self._last
            # Settling the last step may undo it and requeue its data: then there is more to do.
            self._is_done = pipeline.flush() or progress.stopping is not None
        raise StopIteration

    def _has_enough(self) -> bool:
        """Return whether enough steps are committed. A pending step counts only once it has settled."""
        progress = self._pipeline.progress
        if self._max_steps is None:
            return False
        if progress.step + (progress.pending is not None) >= self._max_steps:
            self._pipeline.flush()
        return progress.step >= self._max_steps
