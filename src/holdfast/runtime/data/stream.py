"""Everything that is not index-addressable: iterable datasets and plain iterables. Drawn, and dropped where excluded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from holdfast.core.base.errors import DataError
from holdfast.core.base.types import Span
from holdfast.core.record.quarantine import Quarantine
from holdfast.runtime.data.indexed import OnExclusion
from holdfast.runtime.data.packing import pack_streams
from holdfast.runtime.data.resume import VERSION, refuse_foreign
from holdfast.runtime.data.source import Draw, EpochEnd, Position
from holdfast.runtime.data.split import count_samples, marks
from holdfast.runtime.data.stateful import Begun, Stateful, print_of, redraw, refuse_changed
from holdfast.runtime.state.rng import Rng, RngState


class StreamSource:
    """Goes forward only. Its positions count batches over all epochs, and samples within one.

    A stream that draws its items from the global generators (random crops, a random window of a text) cannot be rewound
    to before a draw: it would give the same batch again. For such, the random streams are left where they are.
    """

    exact = False

    def __init__(
        self,
        loader: Iterable[Any],
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
        self._loader, self._rng, self._quarantine = loader, rng, quarantine
        self._last = None if epochs is None else first_epoch + epochs
        self._on_epoch_end = on_epoch_end
        self._before_iter, self._on_exclusion = before_iter, on_exclusion
        found = getattr(loader, "generator", None)
        self._own = [found] if isinstance(found, torch.Generator) else []
        rng.include(found)
        self._first_epoch = first_epoch
        self._epoch = self._told = self._seeded = first_epoch
        # _told: the epoch the run knows it is in; _seeded: the last one whose beginning has drawn from the generators, as
        # they stand now; _opaque: the last batch before which the stream drew what cannot be drawn again.
        self._opaque = 0
        self._at = self._beginning = Position(first_epoch - 1, 0, 0)
        self._iterator: Iterator[Any] | None = None
        self._held: deque[Draw] = deque()
        self._given: deque[tuple[int, Span]] = deque()
        """the stretches of the batches drawn so far, as far back as a rollback could want"""
        self._to_drop = 0
        self._drop_reason = ""
        self._drawn_this_epoch = 0
        self._stateful = Stateful(loader)
        self._begun: Begun | None = None
        """how the epoch it draws from began"""
        self._latest: Draw | None = None

    def allow_epochs(self, epochs: int | None) -> None:
        """Allow this many further epochs from the one it stands in, or no end.

        A resumed run whose loop asks for one epoch at a time is first asked for those that an earlier life has had.
        """
        stands = self.next_epoch if self._last is None else min(self._last, self.next_epoch)
        self._last = None if epochs is None else stands + epochs

    @property
    def next_epoch(self) -> int:
        """The epoch that would begin next, if none has been begun and not ended."""
        return self._epoch + (self._iterator is not None)

    @property
    def position(self) -> Position:
        return self._held[0].at if self._held else self._at

    def draw(self) -> Draw:
        if self._held:
            draw = self._held.popleft()
            self._seed_again(draw.span.epoch)
            if draw.rng is not None:
                draw = draw._replace(rng=self._rng.capture())
        else:
            draw = self._next()
            while self._dropped(draw.span):
                draw = self._next()
        self._tell(draw.span.epoch)
        return draw

    def _dropped(self, span: Span) -> bool:
        if self._to_drop > 0:
            self._to_drop -= 1
            self._quarantine.add_spans([span], self._drop_reason)
            self._on_exclusion(span, 1, self._drop_reason)
            return True
        return self._quarantine.covers(*span)

    def _tell(self, epoch: int) -> None:
        """The epochs before this one have ended, as far as the run has not been told."""
        while self._told < epoch:
            self._told += 1
            self._on_epoch_end(self._told - 1)

    def defer_epoch_ends(self, epochs: int) -> None:
        self._told -= epochs

    def emit_epoch_ends(self) -> None:
        self._tell(self._epoch)

    def _begin_epoch(self) -> None:
        self._before_iter()
        self._seed_again(self._epoch - 1)
        before = self._rng.capture()
        self._begun = Begun(self._at.batch, pack_streams(before, [g.get_state() for g in self._own]))
        self._stateful.begin_anew()
        self._iterator = iter(self._loader)
        self._drawn_this_epoch, self._seeded = 0, self._epoch
        if not isinstance(self._loader, DataLoader) and not before.same(self._rng.capture()):
            self._opaque = self._at.batch

    def _seed_again(self, epoch: int) -> None:
        """Generators were put back to before an epoch began, and the epoch itself was not: draw its seed as it did."""
        while self._seeded < epoch:
            self._seeded += 1
            if isinstance(self._loader, DataLoader) and not self._loader.persistent_workers:
                torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)

    def rewind_to(self, draw: Draw) -> RngState | None:
        """The run goes back to right before this batch, and the random streams to what is returned, if they can."""
        self._told = min(self._told, draw.span.epoch)
        if draw.rng is None or draw.begin.batch < self._opaque:
            return None
        self._seeded = draw.span.epoch
        return draw.rng

    def _next(self) -> Draw:
        while True:
            if self._iterator is None:
                if self._last is not None and self._epoch >= self._last:
                    self._seed_again(self._epoch - 1)
                    self.emit_epoch_ends()
                    raise StopIteration
                self._begin_epoch()
            assert self._iterator is not None
            self._seed_again(self._epoch)
            before = self._rng.capture()
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._end_epoch()
                continue
            if not (same := before.same(self._rng.capture())):
                self._opaque = self._at.batch
            return self._taken(batch, before if same else None)

    def _taken(self, batch: Any, rng: RngState | None) -> Draw:
        """A batch has come out of the stream: the position moves past it."""
        count = count_samples(batch)
        start = self._at.sample if self._at.epoch == self._epoch else 0
        begin = Position(self._epoch, self._at.batch, start)
        at, self._at = self._at, Position(self._epoch, self._at.batch + 1, start + (count or 1))
        self._drawn_this_epoch += 1
        span = Span(self._epoch, start, self._at.sample)
        self._given.append((begin.batch, span))
        self._latest = Draw(batch, span, None, count, at, begin, rng, marks(batch))
        return self._latest

    def _end_epoch(self) -> None:
        if self._drawn_this_epoch == 0:
            raise DataError(
                "the loader yields no batches: it is empty, or can be read only once and is used up; "
                "pass an object whose __iter__ starts anew"
            )
        self._iterator = None
        self._epoch += 1

    def requeue(self, draws: list[Draw]) -> str | None:
        """Give these batches again; says why not where one of them has been changed in place since."""
        if any(draw.marks != marks(draw.batch) for draw in draws):
            return "a batch of this stream was modified in place and cannot be served again; it is dropped"
        self._held.extendleft(reversed(draws))
        return None

    def can_seek(self, position: Position) -> bool:
        """Always: it does not go back, whatever the position."""
        return True

    def seek(self, position: Position) -> None:
        """A stream does not go back: what it has given since is gone, and the epochs that ended since have ended."""
        self._held.clear()
        self._told = min(self._told, max(position.epoch, self._beginning.epoch + 1))
        self._seeded = self._epoch

    # ---- in another process

    def save(self) -> dict[str, Any]:
        """Where it stands, for a file, and what it takes to get there: the loader's own state, or the epoch's beginning.

        Batches that were drawn and are to be served again count as drawn: they will be drawn, and held, again.
        """
        ended = self._iterator is None and self._epoch > max(self._at.epoch, self._first_epoch) and not self._held
        again = sum(draw.span.epoch == self._epoch for draw in self._held)
        return {
            "version": VERSION,
            "kind": "stream",
            **self.position._asdict(),
            "first_epoch": self._first_epoch,
            "begins": self._epoch if ended and self._told == self._epoch else None,
            "latest": list(self._at),
            "again": again,
            "lost": len(self._held) - again,
            "drawn": self._drawn_this_epoch,
            "drop": [self._to_drop, self._drop_reason],
            "print": print_of(self._latest),
            "batch_size": getattr(self._loader, "batch_size", None),
            "workers": getattr(self._loader, "num_workers", None),
            "order": self._begun.streams if self._begun is not None else None,
            **self._stateful.save(
                self._rng, self._drawn_this_epoch, self._at.sample, fresh=not self._held and not ended
            ),
        }

    def resume(self, saved: dict[str, Any]) -> list[str]:
        """Go to where an earlier process stood, by the loader's own state or by drawing and dropping what came before."""
        refuse_foreign(saved, "stream")
        self._last = None if self._last is None else self._last + saved["first_epoch"] - self._first_epoch
        self._first_epoch = saved["first_epoch"]
        self._to_drop, self._drop_reason = saved["drop"]
        latest = Position(*saved["latest"])
        begins = self._first_epoch if saved["begins"] is None and saved["order"] is None else saved["begins"]
        if begins is not None:
            self._at = self._beginning = latest
            self._epoch = self._told = begins
            self._seeded = begins - (begins > self._first_epoch)
            return []
        refuse_changed(saved, self._loader)
        self._beginning = Position(self._first_epoch - 1, 0, 0)
        self._epoch = self._told = self._seeded = latest.epoch
        first = latest.batch - saved["drawn"]
        self._begun = Begun(first, saved["order"])
        after, samples = saved["state_at"] if saved["state"] is not None else (0, 0)
        self._drawn_this_epoch = after
        self._at = Position(latest.epoch if after else latest.epoch - 1, first + after, samples)
        self._before_iter()
        self._iterator, draws, notes = redraw(
            saved,
            self._loader,
            self._stateful,
            self._rng,
            self._own,
            lambda batch: self._taken(batch, self._rng.capture()),
        )
        if self._at != latest:
            raise DataError(
                f"cannot resume at sample {latest.sample} of epoch {latest.epoch}: the stream gave {self._at.sample} in as "
                "many batches; the stream and its batch size must be what they were"
            )
        self._held.extend(draws[len(draws) - saved["again"] :])
        self._given.clear()
        return notes

    def locate(self, position: Position) -> tuple[int, int]:
        """The epoch, and the batch counted over all epochs, that come after a position."""
        return position.epoch, position.batch

    def exclude(self, start: Position, batches: int, reason: str) -> None:
        """Drop what is left of the window; most of it has been drawn already, and will not be in another life."""
        gone = [span for k, span in self._given if start.batch <= k < start.batch + batches]
        for epoch in sorted({span.epoch for span in gone}):
            own = [span for span in gone if span.epoch == epoch]
            self._quarantine.add_spans(own, reason)
            self._on_exclusion(Span(epoch, own[0].start, own[-1].stop), len(own), f"{reason} (drawn already)")
        self._to_drop, self._drop_reason = batches - len(gone), reason

    def forget_before(self, position: Position) -> None:
        while self._given and self._given[0][0] < position.batch:
            self._given.popleft()

    def close(self) -> None:
        self._iterator = None
        self._held.clear()
