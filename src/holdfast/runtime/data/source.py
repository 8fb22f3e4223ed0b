"""The interface between the training loop and its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from holdfast.core.base.types import Span
from holdfast.core.record.quarantine import Quarantine
from holdfast.runtime.state.rng import Rng, RngState


class Position(NamedTuple):
    """A place between two batches.

    Until the first batch of an epoch is served, the position is at the end of the previous epoch, even before the very
    first one. Beginning an epoch draws from generators, so the two sides of it are different places.
    """

    epoch: int
    batch: int
    sample: int


class Draw(NamedTuple):
    """One batch as it was served."""

    batch: Any
    span: Span
    ids: list[Any] | None
    """the indices it was made of, if there are any"""
    samples: int | None
    """the number of samples, if known"""
    before: Position
    """the source's position before the draw"""
    begin: Position
    """where the batch begins: the same as `before`, unless it is the first of an epoch"""
    rng: RngState | None
    """the random state right before its items were loaded; None if it must not be restored"""
    versions: tuple[int, ...] = ()
    """version counters of its tensors, if it can only be served again as the same object"""
    ahead_rng: RngState | None = None
    """the random state right before its items were loaded, if that was one batch ahead of the step; `rng` is then the state
    right before the step"""


EpochEnd = Callable[[int], None]
OnExclusion = Callable[[Span, int, str], None]
"""called with the excluded samples, the number of batches and the reason"""


@dataclass(frozen=True, kw_only=True)
class SourceSetup:
    """What a source is given besides the loader."""

    rng: Rng
    quarantine: Quarantine
    epochs: int | None
    first_epoch: int
    on_epoch_end: EpochEnd
    before_iter: Callable[[], None]
    on_exclusion: OnExclusion
    keep_batch_size: bool = False
    """an excluded sample is replaced by another: other ranks draw as many samples"""


class EpochSource:
    """Base of the sources whose data has epochs."""

    def __init__(self, setup: SourceSetup) -> None:
        self._rng, self._quarantine = setup.rng, setup.quarantine
        self._last_epoch = None if setup.epochs is None else setup.first_epoch + setup.epochs
        self._on_epoch_end, self._before_iter = setup.on_epoch_end, setup.before_iter
        self._on_exclusion = setup.on_exclusion

    @property
    def next_epoch(self) -> int:
        raise NotImplementedError

    def allow_epochs(self, epochs: int | None) -> None:
        """Allow this many further epochs from the current one, or no end.

        In a resumed run, a loop that asks for one epoch at a time first asks for those of the previous process.
        """
        current = self.next_epoch if self._last_epoch is None else min(self._last_epoch, self.next_epoch)
        self._last_epoch = None if epochs is None else current + epochs


class BatchSource(Protocol):
    """A stream of batches with a position. An `exact` source can seek back; others draw and drop.

    `draw` reports each ended epoch through EpochEnd, before the batch it returns or before StopIteration.
    `defer_epoch_ends` takes the last n reports back, for a run that could not act on them yet; `emit_epoch_ends` repeats
    them.

    `is_at_end`: the epochs that may be drawn are over, so that a draw asks the loader for nothing. `serve_epoch` is for a
    loop that counts epochs itself: what is left of earlier ones is dropped, and the data ends with this one. `batches_left`
    returns how many batches of the current epoch are still to come; None if that is not known.

    `leave_epoch` is for a loop that is left with `break`: the epoch ends there, also when it is served again.

    `leave_out` is called when the last batches drawn are skipped and the source stays where it is. It returns why the run is
    not exactly the one without them, if so.

    `start_at` is for a trainer that resumes by itself: a new run begins after so many batches of an epoch.

    `position` and `seek` work within a process. `save` returns what another process needs to continue at `position`: plain
    values and tensors that are not modified afterwards. It is called between two steps and neither draws nor loads. For
    every snapshot in memory it is called with `user_code=False`: it returns {} if it would have to call a state_dict.
    `resume` is called before anything is drawn and leaves every generator unchanged. It returns notes for the journal,
    and raises DataError if it could not continue exactly.
    """

    exact: bool

    @property
    def is_at_end(self) -> bool: ...
    @property
    def position(self) -> Position: ...
    @property
    def next_epoch(self) -> int: ...
    def allow_epochs(self, epochs: int | None) -> None: ...
    def start_at(self, epoch: int, batch: int) -> None: ...
    def serve_epoch(self, epoch: int) -> None: ...
    def leave_epoch(self) -> None: ...
    def batches_left(self) -> int | None: ...
    def save(self, *, user_code: bool = True) -> dict[str, Any]: ...
    def resume(self, saved: dict[str, Any]) -> list[str]: ...
    def draw(self) -> Draw: ...
    def defer_epoch_ends(self, epochs: int) -> None: ...
    def emit_epoch_ends(self) -> None: ...
    def requeue(self, draws: list[Draw]) -> str | None: ...
    def rewind_to(self, draw: Draw) -> RngState | None: ...
    def can_seek(self, position: Position) -> bool: ...
    def seek(self, position: Position) -> None: ...
    def leave_out(self, draws: list[Draw]) -> str | None: ...
    def locate(self, position: Position) -> tuple[int, int]: ...
    def exclude(self, start: Position, batches: int, reason: str) -> None: ...
    def forget_before(self, position: Position) -> None: ...
    def close(self) -> None: ...
