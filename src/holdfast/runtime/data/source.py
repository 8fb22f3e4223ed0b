"""What the loop asks of a stream of batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from holdfast.core.base.types import Span
from holdfast.runtime.state.rng import RngState


class Position(NamedTuple):
    """Between two batches: how far the epoch's stream has been handed out.

    Until the first batch of an epoch is handed out the position lies in the epoch before, even before the very first:
    beginning an epoch draws from generators, so the two sides of it are not the same place.
    """

    epoch: int
    batch: int
    sample: int


class Draw(NamedTuple):
    """One batch as it was handed out."""

    batch: Any
    span: Span
    ids: list[Any] | None
    """the indices it was made of, where there are any"""
    samples: int | None
    """how many samples it holds, where that can be known"""
    at: Position
    """where the stream stood before it was asked for"""
    begin: Position
    """where it begins: the same, unless it is the first of an epoch"""
    rng: RngState | None
    """the random streams right before its items were loaded; None where they must not be put back there"""
    marks: tuple[int, ...] = ()
    """version counters of its tensors, where it can only be served again as the object it is"""


EpochEnd = Callable[[int], None]


class Source(Protocol):
    """A stream of batches with a position. `exact` ones can go back; the others draw and drop.

    `draw` says through EpochEnd which epochs have ended before the batch it gives, or before the end. `untell` takes the
    last of these back, for a run that could not take note of them yet; `tell` says them again.

    `position` and `seek` go to and fro within a process. `save` is for files: where `position` stands and all it takes to
    stand there again in another process, as plain values and tensors that nobody changes afterwards. It is asked between
    two steps, draws and loads nothing, and takes no time worth speaking of. `resume` is asked before anything is drawn,
    leaves every random stream where it is, and returns notes to put on record; DataError where it would not be exact.
    """

    exact: bool

    @property
    def position(self) -> Position: ...
    @property
    def next_epoch(self) -> int: ...
    def extend(self, epochs: int | None) -> None: ...
    def save(self) -> dict[str, Any]: ...
    def resume(self, saved: dict[str, Any]) -> list[str]: ...
    def draw(self) -> Draw: ...
    def untell(self, epochs: int) -> None: ...
    def tell(self) -> None: ...
    def serve_again(self, draws: list[Draw]) -> str | None: ...
    def rewound_to(self, draw: Draw) -> RngState | None: ...
    def remembers(self, position: Position) -> bool: ...
    def seek(self, position: Position) -> None: ...
    def place(self, position: Position) -> tuple[int, int]: ...
    def exclude(self, start: Position, batches: int, reason: str) -> None: ...
    def forget_before(self, position: Position) -> None: ...
    def close(self) -> None: ...
