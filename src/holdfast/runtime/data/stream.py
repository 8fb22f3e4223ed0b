"""Iterable datasets and plain iterables: read forward only, and dropped where excluded."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from holdfast.core.base.errors import DataError
from holdfast.core.base.types import Span
from holdfast.runtime.data.left_out import MAX_EPOCHS, MAX_STREAM_BATCHES, nothing_left
from holdfast.runtime.data.packing import pack_rng
from holdfast.runtime.data.resume import VERSION, check_saved_kind
from holdfast.runtime.data.source import Draw, EpochSource, Position, SourceSetup
from holdfast.runtime.data.split import count_samples, tensor_versions
from holdfast.runtime.data.stateful import EpochStart, LoaderState, check_loader_unchanged, draw_fingerprint, redraw
from holdfast.runtime.data.worker_signals import iterate
from holdfast.runtime.state.rng import RngState

log = logging.getLogger("holdfast")


class StreamSource(EpochSource):
    """Reads forward only. Its positions count batches over all epochs, and samples within one.

    Some streams draw their items from the global generators (random crops, a random window of a text). Rewinding these to
    before a draw would make the stream return the same batch again, so they are left as they are.
    """

    exact = False

    def __init__(self, loader: Iterable[Any], setup: SourceSetup) -> None:
        super().__init__(setup)
        self._loader = loader
        generator = getattr(loader, "generator", None)
        self._generators = [generator] if isinstance(generator, torch.Generator) else []
        self._rng.include(generator)
        first_epoch = setup.first_epoch
        self._first_epoch = self._epoch = self._reported_epoch = first_epoch
        """the epoch that the run knows it is in"""
        self._seeded_epoch = first_epoch
        """the last epoch whose beginning has drawn from the generators, in their current state"""
        self._draws_items = False
        self._last_opaque = 0
        """the last batch before which the stream drew from generators that must not be rewound"""
        self._position = self._beginning = Position(first_epoch - 1, 0, 0)
        self._iterator: Iterator[Any] | None = None
        self._requeued: deque[Draw] = deque()
        self._served: deque[tuple[int, Span]] = deque()
        """the spans of the batches drawn so far, as far back as a rollback can go"""
        self._to_drop = 0
        self._drop_reason = ""
        self._drawn_this_epoch = 0
        self._loader_state = LoaderState(loader)
        self._epoch_start: EpochStart | None = None
        self._latest: Draw | None = None

    def serve_epoch(self, epoch: int) -> None:
        """Serve this epoch and no later one. What is left of earlier ones is dropped."""
        if self._epoch < epoch:
            self._iterator, self._epoch = None, epoch
        self._last_epoch = epoch + 1

    def leave_epoch(self) -> None:
        """End the epoch that is being read where it is: the loop has left it."""
        if self._iterator is not None:
            self._requeued.clear()
            self._iterator = None
            self._epoch += 1
            self.emit_epoch_ends()

    def batches_left(self) -> int | None:
        """Return None: excluded batches are known only when they are drawn."""
        return None

    def start_at(self, epoch: int, batch: int) -> None:
        """Begin a new run after so many batches of an epoch: they are drawn and dropped."""
        self._epoch = self._reported_epoch = epoch
        self._seeded_epoch = epoch - (epoch > self._first_epoch)
        for _ in range(batch):
            self._next()
        self._served.clear()

    @property
    def next_epoch(self) -> int:
        """The epoch that begins next, or the current one if it has not begun."""
        return self._epoch + (self._iterator is not None)

    @property
    def is_at_end(self) -> bool:
        return self._last_epoch is not None and self._epoch >= self._last_epoch

    @property
    def position(self) -> Position:
        return self._requeued[0].before if self._requeued else self._position

    # ---- forward

    def draw(self) -> Draw:
        """Return the next batch. StopIteration after the last epoch."""
        if self._requeued:
            draw = self._requeued.popleft()
            self._replay_seeds(draw.span.epoch)
            if draw.rng is not None:
                draw = draw._replace(rng=self._rng.capture())
        else:
            draw = first = self._next()
            while self._is_excluded(draw.span):
                batches, epochs = draw.begin.batch - first.begin.batch, draw.span.epoch - first.span.epoch
                if batches > MAX_STREAM_BATCHES or epochs > MAX_EPOCHS:
                    raise nothing_left(self._quarantine, f"the stream from epoch {first.span.epoch} on")
                draw = self._next()
        self._report_epochs_before(draw.span.epoch)
        return draw

    def _is_excluded(self, span: Span) -> bool:
        if self._to_drop > 0:
            self._to_drop -= 1
            self._quarantine.add_spans([span], self._drop_reason)
            self._on_exclusion(span, 1, self._drop_reason)
            return True
        return self._quarantine.covers(*span)

    def _report_epochs_before(self, epoch: int) -> None:
        while self._reported_epoch < epoch:
            self._reported_epoch += 1
            self._on_epoch_end(self._reported_epoch - 1)

    def defer_epoch_ends(self, epochs: int) -> None:
        self._reported_epoch -= epochs

    def emit_epoch_ends(self) -> None:
        self._report_epochs_before(self._epoch)

    def _begin_epoch(self) -> None:
        self._before_iter()
        self._replay_seeds(self._epoch - 1)
        before = self._rng.capture()
        packed = pack_rng(before, [g.get_state() for g in self._generators])
        self._epoch_start = EpochStart(self._position.batch, packed)
        self._loader_state.begin_epoch()
        self._iterator = iterate(self._loader)
        self._drawn_this_epoch, self._seeded_epoch = 0, self._epoch
        if not isinstance(self._loader, DataLoader) and not before.same(self._rng.capture()):
            self._last_opaque = self._position.batch

    def _replay_seeds(self, epoch: int) -> None:
        """Draw the seeds of epochs up to this one again, if the generators were rewound to before these began."""
        while self._seeded_epoch < epoch:
            self._seeded_epoch += 1
            if isinstance(self._loader, DataLoader) and not self._loader.persistent_workers:
                torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)

    def _next(self) -> Draw:
        while True:
            if self._iterator is None:
                if self.is_at_end:
                    self._replay_seeds(self._epoch - 1)
                    self.emit_epoch_ends()
                    raise StopIteration
                self._begin_epoch()
            assert self._iterator is not None
            self._replay_seeds(self._epoch)
            self._loader_state.before_draw(self._rng)
            before = self._rng.capture()
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._end_epoch()
                continue
            if not (is_same := before.same(self._rng.capture())):
                self._note_draws(before)
            draw = self._record(batch, before if is_same else None)
            self._loader_state.after_draw(self._drawn_this_epoch, self._position.sample)
            return draw

    def _note_draws(self, before: RngState) -> None:
        """Note that the stream has drawn its items from the generators of training. Log once what that prevents."""
        self._last_opaque = self._position.batch
        if self._drawn_this_epoch == 0 and self._is_seed_of_workers(before):
            return
        if not self._draws_items and not self._loader_state.exists:
            log.warning(
                "holdfast: the stream draws its items from the random generators that training draws from: no other process "
                "can resume it; give it a generator of its own, or a state_dict"
            )
        self._draws_items = True

    def _is_seed_of_workers(self, before: RngState) -> bool:
        """Return whether one seed was drawn since. Accelerate's loader begins to iterate with its first batch."""
        now = self._rng.capture()
        self._rng.restore(before)
        torch.empty((), dtype=torch.int64).random_()
        is_seed = now.same(self._rng.capture())
        self._rng.restore(now)
        return is_seed

    def _record(self, batch: Any, rng: RngState | None) -> Draw:
        """Move the position past a batch that was drawn."""
        count = count_samples(batch)
        before = self._position
        start = before.sample if before.epoch == self._epoch else 0
        begin = Position(self._epoch, before.batch, start)
        span = Span(self._epoch, start, start + (count or 1))
        self._position = Position(self._epoch, before.batch + 1, span.stop)
        self._drawn_this_epoch += 1
        self._served.append((begin.batch, span))
        self._latest = Draw(batch, span, None, count, before, begin, rng, tensor_versions(batch))
        return self._latest

    def _end_epoch(self) -> None:
        if self._drawn_this_epoch == 0:
            raise DataError(
                "the loader yields no batches: it is empty, or can be read only once and is used up; "
                "pass an object whose __iter__ starts again"
            )
        self._iterator = None
        self._epoch += 1

    # ---- rewinding and excluding

    def requeue(self, draws: list[Draw]) -> str | None:
        """Serve these batches again. Returns why not, if one of them was modified in place."""
        if any(draw.versions != tensor_versions(draw.batch) for draw in draws):
            return "a batch of this stream was modified in place and cannot be served again; it is dropped"
        self._requeued.extendleft(reversed(draws))
        return None

    def rewind_to(self, draw: Draw) -> RngState | None:
        """Rewind to right before this batch. Returns the random state to restore, or None if it must not be."""
        self._reported_epoch = min(self._reported_epoch, draw.span.epoch)
        if draw.rng is None or draw.begin.batch < self._last_opaque:
            return None
        self._seeded_epoch = draw.span.epoch
        return draw.rng

    def can_seek(self, position: Position) -> bool:
        """Return True: `seek` never goes back, whatever the position."""
        return True

    def seek(self, position: Position) -> None:
        """Drop requeued batches. A stream does not go back: served batches are lost, and ended epochs stay ended."""
        self._requeued.clear()
        self._reported_epoch = min(self._reported_epoch, max(position.epoch, self._beginning.epoch + 1))
        self._seeded_epoch = self._epoch

    def leave_out(self, draws: list[Draw]) -> str | None:
        """Do nothing: a stream is drawn on."""
        return None

    def locate(self, position: Position) -> tuple[int, int]:
        """Return the epoch, and the batch counted over all epochs, that follow a position."""
        return position.epoch, position.batch

    def exclude(self, start: Position, batches: int, reason: str) -> None:
        """Quarantine the part of a window that was drawn already, for later processes, and drop the rest when it comes."""
        drawn = [span for k, span in self._served if start.batch <= k < start.batch + batches]
        for epoch in sorted({span.epoch for span in drawn}):
            spans = [span for span in drawn if span.epoch == epoch]
            self._quarantine.add_spans(spans, reason)
            self._on_exclusion(Span(epoch, spans[0].start, spans[-1].stop), len(spans), f"{reason} (drawn already)")
        self._to_drop, self._drop_reason = batches - len(drawn), reason

    def forget_before(self, position: Position) -> None:
        while self._served and self._served[0][0] < position.batch:
            self._served.popleft()

    # ---- in another process

    def save(self, *, user_code: bool = True) -> dict[str, Any]:
        """Return the position for a file, with the loader's state or how the epoch began.

        Requeued batches count as drawn: another process draws them again and requeues them.
        """
        if self._loader_state.exists and not user_code:
            return {}
        has_ended = self._iterator is None and self._epoch > max(self._position.epoch, self._first_epoch)
        ended = has_ended and not self._requeued
        again = sum(draw.span.epoch == self._epoch for draw in self._requeued)
        up_to_date = not self._requeued and not ended
        return {
            "version": VERSION,
            "kind": "stream",
            **self.position._asdict(),
            "first_epoch": self._first_epoch,
            "begins": self._epoch if ended and self._reported_epoch == self._epoch else None,
            "latest": list(self._position),
            "again": again,
            "lost": len(self._requeued) - again,
            "drawn": self._drawn_this_epoch,
            "drop": [self._to_drop, self._drop_reason],
            "print": draw_fingerprint(self._latest),
            "batch_size": getattr(self._loader, "batch_size", None),
            "workers": getattr(self._loader, "num_workers", None),
            "order": self._epoch_start.rng if self._epoch_start is not None else None,
            **self._loader_state.save(self._rng, self._drawn_this_epoch, self._position.sample, up_to_date),
        }

    def resume(self, saved: dict[str, Any]) -> list[str]:
        """Move to a saved position through the loader's own state, or by drawing and dropping what came before it."""
        check_saved_kind(saved, "stream")
        self._last_epoch = (
            None if self._last_epoch is None else self._last_epoch + saved["first_epoch"] - self._first_epoch
        )
        self._first_epoch = saved["first_epoch"]
        self._to_drop, self._drop_reason = saved["drop"]
        latest = Position(*saved["latest"])
        begins = self._first_epoch if saved["begins"] is None and saved["order"] is None else saved["begins"]
        if begins is not None:
            self._position = self._beginning = latest
            self._epoch = self._reported_epoch = begins
            self._seeded_epoch = begins - (begins > self._first_epoch)
            return []
        check_loader_unchanged(saved, self._loader)
        self._beginning = Position(self._first_epoch - 1, 0, 0)
        self._epoch = self._reported_epoch = self._seeded_epoch = latest.epoch
        first = latest.batch - saved["drawn"]
        self._epoch_start = EpochStart(first, saved["order"])
        after, samples = saved["state_at"] if saved["state"] is not None else (0, 0)
        self._drawn_this_epoch = after
        self._position = Position(latest.epoch if after else latest.epoch - 1, first + after, samples)
        self._before_iter()
        self._iterator, draws, notes = redraw(
            saved,
            self._loader,
            self._loader_state,
            self._rng,
            self._generators,
            lambda batch: self._record(batch, self._rng.capture()),
        )
        if self._position != latest:
            raise DataError(
                f"cannot resume at sample {latest.sample} of epoch {latest.epoch}: the stream gave {self._position.sample} "
                "in as many batches; the stream and its batch size must be what they were"
            )
        self._requeued.extend(draws[len(draws) - saved["again"] :])
        self._served.clear()
        return notes

    def close(self) -> None:
        self._iterator = None
        self._requeued.clear()
