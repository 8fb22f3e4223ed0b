"""The data order: sample n of a run depends on n and the seed alone.

The sequences of a source are its consecutive chunks of `context` tokens, reshuffled for each pass. Sources are mixed in
blocks of 1,000 samples. In each block every source has its exact share, in shuffled order. So the position of sample n
within its source follows from block counts, and the weights hold from the first block on.
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
_EVAL_STRIDE = 7919


class MixtureStage(NamedTuple):
    """From block `first_block` on, each block holds `quotas[i]` samples of source i."""

    first_block: int
    quotas: tuple[int, ...]


def block_quotas(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return each source's samples per block, by the largest-remainder method, so that they add up to BLOCK."""
    total = sum(weights)
    exact = [BLOCK * w / total for w in weights]
    whole = [int(e) for e in exact]
    order = sorted(range(len(exact)), key=lambda i: (whole[i] - exact[i], i))
    for i in order[: BLOCK - sum(whole)]:
        whole[i] += 1
    return tuple(whole)


class Mixture(Dataset[dict[str, Tensor]]):
    """Data set of a run; sample n is {"tokens", "targets", "weight" (in the loss), "source"}.

    Raises DataError if a source is too short for one training sequence next to its held-out part.
    """

    def __init__(
        self,
        sources: list[Tokens],
        context: int,
        samples: int,
        seed: int,
        stages: list[MixtureStage],
        eval_share: float,
    ) -> None:
        self.sources, self._context, self._samples, self._seed = sources, context, samples, seed
        self._stages = stages
        self._held_out = [max(context + 1, int(len(s) * eval_share)) for s in sources]
        self._sequences = [(len(s) - held - 1) // context for s, held in zip(sources, self._held_out, strict=True)]
        for source, count in zip(sources, self._sequences, strict=True):
            if count < 1:
                raise DataError(
                    f"{source.name}: {len(source)} tokens are too few for one sequence of {context} and the held-out "
                    "part; use a longer file or a shorter [model] context"
                )

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, n: int) -> dict[str, Any]:
        source, index = self.locate(int(n))
        count = self._sequences[source]
        passes, position = divmod(index, count)
        start = int(_pass_order(self._seed, source, passes, count)[position]) * self._context
        tokens = self._read(source, start)
        return {"tokens": tokens[:-1], "targets": tokens[1:], "weight": torch.ones(()), "source": source}

    def _read(self, source: int, start: int) -> Tensor:
        piece = self.sources[source].data[start : start + self._context + 1]
        return torch.from_numpy(np.asarray(piece, dtype=np.int64))

    def locate(self, n: int) -> tuple[int, int]:
        """Return the source of sample n, and its index among the samples of that source."""
        block, offset = divmod(n, BLOCK)
        order = self._order(block)
        source = int(order[offset])
        return source, self._count_before(block)[source] + int((order[:offset] == source).sum())

    def _order(self, block: int) -> np.ndarray:
        """Return the source of each sample in a block."""
        stage = max((s for s in self._stages if s.first_block <= block), key=lambda s: s.first_block)
        return _block_order(self._seed, block, stage.quotas)

    def _count_before(self, block: int) -> list[int]:
        """Return the samples of each source in the blocks before this one."""
        counts = [0] * len(self.sources)
        ends = [s.first_block for s in self._stages[1:]] + [block]
        for stage, end in zip(self._stages, ends, strict=True):
            blocks = max(0, min(end, block) - stage.first_block)
            counts = [c + blocks * q for c, q in zip(counts, stage.quotas, strict=True)]
        return counts

    def stage_of(self, n: int) -> int:
        """Return the stage of sample n, counted from 0."""
        return sum(s.first_block <= n // BLOCK for s in self._stages) - 1

    def count_per_source(self, stop: int) -> list[int]:
        """Return the samples of each source among the first `stop`, without reading any."""
        block, offset = divmod(stop, BLOCK)
        part = np.bincount(self._order(block)[:offset], minlength=len(self.sources))
        return [before + int(more) for before, more in zip(self._count_before(block), part, strict=True)]

    def held_out_batches(self, batch_size: int, batches: int) -> list[dict[str, Tensor]]:
        """Return the evaluation batches: the same each time, from the end of every source in turn."""
        pieces: list[Tensor] = []
        for n in range(batch_size * batches):
            source = n % len(self.sources)
            held = self._held_out[source]
            count = max(1, (held - 1) // self._context)
            # The stride must not divide the count: then no sequence repeats before all have been used.
            stride = _EVAL_STRIDE if count % _EVAL_STRIDE else 1
            first = len(self.sources[source]) - held
            pieces.append(self._read(source, first + (n // len(self.sources) * stride % count) * self._context))
        stacked = [torch.stack(pieces[i : i + batch_size]) for i in range(0, len(pieces), batch_size)]
        return [{"tokens": s[:, :-1], "targets": s[:, 1:], "weight": torch.ones(len(s))} for s in stacked]


class _StepRange(NamedTuple):
    """Consecutive committed steps of `size` samples each; the samples are consecutive from `start` on."""

    first_step: int
    steps: int
    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.steps * self.size


class DrawnSamples:
    """Holds which samples the committed steps used, as a few ranges, however long the run."""

    def __init__(self) -> None:
        self._ranges: list[_StepRange] = []

    def commit(self, step: int, spans: list[tuple[int, int]]) -> None:
        """Add a committed step and its sample spans. Recorded steps from `step` on were rolled back: drop them."""
        while self._ranges and (last := self._ranges[-1]).first_step + last.steps > step:
            self._ranges.pop()
            if step > last.first_step:
                self._ranges.append(last._replace(steps=step - last.first_step))
        for start, stop in spans:
            last_range = self._ranges[-1] if self._ranges else None
            if len(spans) == 1 and last_range and (last_range.stop, last_range.size) == (start, stop - start):
                self._ranges[-1] = last_range._replace(steps=last_range.steps + 1)
            else:
                self._ranges.append(_StepRange(step, 1, start, stop - start))

    def count_per_source(self, mixture: Mixture) -> list[int]:
        """Return the samples used of each source. In a resumed run, all samples before the first range count as used."""
        totals = [0] * len(mixture.sources)
        for n, steps in enumerate(self._ranges):
            start = 0 if n == 0 and steps.first_step > 1 else steps.start
            counts = zip(mixture.count_per_source(steps.stop), mixture.count_per_source(start), strict=True)
            totals = [total + upto - before for total, (upto, before) in zip(totals, counts, strict=True)]
        return totals


@lru_cache(maxsize=8)
def _block_order(seed: int, block: int, quotas: tuple[int, ...]) -> np.ndarray:
    order = np.repeat(np.arange(len(quotas)), quotas)
    np.random.Generator(np.random.Philox(key=[seed, 2 * block])).shuffle(order)
    return order


@lru_cache(maxsize=16)
def _pass_order(seed: int, source: int, passes: int, count: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=[seed, 2 * (source * 1_000_003 + passes) + 1])).permutation(count)
