"""Which sequence comes when: sample number n of the run is a function of n and the seed, whatever happened before.

Sequences of a source are the stretches of `context` tokens, in an order shuffled anew for each pass. Sources are mixed in
blocks: in each, every source has its exact share, in shuffled order, so that the place of sample n within its source is
known without counting all samples before it, and the weights hold from the first block on.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from holdfast.core.base.errors import DataError
from holdfast.reference.tokens import Tokens

BLOCK = 1000
_STRIDE = 7919


class Weights(NamedTuple):
    """From a sample number on, in whole blocks: how many of each block's samples come from each source."""

    first_block: int
    quotas: tuple[int, ...]


def quotas(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Shares of a block, by largest remainder, so that they add up."""
    total = sum(weights)
    exact = [BLOCK * w / total for w in weights]
    whole = [int(e) for e in exact]
    order = sorted(range(len(exact)), key=lambda i: (whole[i] - exact[i], i))
    for i in order[: BLOCK - sum(whole)]:
        whole[i] += 1
    return tuple(whole)


class Mixture(Dataset[dict[str, Tensor]]):
    """Sample n of a run: {"tokens", "targets", "weight" (in the loss), "source"}."""

    def __init__(
        self,
        sources: list[Tokens],
        context: int,
        samples: int,
        seed: int,
        stages: list[Weights],
        eval_share: float,
    ) -> None:
        self._sources, self._context, self._samples, self._seed = sources, context, samples, seed
        self._stages = stages
        self._held = [max(context + 1, int(len(s) * eval_share)) for s in sources]
        self._counts = [(len(s) - held - 1) // context for s, held in zip(sources, self._held, strict=True)]
        for source, count in zip(sources, self._counts, strict=True):
            if count < 1:
                raise DataError(
                    f"{source.name}: {len(source)} tokens are too few for one sequence of {context} beside the held-out "
                    "part; use a longer file or a shorter [model] context"
                )

    @property
    def sources(self) -> list[Tokens]:
        return self._sources

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, n: int) -> dict[str, Any]:
        source, k = self.place(int(n))
        tokens = self._sequence(source, k)
        return {"tokens": tokens[:-1], "targets": tokens[1:], "weight": torch.ones(()), "source": source}

    def place(self, n: int) -> tuple[int, int]:
        """The source of sample n, and the how-manieth of that source it is."""
        block, within = divmod(n, BLOCK)
        stage = max((s for s in self._stages if s.first_block <= block), key=lambda s: s.first_block)
        order = _block_order(self._seed, block, stage.quotas)
        source = int(order[within])
        before = self._before(block)[source] + int((order[:within] == source).sum())
        return source, before

    def _before(self, block: int) -> list[int]:
        """Samples of each source in the blocks before this one."""
        counts = [0] * len(self._sources)
        ends = [s.first_block for s in self._stages[1:]] + [block]
        for stage, end in zip(self._stages, ends, strict=True):
            blocks = max(0, min(end, block) - stage.first_block)
            counts = [c + blocks * q for c, q in zip(counts, stage.quotas, strict=True)]
        return counts

    def stage(self, n: int) -> int:
        """Which stage sample n belongs to, counted from 0."""
        return sum(s.first_block <= n // BLOCK for s in self._stages) - 1

    def count(self, stop: int) -> list[int]:
        """Samples of each source among the first `stop`, without making any of them."""
        block, within = divmod(stop, BLOCK)
        stage = max((s for s in self._stages if s.first_block <= block), key=lambda s: s.first_block)
        part = np.bincount(_block_order(self._seed, block, stage.quotas)[:within], minlength=len(self._sources))
        return [before + int(more) for before, more in zip(self._before(block), part, strict=True)]

    def _sequence(self, source: int, k: int) -> Tensor:
        passes, place = divmod(k, self._counts[source])
        start = int(_pass_order(self._seed, source, passes, self._counts[source])[place]) * self._context
        piece = self._sources[source].data[start : start + self._context + 1]
        return torch.from_numpy(np.asarray(piece, dtype=np.int64))

    def held_out(self, batch_size: int, batches: int) -> list[dict[str, Tensor]]:
        """The same sequences each time, from the end of every source in turn."""
        pieces: list[Tensor] = []
        for n in range(batch_size * batches):
            source = n % len(self._sources)
            data, held = self._sources[source].data, self._held[source]
            count = max(1, (held - 1) // self._context)
            stride = (
                _STRIDE if count % _STRIDE else 1
            )  # no divisor of the count, so that none comes twice before all have
            start = len(data) - held + (n // len(self._sources) * stride % count) * self._context
            pieces.append(torch.from_numpy(np.asarray(data[start : start + self._context + 1], dtype=np.int64)))
        stacked = [torch.stack(pieces[i : i + batch_size]) for i in range(0, len(pieces), batch_size)]
        return [{"tokens": s[:, :-1], "targets": s[:, 1:], "weight": torch.ones(len(s))} for s in stacked]


class _Stretch(NamedTuple):
    """Committed steps of one size whose samples follow on without a gap."""

    first_step: int
    steps: int
    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.steps * self.size


class Drawn:
    """Which samples the committed steps took: a few stretches, however long the run."""

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []

    def add(self, step: int, spans: list[tuple[int, int]]) -> None:
        """A step was committed with these samples; steps from it on that were known are rolled back."""
        while self._stretches and (last := self._stretches[-1]).first_step + last.steps > step:
            self._stretches.pop()
            if step > last.first_step:
                self._stretches.append(last._replace(steps=step - last.first_step))
        for start, stop in spans:
            known = self._stretches[-1] if self._stretches else None
            if len(spans) == 1 and known is not None and (known.stop, known.size) == (start, stop - start):
                self._stretches[-1] = known._replace(steps=known.steps + 1)
            else:
                self._stretches.append(_Stretch(step, 1, start, stop - start))

    def of_each_source(self, mixture: Mixture) -> list[int]:
        """Samples of each source. All before the first of a resumed run count as taken by its earlier life."""
        totals = [0] * len(mixture.sources)
        for n, stretch in enumerate(self._stretches):
            start = 0 if n == 0 and stretch.first_step > 1 else stretch.start
            both = zip(mixture.count(stretch.stop), mixture.count(start), strict=True)
            totals = [total + upto - before for total, (upto, before) in zip(totals, both, strict=True)]
        return totals


@lru_cache(maxsize=8)
def _block_order(seed: int, block: int, shares: tuple[int, ...]) -> np.ndarray:
    order = np.repeat(np.arange(len(shares)), shares)
    np.random.Generator(np.random.Philox(key=[seed, 2 * block])).shuffle(order)
    return order


@lru_cache(maxsize=16)
def _pass_order(seed: int, source: int, passes: int, count: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=[seed, 2 * (source * 1_000_003 + passes) + 1])).permutation(count)
