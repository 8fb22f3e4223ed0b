"""A function of the batch's number as a source: `batch = function(number)`, counted from 0, without an end.

The function may be pure, or draw from the random generators (a random window of a text). Both are exact: a replay and a
rollback restore the generators first. A batch that is left out is drawn and dropped if the function draws, so that the next
one is another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.core.base.types import Span
from holdfast.runtime.data.left_out import MAX_STREAM_BATCHES, nothing_left
from holdfast.runtime.data.resume import VERSION, check_saved_kind
from holdfast.runtime.data.source import Draw, Position, SourceSetup
from holdfast.runtime.data.split import count_samples
from holdfast.runtime.state.rng import RngState


class FunctionSource:
    """Calls the function for one number after the other. Its positions and spans count batches, in one epoch."""

    exact, is_at_end = True, False

    def __init__(self, function: Callable[[int], Any], setup: SourceSetup) -> None:
        self._function, self._rng, self._quarantine = function, setup.rng, setup.quarantine
        self._on_exclusion, self._epoch = setup.on_exclusion, setup.first_epoch
        self._number = 0
        self._draws_random = False
        """a call has moved the random generators"""
        self._after: RngState | None = None
        """the random state right after the last call, if it moved the generators"""
        self._to_replay: RngState | None = None

    def allow_epochs(self, epochs: int | None) -> None:
        """Do nothing: a function has no end."""

    def serve_epoch(self, epoch: int) -> None:
        """Do nothing: a function has no epochs."""

    def batches_left(self) -> int | None:
        """Return None: a function has no end."""
        return None

    def start_at(self, epoch: int, batch: int) -> None:
        """Begin a new run at this number."""
        self._number = batch

    def leave_epoch(self) -> None:
        """Do nothing: a function has no epochs."""

    @property
    def next_epoch(self) -> int:
        return self._epoch + 1

    @property
    def position(self) -> Position:
        return Position(self._epoch, self._number, self._number)

    def draw(self) -> Draw:
        """Return the next batch that is not left out."""
        first = self._number
        while self._quarantine.covers(self._epoch, self._number, self._number + 1):
            if self._draws_random:
                self._function(self._number)
            self._number += 1
            if self._number - first > MAX_STREAM_BATCHES:
                raise nothing_left(self._quarantine, f"the function from batch {first} on")
        before, begin = self._rng.capture(), self.position
        batch = self._function(self._number)
        self._number += 1
        after = self._rng.capture()
        self._after = None if before.same(after) else after
        self._draws_random = self._draws_random or self._after is not None
        span = Span(self._epoch, begin.batch, self._number)
        return Draw(batch, span, None, count_samples(batch), begin, begin, before)

    def defer_epoch_ends(self, epochs: int) -> None:
        """Do nothing: no epoch ends."""

    def emit_epoch_ends(self) -> None:
        """Do nothing: no epoch ends."""

    # ---- seeking and excluding

    def requeue(self, draws: list[Draw]) -> str | None:
        """Make the next draws give these batches again. Always returns None: it cannot fail here."""
        self.seek(draws[0].begin)
        self._to_replay = draws[0].rng
        return None

    def rewind_to(self, draw: Draw) -> RngState | None:
        """Return the random state to restore.

        To serve the batch again, or if the function does not draw, it is the one right before the batch. To leave it out, it
        is the one right after the last call: otherwise a function that draws would return the same data again.
        """
        replay, self._to_replay = self._to_replay, None
        return replay or self._after or draw.rng

    def can_seek(self, position: Position) -> bool:
        return True

    def seek(self, position: Position) -> None:
        self._number, self._to_replay, self._after = position.batch, None, None

    def leave_out(self, draws: list[Draw]) -> str | None:
        """Do nothing: nothing is loaded ahead."""
        return None

    def locate(self, position: Position) -> tuple[int, int]:
        """Return the epoch and the batch that follow a position."""
        return position.epoch, position.batch

    def exclude(self, start: Position, batches: int, reason: str) -> None:
        span = Span(self._epoch, start.batch, start.batch + batches)
        self._quarantine.add_spans([span], reason)
        self._on_exclusion(span, batches, reason)

    def forget_before(self, position: Position) -> None:
        """Do nothing: a number is all there is to remember."""

    # ---- in another process

    def save(self, *, user_code: bool = True) -> dict[str, Any]:
        """Return the position for a file."""
        draws = self._draws_random
        return {"version": VERSION, "kind": "function", **self.position._asdict(), "order": None, "draws": draws}

    def resume(self, saved: dict[str, Any]) -> list[str]:
        """Move to a position saved by this or another process."""
        check_saved_kind(saved, "function")
        self._epoch, self._number, self._draws_random = saved["epoch"], saved["batch"], saved["draws"]
        self._to_replay = self._after = None
        return []

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
