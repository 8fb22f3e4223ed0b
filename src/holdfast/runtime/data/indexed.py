"""Map-style loaders: wraps the user's sampler, records its order, and leaves out excluded samples without loading them.

The user's loader is used through a shallow copy with our own batch sampler. Ours asks the user's sampler for every batch
of indices at the moment the loader would have. So every draw from a generator happens at the same point as without us.
Seeking back reads the record again and draws nothing twice. The order of an epoch belongs to the moment it began: seeking
to before that moment forgets it, and it is drawn again when the epoch begins again.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from holdfast.core.base.errors import DataError
from holdfast.core.base.types import Span
from holdfast.core.record.quarantine import Quarantine
from holdfast.runtime.data.epochs import current_epoch, epoch_setters, samplers
from holdfast.runtime.data.order import EpochOrder, LoaderSampler, SamplerProxy
from holdfast.runtime.data.resume import (
    VERSION,
    DrawContext,
    check_saved_kind,
    convert_ahead_windows,
    describe_changes,
    remove_excluded,
    resume_order,
)
from holdfast.runtime.data.source import Draw, EpochEnd, OnExclusion, Position
from holdfast.runtime.data.split import count_samples
from holdfast.runtime.state.rng import Rng, RngState


class _PendingBatch(NamedTuple):
    """Indices that the loader was given and whose batch it has not returned yet."""

    k: int
    span: Span
    ids: list[Any]
    rng: RngState | None


class IndexedSource:
    """A DataLoader over a map-style dataset. Exact: it can seek back, and skips without loading."""

    exact = True

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        rng: Rng,
        quarantine: Quarantine,
        epochs: int | None,
        first_epoch: int,
        on_epoch_end: EpochEnd,
        before_iter: Callable[[], None],
        on_exclusion: OnExclusion,
        keep_batch_size: bool = False,
    ) -> None:
        self._replacements = len(loader.dataset) if keep_batch_size else None  # type: ignore[arg-type]
        """the samples to replace excluded ones from; None: excluded samples are left out"""
        self._rng, self._quarantine = rng, quarantine
        self._last_epoch = None if epochs is None else first_epoch + epochs
        self._on_epoch_end = on_epoch_end
        self._before_iter, self._on_exclusion = before_iter, on_exclusion
        self._sampler = LoaderSampler(loader)
        self._setters, self._base_epoch = epoch_setters(loader), current_epoch(loader)
        candidates = [getattr(owner, "generator", None) for owner in (loader, *samplers(loader))]
        generators = {id(g): g for g in candidates if isinstance(g, torch.Generator)}
        self._context = DrawContext(self._sampler, rng, list(generators.values()))
        for generator in generators.values():
            rng.include(generator)
        # A shallow copy: DataLoader forbids setting the attribute, and the user's object must not change.
        self._loader: Any = copy.copy(loader)
        proxy = SamplerProxy(self._sampler.outer, self._feed)
        self._loader.__dict__["sampler" if self._sampler.is_single else "batch_sampler"] = proxy
        self._in_process = loader.num_workers == 0
        # Persistent workers of an earlier loop ask that loop's sampler. Ours are new, and starting them must draw nothing.
        self._used_before = self._hide_draws = loader._iterator is not None
        self._loader._iterator = None
        self._rng_before_iter: RngState | None = None
        self._first_epoch = self._epoch_after_beginning = first_epoch
        self._order = self._new_order(first_epoch)
        self._orders = {first_epoch: self._order}
        self._position = self._beginning = Position(first_epoch - 1, 0, 0)
        self._cursor = 0
        self._iterator: Iterator[Any] | None = None
        self._reopens = False
        """the next iterator continues an epoch that has begun"""
        self._queue: deque[_PendingBatch] = deque()
        self._empty_epochs = 0
        self._resumed = False
        self._spans: list[Span] = []
        self._spans_key = (-1, 0)
        self._deferred = 0
        """ended epochs to report again; a seek makes them end again"""

    def allow_epochs(self, epochs: int | None) -> None:
        """Allow this many further epochs from the current one, or no end.

        In a resumed run, a loop that asks for one epoch at a time first asks for those of the previous process.
        """
        current = self.next_epoch if self._last_epoch is None else min(self._last_epoch, self.next_epoch)
        self._last_epoch = None if epochs is None else current + epochs

    @property
    def next_epoch(self) -> int:
        """The epoch that begins next, or the current one if it has not begun."""
        return self._order.epoch + self._order.has_begun

    @property
    def position(self) -> Position:
        return self._position

    def _new_order(self, epoch: int) -> EpochOrder:
        return EpochOrder(epoch, self._sampler, self._rng, self._context.generator_states)

    # ---- forward

    def _feed(self) -> Iterator[Any]:
        """Yield to the loader the recorded order from the cursor on, without quarantined samples."""
        if self._rng_before_iter is not None:
            # Making the iterator drew its seed. Workers ask for batches ahead of time; without them only when needed.
            self._rng.restore(self._rng_before_iter)
            self._rng_before_iter = None
        order, k = self._order, self._cursor
        # At its beginning; or in the middle, if a previous process journaled the exclusion but died before applying it.
        for first, count in self._quarantine.ahead(order.epoch):
            self._exclude(order, first, count, "the rest of an excluded window")
        self._quarantine.resolve_ahead(order.epoch)
        while True:
            served = order.serve(k)
            if served is None:
                return
            batch, given, span = served
            k += 1
            ids = self._allowed(order, given, span) if self._quarantine.has_entries else given
            if not ids:
                continue
            rng = self._rng.capture() if self._in_process else None
            self._queue.append(_PendingBatch(k - 1, span, list(ids), rng))
            yield batch if ids is given else ids

    def _allowed(self, order: EpochOrder, given: Any, span: Span) -> Any:
        """Return the ids of a batch without the quarantined ones; the very same object if none is."""
        if self._quarantine.covers(*span):
            return []
        ids = remove_excluded(given, span, order.stride, self._excluded_in(order.epoch))
        if self._replacements is None:
            return self._quarantine.keep(ids)
        return self._quarantine.stand_in(ids, self._replacements)

    def _excluded_in(self, epoch: int) -> list[Span]:
        """Return the spans excluded in an epoch. Cached until they change."""
        key = epoch, self._quarantine.version
        if key != self._spans_key:
            self._spans_key, self._spans = key, [s for s in self._quarantine.spans() if s.epoch == epoch]
        return self._spans

    def draw(self) -> Draw:
        """Return the next batch. StopIteration after the last epoch."""
        while True:
            if self._iterator is None:
                if self._last_epoch is not None and self._order.epoch >= self._last_epoch:
                    self.emit_epoch_ends()
                    raise StopIteration
                self._open()
            # A subclass of DataLoader may load one batch ahead: then the step begins here, not when the batch was loaded.
            rng = self._rng.capture() if self._in_process and self._queue else None
            assert self._iterator is not None
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._end_epoch()
                continue
            if not self._in_process:
                # Workers draw from their own generators; draws of a sampler that was asked ahead are not undone.
                rng = self._rng.capture()
            pending = self._queue.popleft()
            epoch, before = self._order.epoch, self._position
            self._position = Position(epoch, pending.k + 1, pending.span.stop)
            self._order.mark_served(pending.k + 1)
            self._empty_epochs = 0
            if self._deferred:
                self.emit_epoch_ends()
            samples = count_samples(batch) or 1 if self._sampler.is_single else len(pending.ids)
            begin = Position(epoch, pending.k, pending.span.start)
            return Draw(batch, pending.span, pending.ids, samples, before, begin, rng or pending.rng)

    def defer_epoch_ends(self, epochs: int) -> None:
        self._deferred += epochs

    def emit_epoch_ends(self) -> None:
        for epoch in range(self._order.epoch - self._deferred, self._order.epoch):
            self._on_epoch_end(epoch)
        self._deferred = 0

    def _open(self) -> None:
        """Begin the epoch, or continue it after a `seek` as if the iterator had never been replaced."""
        self._before_iter()
        if self._reopens or self._hide_draws:
            self._rng_before_iter = self._rng.capture()
        if not self._reopens:
            self._set_epoch(self._order.epoch)
        self._iterator = iter(self._loader)
        self._reopens = self._hide_draws = False

    def _set_epoch(self, epoch: int) -> None:
        for set_epoch in self._setters:
            set_epoch(self._base_epoch + epoch - self._first_epoch)

    def _end_epoch(self) -> None:
        ended = self._order
        # Spans are left out of one epoch; quarantined samples of every epoch to come.
        self._empty_epochs += ended.is_empty or not self._excluded_in(ended.epoch)
        if self._empty_epochs > 1:
            if ended.is_empty:
                raise DataError("the loader yields no batches: its dataset is empty, or drop_last leaves nothing of it")
            raise DataError(
                f"epoch {ended.epoch} has no sample left that is not quarantined: correct the data, then delete "
                "quarantine.json of the run directory or start over in another run_dir"
            )
        self._iterator, self._cursor = None, 0
        self._order = self._orders[ended.epoch + 1] = self._new_order(ended.epoch + 1)
        self._on_epoch_end(ended.epoch)

    # ---- seeking and excluding

    def requeue(self, draws: list[Draw]) -> str | None:
        """Make the next `draw` serve these batches again, loaded again. Always returns None: it cannot fail here."""
        self.seek(draws[0].begin)
        return None

    def rewind_to(self, draw: Draw) -> RngState | None:
        """Return the random state right before the batch was loaded."""
        return draw.rng

    def can_seek(self, position: Position) -> bool:
        """Return whether the position is on record."""
        epoch, batch = self.locate(position)
        order = self._orders.get(epoch)
        return position == self._beginning or (order is not None and batch >= order.first_recorded)

    def seek(self, position: Position) -> None:
        """Move to `position`. DataError if it is older than what `forget_before` was given."""
        if position == self._beginning:
            self._orders = {self._epoch_after_beginning: self._new_order(self._epoch_after_beginning)}
            # Persistent workers are started again too: starting them draws their seed.
            self._loader._iterator, self._hide_draws = None, self._used_before
        epoch, cursor = self.locate(position)
        order = self._orders.get(epoch)
        if order is None:
            raise DataError(f"cannot go back to epoch {position.epoch}: its order is no longer on record")
        self._iterator = None
        self._empty_epochs = 0
        self._queue.clear()
        for epoch in [e for e in self._orders if e > order.epoch]:
            del self._orders[epoch]
        self._order, self._cursor, self._position = order, cursor, position
        self._reopens, self._deferred = order.has_begun, 0

    def locate(self, position: Position) -> tuple[int, int]:
        """Return the epoch and the batch that follow a position."""
        return (self._epoch_after_beginning, 0) if position == self._beginning else (position.epoch, position.batch)

    def exclude(self, start: Position, batches: int, reason: str) -> None:
        """Quarantine `batches` batches from `start` on, also of epochs that have not begun."""
        epoch, first = self.locate(start)
        order = self._orders.get(epoch)
        if order is None or not order.has_begun:
            self._quarantine.add_ahead(epoch, first, batches, reason)
        else:
            self._exclude(order, first, batches, reason)

    def _exclude(self, order: EpochOrder, first: int, count: int, reason: str) -> None:
        end = first + count
        k = first = max(first, order.first_recorded)
        order.replay_all_draws()
        while k < end and order.get(k) is not None:
            k += 1
        if k > first:
            span = Span(order.epoch, order.span(first).start, order.span(k - 1).stop)
            self._quarantine.add_spans([span], reason)
            self._on_exclusion(span, k - first, reason)
        if k < end:
            self._quarantine.add_ahead(order.epoch + 1, 0, end - k, reason)

    def forget_before(self, position: Position) -> None:
        """Forget the record before `position`: no seek will go there."""
        for epoch in [e for e in self._orders if e < position.epoch]:
            del self._orders[epoch]
        if position.epoch in self._orders:
            self._orders[position.epoch].forget_before(position.batch)

    # ---- in another process

    def save(self, *, user_code: bool = True) -> dict[str, Any]:
        """Return the position for a file. Draws and loads nothing."""
        order = self._orders.get(self._position.epoch)
        ended = self._order.epoch > max(self._position.epoch, self._first_epoch) and not self._deferred
        return {
            "version": VERSION,
            "kind": "indexed",
            **self._position._asdict(),
            "first_epoch": self._first_epoch,
            "base_epoch": self._base_epoch,
            "begins": self._order.epoch if ended else None,
            "batch_samples": self._sampler.global_batch_size(),
            "length": self._sampler.length(),
            "workers": self._loader.num_workers,
            "order": None if order is None or ended else order.save(self._position.batch),
        }

    def resume(self, saved: dict[str, Any]) -> list[str]:
        """Move to a position saved by this or another process. Loads nothing, and leaves the generators unchanged."""
        check_saved_kind(saved, "indexed")
        self._iterator = self._loader._iterator = self._rng_before_iter = None
        self._queue.clear()
        self._cursor, self._reopens, self._deferred, self._empty_epochs = 0, False, 0, 0
        shift = saved["first_epoch"] - self._first_epoch
        self._last_epoch = None if self._last_epoch is None else self._last_epoch + shift
        self._first_epoch, self._base_epoch = saved["first_epoch"], saved["base_epoch"]
        self._position = position = Position(saved["epoch"], saved["batch"], saved["sample"])
        notes: list[str] = []
        if saved["order"] is None:
            self._resume_before(self._first_epoch if saved["begins"] is None else saved["begins"])
        else:
            self._beginning = Position(self._first_epoch - 1, 0, 0)
            self._set_epoch(position.epoch)
            self._order, notes = resume_order(saved["order"], position, self._context)
            self._orders = {position.epoch: self._order}
            self._cursor, self._reopens = position.batch, True
        batch_size = self._sampler.global_batch_size()
        if not self._resumed:  # windows recorded since the first resume are counted in this process's batches
            convert_ahead_windows(
                self._quarantine, saved["batch_samples"], batch_size, saved["length"], self._on_exclusion
            )
        self._resumed = True
        return notes + describe_changes(saved, self._sampler, self._loader.num_workers)

    def _resume_before(self, epoch: int) -> None:
        """Resume between two epochs: the previous epoch's order does not matter any more."""
        self._beginning, self._epoch_after_beginning = self._position, epoch
        self._order = self._new_order(epoch)
        self._orders = {epoch: self._order}
        # Persistent workers would have been running already: starting them must not draw their seed again.
        if epoch > self._first_epoch:
            self._used_before = self._hide_draws = self._loader.persistent_workers

    def close(self) -> None:
        """Stop the workers now. If they are collected later, among those of another loader, joining them can hang."""
        self._iterator = self._loader._iterator = None
        self._queue.clear()
