"""Map-style loaders: the user's sampler wrapped, its order recorded, stretches of it left out without loading them.

The loader is used as it is, through a shallow copy whose batch sampler is ours; ours asks the user's for every batch of
indices, at the moment the loader would have, so every draw from a generator happens where it did before. Going back is
reading the record again; nothing is drawn twice for it. The order of an epoch belongs to the moment it began: going back
to before that moment forgets it, and it is drawn anew when the epoch begins again.
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
from holdfast.runtime.data.order import Asked, Feed, Order
from holdfast.runtime.data.resume import VERSION, Here, changes, left_of, refuse_foreign, resume_order, settle_ahead
from holdfast.runtime.data.source import Draw, EpochEnd, Position
from holdfast.runtime.data.split import count_samples
from holdfast.runtime.state.rng import Rng, RngState

OnExclusion = Callable[[Span, int, str], None]


class _Issued(NamedTuple):
    """A batch of indices the loader has been given and has not handed out yet."""

    k: int
    span: Span
    ids: list[Any]
    rng: RngState | None


class IndexedSource:
    """A DataLoader over a map-style dataset. Exact: it can go back, and skips without loading."""

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
        in_step: bool = False,
    ) -> None:
        self._together = len(loader.dataset) if in_step else None  # type: ignore[arg-type]
        self._rng, self._quarantine = rng, quarantine
        self._last = None if epochs is None else first_epoch + epochs
        self._on_epoch_end = on_epoch_end
        self._before_iter, self._on_exclusion = before_iter, on_exclusion
        self._asked = Asked(loader)
        self._single = self._asked.single
        self._setters, self._base_epoch = epoch_setters(loader), current_epoch(loader)
        found = [getattr(holder, "generator", None) for holder in (loader, *samplers(loader))]
        own = {id(g): g for g in found if isinstance(g, torch.Generator)}
        self._here = Here(self._asked, rng, list(own.values()))
        for generator in own.values():
            rng.include(generator)
        # A shallow copy: the loader's own attribute is locked, and the user's object stays as it was.
        self._loader: Any = copy.copy(loader)
        self._loader.__dict__["sampler" if self._single else "batch_sampler"] = Feed(self._asked.top, self._feed)
        self._in_process = loader.num_workers == 0
        # Workers that persist from a loop before ask that loop's sampler. Ours are new; to start them draws nothing.
        self._used_before = self._quietly = loader._iterator is not None
        self._loader._iterator = None
        self._kept: RngState | None = None
        self._first_epoch = self._begins = first_epoch
        self._order = self._new_order(first_epoch)
        self._orders = {first_epoch: self._order}
        self._at = self._beginning = Position(first_epoch - 1, 0, 0)
        self._cursor = 0
        self._iterator: Iterator[Any] | None = None
        self._again = False
        self._queue: deque[_Issued] = deque()
        self._empty_epochs = 0
        self._resumed = False
        self._spans: list[Span] = []
        self._spans_of = (-1, 0)
        self._untold = 0
        """epochs that have ended and have to be told of again; going back makes them end again"""

    def allow_epochs(self, epochs: int | None) -> None:
        """Allow this many further epochs from the one it stands in, or no end.

        A resumed run whose loop asks for one epoch at a time is first asked for those that an earlier life has had.
        """
        stands = self.next_epoch if self._last is None else min(self._last, self.next_epoch)
        self._last = None if epochs is None else stands + epochs

    @property
    def next_epoch(self) -> int:
        """The epoch that would begin next, if none has been begun and not ended."""
        return self._order.epoch + self._order.begun

    @property
    def position(self) -> Position:
        return self._at

    def _new_order(self, epoch: int) -> Order:
        return Order(epoch, self._asked, self._rng, self._here.states)

    # ---- forward

    def _feed(self) -> Iterator[Any]:
        """What the loader is given: the recorded order from the cursor on, less what is quarantined."""
        if self._kept is not None:
            # Making the iterator drew its seed; workers then ask for some batches ahead, a lazy one only when it is asked.
            self._rng.restore(self._kept)
            self._kept = None
        order, k = self._order, self._cursor
        # At its beginning, or in the middle where a life before ended between the word and the deed.
        for first, count in self._quarantine.ahead(order.epoch):
            self._exclude(order, first, count, "the rest of an excluded window")
        self._quarantine.resolve_ahead(order.epoch)
        while True:
            batch = order.get(k)
            order.draw_again(k)
            if batch is None:
                return
            span = order.span(k)
            k += 1
            if self._quarantine.covers(*span):
                continue
            given = order.ids(batch)
            ids = left_of(given, span, order.stride, self._excluded_in(order.epoch))
            if self._together is None:
                ids = self._quarantine.keep(ids)
            else:
                ids = self._quarantine.stand_in(ids, self._together)
            if not ids:
                continue
            rng = self._rng.capture() if self._in_process else None
            self._queue.append(_Issued(k - 1, span, list(ids), rng))
            yield batch if ids is given else ids

    def _excluded_in(self, epoch: int) -> list[Span]:
        """The stretches excluded in an epoch, looked up again when there are more."""
        known = epoch, len(self._quarantine.entries)
        if known != self._spans_of:
            self._spans_of, self._spans = known, [s for s in self._quarantine.spans() if s.epoch == epoch]
        return self._spans

    def draw(self) -> Draw:
        """The next batch; StopIteration after the last epoch."""
        while True:
            if self._iterator is None:
                if self._last is not None and self._order.epoch >= self._last:
                    self.emit_epoch_ends()
                    raise StopIteration
                self._open()
            # A loader of the user's own kind may load one batch ahead: then a step begins here, not where it was loaded.
            rng = self._rng.capture() if self._in_process and self._queue else None
            assert self._iterator is not None
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._end_epoch()
                continue
            if not self._in_process:
                # Workers draw for themselves, and what the sampler was asked for meanwhile stays asked for.
                rng = self._rng.capture()
            issued = self._queue.popleft()
            at, self._at = self._at, Position(self._order.epoch, issued.k + 1, issued.span.stop)
            begin = Position(self._order.epoch, issued.k, issued.span.start)
            self._order.reached(issued.k + 1)
            self._empty_epochs = 0
            self.emit_epoch_ends()
            samples = count_samples(batch) or 1 if self._single else len(issued.ids)
            return Draw(batch, issued.span, issued.ids, samples, at, begin, rng or issued.rng)

    def defer_epoch_ends(self, epochs: int) -> None:
        self._untold += epochs

    def emit_epoch_ends(self) -> None:
        for epoch in range(self._order.epoch - self._untold, self._order.epoch):
            self._on_epoch_end(epoch)
        self._untold = 0

    def _open(self) -> None:
        """Begin the epoch, or go on inside it after a `seek`: then as if the iterator had never been remade."""
        self._before_iter()
        if self._again or self._quietly:
            self._kept = self._rng.capture()
        if not self._again:
            for set_epoch in self._setters:
                set_epoch(self._base_epoch + self._order.epoch - self._first_epoch)
        self._iterator = iter(self._loader)
        self._again = self._quietly = False

    def _end_epoch(self) -> None:
        ended = self._order
        self._empty_epochs += ended.empty
        if self._empty_epochs > 1:
            raise DataError("the loader yields no batches: its dataset is empty, or drop_last leaves nothing of it")
        self._iterator, self._cursor = None, 0
        self._order = self._orders[ended.epoch + 1] = self._new_order(ended.epoch + 1)
        self._on_epoch_end(ended.epoch)

    # ---- back, and past

    def requeue(self, draws: list[Draw]) -> str | None:
        """The next `draw` gives these batches again, loaded anew. Never fails here."""
        self.seek(draws[0].begin)
        return None

    def rewind_to(self, draw: Draw) -> RngState | None:
        """Where the random streams stood right before the batch was loaded."""
        return draw.rng

    def can_seek(self, position: Position) -> bool:
        """Whether `seek` can go there by what is on record."""
        epoch, batch = self.locate(position)
        order = self._orders.get(epoch)
        return position == self._beginning or (order is not None and order.remembers(batch))

    def seek(self, position: Position) -> None:
        """Stand at `position`, which must not be older than what `forget_before` was told."""
        if position == self._beginning:
            self._orders = {self._begins: self._new_order(self._begins)}
            # Persistent workers are started anew too: starting them draws their seed.
            self._loader._iterator, self._quietly = None, self._used_before
        epoch, cursor = self.locate(position)
        order = self._orders.get(epoch)
        if order is None:
            raise DataError(f"cannot go back to epoch {position.epoch}: its order is no longer on record")
        self._iterator = None
        self._queue.clear()
        for epoch in [e for e in self._orders if e > order.epoch]:
            del self._orders[epoch]
        self._order, self._cursor, self._at = order, cursor, position
        self._again, self._untold = order.begun, 0

    def locate(self, position: Position) -> tuple[int, int]:
        """The epoch and the batch that come after a position."""
        return (self._begins, 0) if position == self._beginning else (position.epoch, position.batch)

    # ---- in another process

    def save(self) -> dict[str, Any]:
        """Where it stands, for a file: plain values and tensors that nobody changes afterwards. Draws and loads nothing."""
        order = self._orders.get(self._at.epoch)
        ended = self._order.epoch > max(self._at.epoch, self._first_epoch) and not self._untold
        return {
            "version": VERSION,
            "kind": "indexed",
            **self._at._asdict(),
            "first_epoch": self._first_epoch,
            "base_epoch": self._base_epoch,
            "begins": self._order.epoch if ended else None,
            "batch_samples": self._asked.stride(),
            "length": self._asked.length(),
            "workers": self._loader.num_workers,
            "order": None if order is None or ended else order.save(self._at.batch),
        }

    def resume(self, saved: dict[str, Any]) -> list[str]:
        """Stand where it was saved, in this process or an earlier one: nothing is loaded, nothing stays drawn."""
        refuse_foreign(saved, "indexed")
        self._iterator = self._loader._iterator = self._kept = None
        self._queue.clear()
        self._cursor, self._again, self._untold, self._empty_epochs = 0, False, 0, 0
        shift = saved["first_epoch"] - self._first_epoch
        self._last = None if self._last is None else self._last + shift
        self._first_epoch, self._base_epoch = saved["first_epoch"], saved["base_epoch"]
        self._at = position = Position(saved["epoch"], saved["batch"], saved["sample"])
        notes: list[str] = []
        if saved["order"] is None:
            self._stand_before(self._first_epoch if saved["begins"] is None else saved["begins"])
        else:
            self._beginning = Position(self._first_epoch - 1, 0, 0)
            for set_epoch in self._setters:
                set_epoch(self._base_epoch + position.epoch - self._first_epoch)
            self._order, notes = resume_order(saved["order"], position, self._here)
            self._orders = {position.epoch: self._order}
            self._cursor, self._again = position.batch, True
        if not self._resumed:  # what is on record of windows ahead since then is in batches of this process
            was, now = saved["batch_samples"], self._asked.stride()
            settle_ahead(self._quarantine, was, now, saved["length"], self._on_exclusion)
        self._resumed = True
        return notes + changes(saved, self._asked, self._loader.num_workers)

    def _stand_before(self, epoch: int) -> None:
        """Nothing of an epoch is left to come: what it was made of does not matter any more."""
        self._beginning, self._begins = self._at, epoch
        self._order = self._new_order(epoch)
        self._orders = {epoch: self._order}
        # Workers that persist would have been there already: to start them draws what they would not have drawn.
        if epoch > self._first_epoch:
            self._used_before = self._quietly = self._loader.persistent_workers

    def exclude(self, start: Position, batches: int, reason: str) -> None:
        """Quarantine `batches` batches from `start` on, into epochs that have not begun if need be."""
        epoch, first = self.locate(start)
        order = self._orders.get(epoch)
        if order is None or not order.begun:
            self._quarantine.add_ahead(epoch, first, batches, reason)
        else:
            self._exclude(order, first, batches, reason)

    def _exclude(self, order: Order, first: int, count: int, reason: str) -> None:
        gone = max(0, order.oldest - first)
        k = first = first + gone
        count -= gone
        order.catch_up()
        while k < first + count and order.get(k) is not None:
            k += 1
        if k > first:
            span = Span(order.epoch, order.span(first).start, order.span(k - 1).stop)
            self._quarantine.add_spans([span], reason)
            self._on_exclusion(span, k - first, reason)
        if k < first + count:
            self._quarantine.add_ahead(order.epoch + 1, 0, first + count - k, reason)

    def forget_before(self, position: Position) -> None:
        """Nothing before `position` will be asked for again."""
        for epoch in [e for e in self._orders if e < position.epoch]:
            del self._orders[epoch]
        if position.epoch in self._orders:
            self._orders[position.epoch].forget_before(position.batch)

    def close(self) -> None:
        """Let the workers go now: collected later, amid those of another loader, they are waited for in vain."""
        self._iterator = self._loader._iterator = None
        self._queue.clear()
