"""One epoch's order, recorded: what the sampler gave, where each batch lies, and what it takes to make it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler

from holdfast.core.base.types import Span
from holdfast.runtime.data.digest import Digest
from holdfast.runtime.data.packing import pack_streams
from holdfast.runtime.data.world import Deal, Share, describe, share_of
from holdfast.runtime.state.rng import Rng


class Asked:
    """The sampler of a loader, and how it is asked: for batches, or one by one where the loader collates nothing."""

    def __init__(self, loader: Any) -> None:
        self.single = loader.batch_sampler is None
        self.top: Any = loader.sampler if self.single else loader.batch_sampler
        plain = isinstance(self.top, BatchSampler) and type(self.top).__iter__ is BatchSampler.__iter__
        self.size: int | None = self.top.batch_size if not self.single and plain else None
        """of a batch, where torch's own BatchSampler cuts them from a stream of samples"""
        self.samples: Any = self.top if self.size is None else self.top.sampler
        """where the samples come from; where batches are made in another way, the batch sampler itself"""
        self.share: Share = share_of(self.samples)

    @property
    def by_samples(self) -> bool:
        """Whether the stream can be gone on with after any sample of it."""
        return self.single or self.size is not None

    def stride(self) -> int | None:
        """Samples of the global order that one batch takes, on all ranks together; None where batches vary."""
        size = 1 if self.single else self.size
        return None if size is None else size * self.share.world

    def length(self) -> int | None:
        """Samples of an epoch, on all ranks together, where that is known."""
        length: int | None = describe(self.samples)["length"] if self.by_samples else None
        return length

    def of(self, samples: Iterable[Any]) -> Iterator[Any]:
        """What the loader is given for a stream of samples."""
        if self.size is None:
            return iter(samples)
        return iter(BatchSampler(samples, self.size, self.top.drop_last))


class Order:
    """One epoch's stream of index batches, as far as the sampler has been asked for it.

    A sampler may draw from a generator of the user's whenever it is asked, at its end too (RandomSampler does). What was
    drawn for a batch is remembered, so that reading the record again moves the generator as asking did.
    """

    def __init__(self, epoch: int, asked: Asked, rng: Rng, own: Callable[[], list[Tensor]]) -> None:
        self.epoch = epoch
        self._asked, self._rng, self._own = asked, rng, own
        self._drawn: dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        self._inner: Iterator[Any] | None = None
        self._batches: list[Any] = []
        self._starts = [0]
        self._forgotten = 0
        self._complete = self._short = False
        self._about: dict[str, Any] = {}
        self._streams: dict[str, Any] | None = None
        """where the random streams stood when the sampler was first asked"""
        self._earlier: list[Deal] = []
        """what other worlds dealt out of this epoch"""
        self._start = 0
        """where this world's deal begins in the global order"""
        self._asked_before, self._ended_before = 0, False
        """how far the life before had asked: the generators stand there, even where less was handed out"""
        self._oldest, self._digest, self._digested = Digest(), Digest(), 0

    @classmethod
    def resumed(
        cls,
        saved: dict[str, Any],
        place: tuple[int, int, int],
        inner: Iterator[Any],
        earlier: list[Deal],
        had: Digest,
        own: tuple[Asked, Rng, Callable[[], list[Tensor]]],
    ) -> Order:
        """An order begun in an earlier life. `inner` gives what follows on `place`: (epoch, batch, sample)."""
        epoch, batch, sample = place
        order = cls(epoch, *own)
        order._inner, order._forgotten, order._starts = inner, batch, [sample]
        order._about, order._streams = saved["about"], saved["streams"]
        order._earlier, order._start = earlier, sum(d.samples for d in earlier)
        if not earlier:
            order._asked_before, order._ended_before = saved["asked"], saved["ended"]
        order._oldest, order._digest, order._digested = had, had.copy(), batch
        return order

    @property
    def begun(self) -> bool:
        """Whether the sampler has been asked: doing so may draw from generators."""
        return self._inner is not None

    @property
    def stride(self) -> int:
        """How far one sample here moves the position in the global order."""
        return self._asked.share.world

    @property
    def oldest(self) -> int:
        """The first batch that is on record, or will be."""
        return self._forgotten

    def get(self, k: int) -> Any | None:
        """The k-th batch of indices, or None past the end. Asks the sampler only for what it was not asked before."""
        while not self._complete and k >= self._forgotten + len(self._batches):
            before = self._rng.user_states()
            if self._inner is None:
                self._about = describe(self._asked.samples)
                self._streams = pack_streams(self._rng.capture(), self._own())
                self._inner = iter(self._asked.top)
            try:
                batch = next(self._inner)
                self._batches.append(batch)
                size = len(self.ids(batch))
                self._starts.append(self._starts[-1] + self.stride * size)
                self._short = self._asked.size is not None and size < self._asked.size
            except StopIteration:
                self._complete = True
            after = self._rng.user_states()
            if any(map(_moved, before, after)):
                self._drawn[self._forgotten + len(self._batches) - (not self._complete)] = (before, after)
        i = k - self._forgotten
        return self._batches[i] if 0 <= i < len(self._batches) else None

    def ids(self, batch: Any) -> Any:
        return [batch] if self._asked.single else batch

    @property
    def empty(self) -> bool:
        """Whether the sampler has ended without having given anything."""
        return self._complete and self._forgotten + len(self._batches) == 0

    def catch_up(self) -> None:
        """Move the user's generators to where they were last asked: after going back they stand at an earlier place, and
        asking for more from there would give again what is on record."""
        for k in sorted(self._drawn):
            self._rng.replay_user_draws(*self._drawn[k])

    def draw_again(self, k: int) -> None:
        """Move the user's generators as asking for the k-th batch did, if they stand where they stood then."""
        if k in self._drawn:
            self._rng.replay_user_draws(*self._drawn[k])

    def span(self, k: int) -> Span:
        """The stretch of the global order that batch k takes, on all ranks together."""
        i = k - self._forgotten
        return Span(self.epoch, self._starts[i], self._starts[i + 1])

    def reached(self, k: int) -> None:
        """All before batch k has been handed out. Takes the digest along, so that saving need not catch up."""
        if k < self._digested:
            self._digest, self._digested = self._oldest.copy(), self._forgotten
        for batch in self._batches[self._digested - self._forgotten : k - self._forgotten]:
            self._digest.add(self.ids(batch))
        self._digested = k

    def remembers(self, k: int) -> bool:
        return k >= self._forgotten

    def forget_before(self, k: int) -> None:
        count = k - self._forgotten
        if count > 0:
            for batch in self._batches[:count]:
                self._oldest.add(self.ids(batch))
            del self._batches[:count], self._starts[:count]
            self._forgotten = k
            if self._digested < k:
                self._digest, self._digested = self._oldest.copy(), k

    def save(self, k: int) -> dict[str, Any]:
        """What it takes to stand before batch k again in another process: plain values and tensors nobody changes."""
        self.reached(k)
        share = self._asked.share
        count = (self._starts[k - self._forgotten] - self._start) // self.stride
        asked = (self._starts[-1] - self._start) // self.stride
        deals = [*self._earlier, Deal(share.world, share.rank, count, self._digest.hex())]
        return {
            "asked": max(asked, self._asked_before),
            "ended": self._complete or self._short or self._ended_before,
            "deals": [list(deal) for deal in deals],
            "about": self._about,
            "streams": self._streams,
        }


def _moved(before: Tensor, after: Tensor) -> bool:
    """Of two states of a generator. By their bytes: `torch.equal` takes twice as long, at every batch."""
    return before.numpy().tobytes() != after.numpy().tobytes()


class Feed:
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
