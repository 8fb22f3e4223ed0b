"""Map-style loaders: wraps the user's sampler, records its order, and leaves out excluded samples without loading them.

The user's loader is used through a shallow copy with our own batch sampler. Ours asks the user's sampler for every batch
of indices at the moment the loader would have. So every draw from a generator happens at the same point as without us.
Seeking back reads the record again and draws nothing twice. The order of an epoch belongs to the moment it began: seeking
to before that moment forgets it, and it is drawn again when the epoch begins again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from holdfast.core.base.errors import DataError
from holdfast.core.base.types import Span
from holdfast.runtime.data.adapted import copy_loader, epoch_setter
from holdfast.runtime.data.epochs import current_epoch, epoch_setters, samplers
from holdfast.runtime.data.left_out import MAX_EPOCHS, MAX_SAMPLER_BATCHES, nothing_left
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
from holdfast.runtime.data.source import Draw, EpochSource, Position, SourceSetup
from holdfast.runtime.data.split import count_samples
from holdfast.runtime.data.workers import LoaderWorkers
from holdfast.runtime.data.world import known_length
from holdfast.runtime.state.rng import RngState


class _PendingBatch(NamedTuple):
    """Indices that the loader was given and whose batch it has not returned yet."""

    k: int
    span: Span
    ids: list[Any]
    rng: RngState | None


class IndexedSource(EpochSource):
    """A DataLoader over a map-style dataset. Exact: it can seek back, and skips without loading."""

    exact = True

    def __init__(self, loader: DataLoader[Any], setup: SourceSetup) -> None:
        super().__init__(setup)
        self._replacements = len(loader.dataset) if setup.keep_batch_size else None  # type: ignore[arg-type]
        """the samples to replace excluded ones from; None: excluded samples are left out"""
        self._sampler = LoaderSampler(loader)
        self._setters, self._base_epoch = epoch_setters(loader), current_epoch(loader)
        candidates = [getattr(owner, "generator", None) for owner in (loader, *samplers(loader))]
        generators = {id(g): g for g in candidates if isinstance(g, torch.Generator)}
        self._context = DrawContext(self._sampler, self._rng, list(generators.values()))
        for generator in generators.values():
            self._rng.include(generator)
        # A shallow copy: DataLoader forbids setting the attribute, and the user's object must not change.
        self._loader: Any
        self._loader, self._iterable = copy_loader(loader)
        self._sets_epoch_again = self._iterable is not self._loader
        """Accelerate's loader sets its epoch whenever it is iterated over, so it must be the right one after a `seek` too"""
        if self._sets_epoch_again:
            set_epoch, self._base_epoch = epoch_setter(self._iterable)
            self._setters = [set_epoch]
        proxy = SamplerProxy(self._sampler.outer, self._ask_sampler)
        self._loader.__dict__["sampler" if self._sampler.is_single else "batch_sampler"] = proxy
        # Persistent workers of an earlier loop ask that loop's sampler. Ours are new, and starting them must draw nothing.
        self._used_before = self._hide_draws = loader.persistent_workers and loader._iterator is not None
        self._loader._iterator = None
        self._workers = LoaderWorkers(self._loader) if self._loader.num_workers else None
        self._in_process = self._workers is None
        self._rng_before_iter: RngState | None = None
        self._ahead_rng: dict[Position, RngState] = {}
        """position -> the random state right before the batch was loaded that was ready there, and not drawn yet"""
        self._load_rng: RngState | None = None
        """the same for the current position, if the batch is to be loaded again"""
        self._load_draws = False
        """loading a batch ahead has drawn from the generators"""
        first_epoch = setup.first_epoch
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
        """epochs in a row of which the loader was given nothing"""
        self._is_empty_so_far = self._is_new = True
        """the loader was given nothing of this epoch; no batch was drawn yet"""
        self._is_endless = False
        """the sampler yields quarantined samples only, and does not end"""
        self._left_at: dict[int, int] = {}
        """the batch before which the loop has left an epoch"""
        self._resumed = False
        self._spans: list[Span] = []
        self._spans_key = (-1, 0)
        self._left_out: list[int] = []
        self._left_out_key = (-1, 0)
        """batches of the current epoch that are not served, and the epoch and quarantine they were counted for"""
        self._deferred = 0
        """ended epochs to report again; a seek makes them end again"""

    def serve_epoch(self, epoch: int) -> None:
        """Serve this epoch and no later one. What is left of earlier ones is dropped, without asking the sampler for it."""
        while self._order.epoch < epoch:
            self._reopen(self._position)
            self._end_epoch()
            self._reopens = False
        self._last_epoch = epoch + 1

    def leave_epoch(self) -> None:
        """End the epoch that is being served where it is, for good: the loop has left it."""
        if self._order.has_begun:
            self._left_at[self._order.epoch] = self._position.batch
            self._reopen(self._position)
            self._end_epoch()

    def batches_left(self) -> int | None:
        """Return how many batches of this epoch are still to come; None if the sampler has no length."""
        order, quarantine, batch = self._order, self._quarantine, self._position.batch
        if (left := self._sampler.batches_left(batch, self._position.sample)) is None:
            return None
        key = order.epoch, quarantine.version
        if key != self._left_out_key:
            is_affected = bool(quarantine.samples or self._excluded_in(order.epoch))
            recorded = range(order.first_recorded, batch + left) if is_affected else ()
            if is_affected:
                order.replay_draws()
            self._left_out_key = key
            self._left_out = [k for k in recorded if self._is_left_out(order, k)]
        return left - sum(k >= batch for k in self._left_out)

    def _is_left_out(self, order: EpochOrder, k: int) -> bool:
        batch = order.get(k)
        return batch is None or not self._allowed(order, order.ids(batch), order.span(k))

    def start_at(self, epoch: int, batch: int) -> None:
        """Begin a new run after so many batches of an epoch. Asks the sampler for them and loads nothing."""
        self._resume_before(epoch)
        if batch == 0:
            return
        self._set_epoch(epoch)
        rng = self._rng.capture()
        while batch > 0 and self._order.get(batch - 1) is None:
            batch -= 1
        self._rng.restore(rng)
        self._position = Position(epoch, batch, self._order.span(batch - 1).stop if batch else 0)
        self._cursor, self._reopens = batch, self._order.has_begun

    @property
    def next_epoch(self) -> int:
        """The epoch that begins next, or the current one if it has not begun."""
        return self._order.epoch + self._order.has_begun

    @property
    def is_at_end(self) -> bool:
        return self._last_epoch is not None and self._order.epoch >= self._last_epoch

    @property
    def position(self) -> Position:
        return self._position

    def _new_order(self, epoch: int) -> EpochOrder:
        return EpochOrder(epoch, self._sampler, self._rng, self._context.generator_states)

    # ---- forward

    def _ask_sampler(self) -> Iterator[Any]:
        if not self._hide_draws:
            self._order.begin()
        return self._feed()

    def _feed(self) -> Iterator[Any]:
        """Yield to the loader the recorded order from the cursor on, without quarantined samples."""
        now, load, self._rng_before_iter, self._load_rng = self._rng_before_iter, self._load_rng, None, None
        order, first = self._order, self._cursor
        batches = self._batches(order, first)
        if now is not None:
            # Making the iterator drew its seed. Workers ask for batches ahead of time; without them only when needed.
            self._rng.restore(now)
            if load is not None:
                # The batch that was ready is loaded again as it was, and the next one from where the run is now.
                self._rng.restore(load)
                yield from islice(batches, 1)
                self._rng.restore(now)
                order.replay_draws(first, self._queue[-1].k if self._queue else math.inf)
        yield from batches

    def _batches(self, order: EpochOrder, k: int) -> Iterator[Any]:
        self._is_empty_so_far = k == 0
        left_out = samples = 0
        # At its beginning; or in the middle, if a previous process journaled the exclusion but died before applying it.
        for first, count in self._quarantine.ahead(order.epoch):
            self._exclude(order, first, count, "the rest of an excluded window")
        self._quarantine.resolve_ahead(order.epoch)
        while True:
            served = None if k == self._left_at.get(order.epoch) else order.serve(k)
            if served is None:
                return
            batch, given, span = served
            k += 1
            ids = self._allowed(order, given, span) if self._quarantine.has_entries else given
            if not ids:
                left_out, samples = left_out + 1, samples + len(given)
                if left_out > MAX_SAMPLER_BATCHES and self._is_past_end(left_out, samples):
                    self._is_endless = True
                    return
                continue
            left_out = samples = 0
            self._is_empty_so_far = False
            rng = self._rng.capture() if self._in_process else None
            self._queue.append(_PendingBatch(k - 1, span, list(ids), rng))
            yield batch if ids is given else ids

    def _is_past_end(self, batches: int, samples: int) -> bool:
        """Return whether that many left out in a row is more than the sampler and the dataset claim to have."""
        length = known_length(self._loader.dataset) or 0
        return batches > (known_length(self._sampler.outer) or 0) and samples > length

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
            self._spans_key, self._spans = key, self._quarantine.spans_of(epoch)
        return self._spans

    def draw(self) -> Draw:
        """Return the next batch. StopIteration after the last epoch."""
        while True:
            if self._iterator is None:
                if self.is_at_end:
                    if self._is_new:
                        self._check_not_empty(self._orders.get(self._order.epoch - 1), 1)
                    self.emit_epoch_ends()
                    raise StopIteration
                self._open()
            # Accelerate's loader loads one batch ahead: then the step begins here, not when the batch was loaded.
            is_ready = self._in_process and (bool(self._queue) or self._load_rng is not None)
            rng = self._rng.capture() if is_ready else None
            assert self._iterator is not None
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._end_epoch()
                continue
            if not self._queue:  # Accelerate before 1.0 yields None for an epoch without batches
                self._end_epoch()
                continue
            pending = self._queue.popleft()
            epoch, before = self._order.epoch, self._position
            begin = Position(epoch, pending.k, pending.span.start)
            if self._workers is not None:
                if not self._workers.advance(epoch, pending.k):
                    self._reopen(begin)
                    continue
                # Workers draw from their own generators; draws of a sampler that was asked ahead are not undone.
                rng = self._rng.capture()
            self._position = Position(epoch, pending.k + 1, pending.span.stop)
            self._order.mark_served(pending.k + 1)
            self._is_new = False
            if self._deferred:
                self.emit_epoch_ends()
            samples = count_samples(batch) or 1 if self._sampler.is_single else len(pending.ids)
            ahead_rng = pending.rng if is_ready else None
            if self._queue and not self._load_draws and (loaded_at := self._queue[-1].rng) is not None:
                self._load_draws = not loaded_at.same(self._rng.capture())
            return Draw(
                batch, pending.span, pending.ids, samples, before, begin, rng or pending.rng, ahead_rng=ahead_rng
            )

    def defer_epoch_ends(self, epochs: int) -> None:
        self._deferred += epochs

    def emit_epoch_ends(self) -> None:
        for epoch in range(self._order.epoch - self._deferred, self._order.epoch):
            self._on_epoch_end(epoch)
        self._deferred = 0

    def _open(self) -> None:
        """Begin the epoch, or continue it after a `seek` as if the iterator had never been replaced."""
        self._before_iter()
        if self._workers is not None:
            self._hide_draws |= self._workers.prepare(self._cursor, is_continued=self._reopens)
        if self._reopens or self._hide_draws:
            self._rng_before_iter = self._rng.capture()
        if not self._reopens or self._sets_epoch_again:
            self._set_epoch(self._order.epoch)
        self._iterator = iter(self._iterable)
        self._reopens = self._hide_draws = False

    def _reopen(self, position: Position) -> None:
        """Have the next `draw` continue at `position` of the current order, with another iterator."""
        self._iterator, self._cursor, self._reopens = None, self.locate(position)[1], self._order.has_begun
        self._load_rng = self._ahead_rng.get(position)
        self._queue.clear()
        if self._workers is not None:
            self._workers.back_to(position.epoch, position.batch)

    def _set_epoch(self, epoch: int) -> None:
        for set_epoch in self._setters:
            set_epoch(self._base_epoch + epoch - self._first_epoch)

    def _end_epoch(self) -> None:
        ended = self._order
        self._empty_epochs = self._empty_epochs + 1 if self._is_empty_so_far else 0
        self._check_not_empty(ended, 2)
        self._iterator, self._load_rng, self._cursor, self._reopens = None, None, 0, False
        self._order = self._orders[ended.epoch + 1] = self._new_order(ended.epoch + 1)
        self._on_epoch_end(ended.epoch)

    def _check_not_empty(self, order: EpochOrder | None, allowed: int) -> None:
        """Raise DataError if `allowed` epochs in a row have given nothing; or many, if ranges were left out of the last."""
        if order is None or (self._empty_epochs < allowed and not self._is_endless):
            return
        if order.is_empty:
            raise DataError("the loader yields no batches: its dataset is empty, or drop_last leaves nothing of it")
        # Ranges are left out of one epoch; quarantined samples of every epoch to come.
        if self._is_endless or self._empty_epochs > MAX_EPOCHS or not self._excluded_in(order.epoch):
            raise nothing_left(self._quarantine, f"epoch {order.epoch}")

    # ---- seeking and excluding

    def requeue(self, draws: list[Draw]) -> str | None:
        """Make the next `draw` serve these batches again, loaded again. Always returns None: it cannot fail here."""
        self._keep_ahead_rng(draws[0].begin, draws[0].ahead_rng)
        self.seek(draws[0].begin)
        return None

    def rewind_to(self, draw: Draw) -> RngState | None:
        """Return the random state right before the batch was loaded; if it was ready before the step, before the step."""
        self._keep_ahead_rng(draw.begin, draw.ahead_rng)
        return draw.rng

    def leave_out(self, draws: list[Draw]) -> str | None:
        """Continue as if these batches, the last ones drawn, had never been given to the loader. Return why not, if so."""
        if self._workers is not None:
            self._workers.leave_out(draws[0].begin.epoch, draws[0].begin.batch)
        elif self._queue:  # a batch is ready, and was loaded behind them
            self._reopen(draws[0].begin)
        elif draws[0].ahead_rng is not None and self._load_draws:
            return (
                "the batches that are left out end their epoch, and the first of them was loaded before the step before it: "
                "the random numbers of that step are not those of a run without them"
            )
        return None

    def _keep_ahead_rng(self, position: Position, state: RngState | None) -> None:
        self._ahead_rng.pop(position, None)
        if state is not None:
            self._ahead_rng[position] = state

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
        order = self._orders.get(self.locate(position)[0])
        if order is None:
            raise DataError(f"cannot go back to epoch {position.epoch}: its order is no longer on record")
        self._empty_epochs, self._is_endless = 0, False
        for epoch in [e for e in self._orders if e > order.epoch]:
            del self._orders[epoch]
        self._order, self._position, self._deferred = order, position, 0
        self._reopen(position)

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
        order.replay_draws()
        while k < end and order.get(k) is not None:
            k += 1
        if end - k > MAX_EPOCHS * max(1, k):
            raise nothing_left(self._quarantine, f"a window of {count} batches from epoch {order.epoch} on")
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
        for each in [p for p in self._ahead_rng if p < position]:
            del self._ahead_rng[each]
        if self._workers is not None:
            self._workers.forget_before(position.epoch, position.batch)

    # ---- in another process

    def save(self, *, user_code: bool = True) -> dict[str, Any]:
        """Return the position for a file. Draws and loads nothing."""
        order = self._orders.get(self._position.epoch)
        ended = self._order.epoch > max(self._position.epoch, self._first_epoch) and not self._deferred
        ahead_rng = self._queue[0].rng if self._queue else self._load_rng
        self._keep_ahead_rng(self._position, ahead_rng)
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
            "worker_rng": None if self._workers is None else self._workers.save(),
            "ahead": None if ahead_rng is None else self._context.pack(ahead_rng),
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
        self._load_rng = self._context.unpack(saved.get("ahead"))
        self._keep_ahead_rng(position, self._load_rng)
        batch_size = self._sampler.global_batch_size()
        if not self._resumed:  # windows recorded since the first resume are counted in this process's batches
            convert_ahead_windows(
                self._quarantine, saved["batch_samples"], batch_size, saved["length"], self._on_exclusion
            )
        self._resumed = True
        if self._workers is not None:
            self._workers.resume(saved.get("worker_rng"), position.epoch, position.batch)
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
