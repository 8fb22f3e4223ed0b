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
from torch import Tensor
from torch.utils.data import DataLoader

from holdfast.core.errors import DataError
from holdfast.core.quarantine import Quarantine
from holdfast.core.types import Span
from holdfast.runtime.data.epochs import epoch_setters, samplers, standing_epoch
from holdfast.runtime.data.source import Draw, EpochEnd, Position
from holdfast.runtime.data.split import count_samples
from holdfast.runtime.rng import Rng, RngState

OnExclusion = Callable[[Span, int, str], None]


class Order:
    """One epoch's stream of index batches, as far as the sampler has been asked for it.

    A sampler may draw from a generator of the user's whenever it is asked, at its end too (RandomSampler does). What was
    drawn for a batch is remembered, so that reading the record again moves the generator as asking did.
    """

    def __init__(self, epoch: int, sampler: Any, single: bool, rng: Rng) -> None:
        self.epoch = epoch
        self._rng = rng
        self._drawn: dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        self._sampler = sampler
        self._single = single
        self._inner: Iterator[Any] | None = None
        self._batches: list[Any] = []
        self._starts = [0]
        self._forgotten = 0
        self._complete = False

    @property
    def begun(self) -> bool:
        """Whether the sampler has been asked: doing so may draw from generators."""
        return self._inner is not None

    def get(self, k: int) -> Any | None:
        """The k-th batch of indices, or None past the end. Asks the sampler only for what it was not asked before."""
        while not self._complete and k >= self._forgotten + len(self._batches):
            before = self._rng.own()
            if self._inner is None:
                self._inner = iter(self._sampler)
            try:
                batch = next(self._inner)
                self._batches.append(batch)
                self._starts.append(self._starts[-1] + (1 if self._single else len(batch)))
            except StopIteration:
                self._complete = True
            after = self._rng.own()
            if not all(map(torch.equal, before, after)):
                self._drawn[self._forgotten + len(self._batches) - (not self._complete)] = (before, after)
        i = k - self._forgotten
        return self._batches[i] if 0 <= i < len(self._batches) else None

    @property
    def empty(self) -> bool:
        """Whether the sampler has ended without having given anything."""
        return self._complete and self._forgotten + len(self._batches) == 0

    def catch_up(self) -> None:
        """Move the user's generators to where they were last asked: after going back they stand at an earlier place, and
        asking for more from there would give again what is on record."""
        for k in sorted(self._drawn):
            self._rng.move_own(*self._drawn[k])

    def draw_again(self, k: int) -> None:
        """Move the user's generators as asking for the k-th batch did, if they stand where they stood then."""
        if k in self._drawn:
            self._rng.move_own(*self._drawn[k])

    def span(self, k: int) -> Span:
        i = k - self._forgotten
        return Span(self.epoch, self._starts[i], self._starts[i + 1])

    def forget_before(self, k: int) -> None:
        count = k - self._forgotten
        if count > 0:
            del self._batches[:count], self._starts[:count]
            self._forgotten = k


class _Issued(NamedTuple):
    """A batch of indices the loader has been given and has not handed out yet."""

    k: int
    span: Span
    ids: list[Any]
    rng: RngState | None


class _Feed:
    """What stands in the loader's place of a batch sampler."""

    def __init__(self, inner: Any, start: Callable[[], Iterator[Any]]) -> None:
        self._inner = inner
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        return self._start()

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


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
    ) -> None:
        self._rng, self._quarantine = rng, quarantine
        self._last = None if epochs is None else first_epoch + epochs
        self._on_epoch_end = on_epoch_end
        self._before_iter, self._on_exclusion = before_iter, on_exclusion
        self._single = loader.batch_sampler is None
        self._sampler: Any = loader.sampler if self._single else loader.batch_sampler
        self._setters, self._base_epoch = epoch_setters(loader), standing_epoch(loader)
        for holder in (loader, *samplers(loader)):
            rng.include(getattr(holder, "generator", None))
        # A shallow copy: the loader's own attribute is locked, and the user's object stays as it was.
        self._loader: Any = copy.copy(loader)
        self._loader.__dict__["sampler" if self._single else "batch_sampler"] = _Feed(self._sampler, self._feed)
        self._in_process = loader.num_workers == 0
        # Workers that persist from a loop before ask that loop's sampler. Ours are new; to start them draws nothing.
        self._used_before = self._quietly = loader._iterator is not None
        self._loader._iterator = None
        self._kept: RngState | None = None
        self._first_epoch = first_epoch
        self._order = self._new_order(first_epoch)
        self._orders = {first_epoch: self._order}
        self._at = self._beginning = Position(first_epoch - 1, 0, 0)
        self._cursor = 0
        self._iterator: Iterator[Any] | None = None
        self._again = False
        self._queue: deque[_Issued] = deque()
        self._empty_epochs = 0
        self._untold = 0
        """epochs that have ended and have to be told of again; going back makes them end again"""

    def extend(self, epochs: int | None) -> None:
        """Allow this many further epochs from the one it stands in, or no end."""
        self._last = None if epochs is None else self.next_epoch + epochs

    @property
    def next_epoch(self) -> int:
        """The epoch that would begin next, if none has been begun and not ended."""
        return self._order.epoch + self._order.begun

    @property
    def position(self) -> Position:
        return self._at

    def _new_order(self, epoch: int) -> Order:
        return Order(epoch, self._sampler, self._single, self._rng)

    # ---- forward

    def _feed(self) -> Iterator[Any]:
        """What the loader is given: the recorded order from the cursor on, less what is quarantined."""
        if self._kept is not None:
            # Making the iterator drew its seed; workers then ask for some batches ahead, a lazy one only when it is asked.
            self._rng.restore(self._kept)
            self._kept = None
        order, k = self._order, self._cursor
        if k == 0:
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
            given = [batch] if self._single else batch
            ids = self._quarantine.keep(given)
            if not ids:
                continue
            rng = self._rng.capture() if self._in_process else None
            self._queue.append(_Issued(k - 1, span, list(ids), rng))
            yield batch if ids is given else ids

    def draw(self) -> Draw:
        """The next batch; StopIteration after the last epoch."""
        while True:
            if self._iterator is None:
                if self._last is not None and self._order.epoch >= self._last:
                    self.tell()
                    raise StopIteration
                self._open()
            # A loader of the user's own kind may load one batch ahead: then a step begins here, not where it was loaded.
            rng = self._rng.capture() if self._queue else None
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
            self._empty_epochs = 0
            self.tell()
            samples = count_samples(batch) or 1 if self._single else len(issued.ids)
            return Draw(batch, issued.span, issued.ids, samples, at, begin, rng or issued.rng)

    def untell(self, epochs: int) -> None:
        self._untold += epochs

    def tell(self) -> None:
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

    def serve_again(self, draws: list[Draw]) -> str | None:
        """The next `draw` gives these batches again, loaded anew. Never fails here."""
        self.seek(draws[0].begin)
        return None

    def rewound_to(self, draw: Draw) -> RngState | None:
        """Where the random streams stood right before the batch was loaded."""
        return draw.rng

    def seek(self, position: Position) -> None:
        """Stand at `position`, which must not be older than what `forget_before` was told."""
        if position == self._beginning:
            self._orders = {self._first_epoch: self._new_order(self._first_epoch)}
            # Persistent workers are started anew too: starting them draws their seed.
            self._loader._iterator, self._quietly = None, self._used_before
        order = self._orders.get(max(self._first_epoch, position.epoch))
        if order is None:
            raise DataError(f"cannot go back to epoch {position.epoch}: its order is no longer on record")
        self._iterator = None
        self._queue.clear()
        for epoch in [e for e in self._orders if e > order.epoch]:
            del self._orders[epoch]
        self._order, self._cursor, self._at = order, position.batch, position
        self._again, self._untold = order.begun, 0

    def last_ids(self) -> list[Any] | None:
        """The indices of the batch before the position, by which a resumed order is known again."""
        order = self._orders.get(self._at.epoch)
        batch = None if order is None or self._at.batch == 0 else order.get(self._at.batch - 1)
        return None if batch is None else [int(i) for i in ([batch] if self._single else batch)]

    def resume(self, position: Position, last: list[Any] | None) -> None:
        """Stand where an earlier process stood: the sampler is asked again, nothing is loaded, nothing stays drawn."""
        if position == self._beginning:
            return
        kept = self._rng.capture()
        self._order = order = self._new_order(position.epoch)
        self._orders = {position.epoch: order}
        for set_epoch in self._setters:
            set_epoch(self._base_epoch + position.epoch - self._first_epoch)
        for k in range(position.batch):
            order.get(k)
        self._rng.restore(kept)
        self._cursor, self._at, self._again = position.batch, position, True
        if self.last_ids() != last:
            raise DataError(
                f"cannot resume at sample {position.sample} of epoch {position.epoch}: the sampler gives another order or "
                "another batch size than before; its order must be a function of seed and epoch"
            )

    def exclude(self, start: Position, batches: int, reason: str) -> None:
        """Quarantine `batches` batches from `start` on, into epochs that have not begun if need be."""
        epoch = max(self._first_epoch, start.epoch)
        order = self._orders.get(epoch)
        if order is None or not order.begun:
            self._quarantine.add_ahead(epoch, start.batch, batches, reason)
        else:
            self._exclude(order, start.batch, batches, reason)

    def _exclude(self, order: Order, first: int, count: int, reason: str) -> None:
        k = first
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
