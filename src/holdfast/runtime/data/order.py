"""One epoch's order: the batches of indices that the sampler returned, and what it takes to compute them again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler

from holdfast.core.base.types import Span
from holdfast.runtime.data.digest import SampleDigest
from holdfast.runtime.data.packing import pack_rng
from holdfast.runtime.data.world import RankShare, ServedShare, describe_sampler, known_length, share_of
from holdfast.runtime.state.rng import Rng, RngState

_DIGEST_EVERY = 256


class LoaderSampler:
    """The sampler of a loader. It yields batches of indices, or single ones if the loader does not batch."""

    def __init__(self, loader: Any) -> None:
        self.is_single = loader.batch_sampler is None
        self.outer: Any = loader.sampler if self.is_single else loader.batch_sampler
        is_plain = isinstance(self.outer, BatchSampler) and type(self.outer).__iter__ is BatchSampler.__iter__
        self.batch_size: int | None = self.outer.batch_size if not self.is_single and is_plain else None
        """set if torch's own BatchSampler cuts batches from a stream of samples"""
        self.inner: Any = self.outer if self.batch_size is None else self.outer.sampler
        """yields the samples; if batches are made in another way, the batch sampler itself"""
        self.share: RankShare = share_of(self.inner)

    @property
    def yields_samples(self) -> bool:
        """Whether `inner` yields single samples, so that it can be continued after any of them."""
        return self.is_single or self.batch_size is not None

    def global_batch_size(self) -> int | None:
        """Return the samples of the global order in one batch of all ranks; None if batches vary."""
        size = 1 if self.is_single else self.batch_size
        return None if size is None else size * self.share.world

    def batches_left(self, batch: int, sample: int) -> int | None:
        """Return how many batches of an epoch are left after so many batches and samples of all ranks; None: not known.

        In a run that was resumed the batches before may have had another size.
        """
        length, size, samples = known_length(self.outer), self.global_batch_size(), known_length(self.inner)
        if length is None or size is None or samples is None or sample == batch * size:
            return None if length is None else length - batch
        left = samples * self.share.world - sample
        return left // size if not self.is_single and self.outer.drop_last else -(-left // size)

    def length(self) -> int | None:
        """Return the samples of an epoch on all ranks, if known."""
        length: int | None = describe_sampler(self.inner)["length"] if self.yields_samples else None
        return length

    def batched(self, samples: Iterable[Any]) -> Iterator[Any]:
        """Return what `outer` would yield for these samples."""
        if self.batch_size is None:
            return iter(samples)
        return iter(BatchSampler(samples, self.batch_size, self.outer.drop_last))


class EpochOrder:
    """Records one epoch's batches of indices, as far as the sampler was asked for them.

    A sampler may draw from a user's generator whenever it is asked, also at its end (RandomSampler does). The draws for
    each batch are recorded, so that reading the record again moves the generators in the same way.
    """

    def __init__(
        self, epoch: int, sampler: LoaderSampler, rng: Rng, generator_states: Callable[[], list[Tensor]]
    ) -> None:
        self.epoch = epoch
        self._sampler, self._rng, self._generator_states = sampler, rng, generator_states
        self._draws: dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        """batch -> the states of the user's generators before and after the sampler was asked for it"""
        self._iterator: Iterator[Any] | None = None
        self._batches: list[Any] = []
        self._starts = [0]
        self.first_recorded = 0
        """the first batch that is on record, or will be"""
        self._ended = self._last_was_short = self._is_on_record = False
        self._about: dict[str, Any] = {}
        self._initial_rng: dict[str, Any] | None = None
        """the random state when the sampler first drew: for its iterator, or for its first index"""
        self._earlier: list[ServedShare] = []
        """what was served of this epoch in other world sizes"""
        self._start = 0
        """where this world size begins in the global order"""
        self._asked_before, self._ended_before = 0, False
        """how far the previous process had asked the sampler: its generators are there, although less was served"""
        self._oldest_digest, self._digest, self._digested = SampleDigest(), SampleDigest(), 0

    @classmethod
    def resumed(
        cls,
        saved: dict[str, Any],
        position: tuple[int, int, int],
        iterator: Iterator[Any],
        earlier: list[ServedShare],
        served: SampleDigest,
        context: tuple[LoaderSampler, Rng, Callable[[], list[Tensor]]],
    ) -> EpochOrder:
        """Return an order that a previous process began. `iterator` yields what follows `position`."""
        epoch, batch, sample = position
        order = cls(epoch, *context)
        order._iterator, order.first_recorded, order._starts = iterator, batch, [sample]
        order._is_on_record = True
        order._about, order._initial_rng = saved["about"], saved["streams"]
        order._earlier, order._start = earlier, sum(share.global_samples for share in earlier)
        if not earlier:
            order._asked_before, order._ended_before = saved["asked"], saved["ended"]
        order._oldest_digest, order._digest, order._digested = served, served.copy(), batch
        return order

    @property
    def has_begun(self) -> bool:
        """Whether the sampler was asked: that may draw from generators."""
        return self._iterator is not None

    def begin(self) -> None:
        """Ask the sampler for an iterator, at the moment the loader does. One of torchdata draws then, and its loader with
        workers asks twice."""
        if self._is_on_record or self._batches or self._ended:
            return
        before = self._rng.capture()
        packed = self._pack(before)
        self._about, self._iterator = describe_sampler(self._sampler.inner), iter(self._sampler.outer)
        # Most samplers draw when they are asked for an index; the loader has drawn the seed of its workers by then.
        self._initial_rng = None if before.same(self._rng.capture()) else packed

    def _pack(self, rng: RngState) -> dict[str, Any]:
        return pack_rng(rng, self._generator_states())

    @property
    def stride(self) -> int:
        """The samples of the global order for each sample on this rank."""
        return self._sampler.share.world

    def serve(self, k: int) -> tuple[Any, Any, Span] | None:
        """Return the k-th batch as the sampler gave it, its ids and its span; None past the end.

        Moves the user's generators as asking the sampler for it did, if they are in the state they were in then.
        """
        batch = self.get(k)
        if k in self._draws:
            self._rng.replay_user_draws(*self._draws[k])
        return None if batch is None else (batch, self.ids(batch), self.span(k))

    def get(self, k: int) -> Any | None:
        """Return the k-th batch of indices, or None past the end. Asks the sampler only for unrecorded batches."""
        while not self._ended and k >= self.first_recorded + len(self._batches):
            before = self._rng.user_states() if self._rng.has_user_generators else ()
            if self._iterator is None:
                self.begin()
            assert self._iterator is not None
            self._initial_rng = self._initial_rng or self._pack(self._rng.capture())
            try:
                batch = next(self._iterator)
                self._batches.append(batch)
                size = len(self.ids(batch))
                self._starts.append(self._starts[-1] + self.stride * size)
                self._last_was_short = self._sampler.batch_size is not None and size < self._sampler.batch_size
            except StopIteration:
                self._ended = True
            after = self._rng.user_states() if self._rng.has_user_generators else ()
            if any(map(_differ, before, after)):
                self._draws[self.first_recorded + len(self._batches) - (not self._ended)] = (before, after)
        i = k - self.first_recorded
        return self._batches[i] if 0 <= i < len(self._batches) else None

    def ids(self, batch: Any) -> Any:
        return [batch] if self._sampler.is_single else batch

    @property
    def is_empty(self) -> bool:
        """Whether the sampler ended without yielding anything."""
        return self._ended and self.first_recorded + len(self._batches) == 0

    def replay_draws(self, first: int = 0, last: float = math.inf) -> None:
        """Move the user's generators on as asking the sampler for these batches did. After a seek they are at an earlier
        state, from which the sampler would repeat recorded batches."""
        for k in sorted(k for k in self._draws if first <= k <= last):
            self._rng.replay_user_draws(*self._draws[k])

    def span(self, k: int) -> Span:
        """Return the samples of the global order in batch k of all ranks."""
        i = k - self.first_recorded
        return Span(self.epoch, self._starts[i], self._starts[i + 1])

    def mark_served(self, k: int) -> None:
        """Record that all batches before k were served. Updates the digest now and then, so that saving is fast."""
        if not 0 <= k - self._digested < _DIGEST_EVERY:
            self._update_digest(k)

    def _update_digest(self, k: int) -> None:
        """Digest exactly the batches before k."""
        if k < self._digested:
            self._digest, self._digested = self._oldest_digest.copy(), self.first_recorded
        for batch in self._batches[self._digested - self.first_recorded : k - self.first_recorded]:
            self._digest.add(self.ids(batch))
        self._digested = k

    def forget_before(self, k: int) -> None:
        count = k - self.first_recorded
        if count > 0:
            for batch in self._batches[:count]:
                self._oldest_digest.add(self.ids(batch))
            del self._batches[:count], self._starts[:count]
            self.first_recorded, self._is_on_record = k, True
            if self._digested < k:
                self._digest, self._digested = self._oldest_digest.copy(), k

    def save(self, k: int) -> dict[str, Any]:
        """Return what another process needs to continue before batch k: plain values and tensors that do not change."""
        self._update_digest(k)
        share = self._sampler.share
        count = (self._starts[k - self.first_recorded] - self._start) // self.stride
        asked = (self._starts[-1] - self._start) // self.stride
        served = [*self._earlier, ServedShare(share.world, share.rank, count, self._digest.hex())]
        return {
            "asked": max(asked, self._asked_before),
            "ended": self._ended or self._last_was_short or self._ended_before,
            "deals": [list(each) for each in served],
            "about": self._about,
            "streams": self._initial_rng,
        }


def _differ(before: Tensor, after: Tensor) -> bool:
    """Compare two generator states by their bytes: `torch.equal` takes twice as long, at every batch."""
    return before.numpy().tobytes() != after.numpy().tobytes()


class SamplerProxy:
    """Replaces the loader's batch sampler: iterates over what `start` returns, and forwards everything else."""

    def __init__(self, sampler: Any, start: Callable[[], Iterator[Any]]) -> None:
        self._sampler = sampler
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        return self._start()

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)
