"""How the ranks share a run: `[distributed]` resolved for a number of ranks. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.base.errors import ConfigError
from holdfast.reference.config import TrainConfig


class ParallelLayout(NamedTuple):
    """Sizes of the three mesh dimensions, and the position of this rank.

    There are `data` copies of the model. Each has `shard` shards, and `tensor` ranks split the matrices of a shard.
    Consecutive ranks form a tensor group.
    """

    data: int = 1
    shard: int = 1
    tensor: int = 1
    rank: int = 0

    @property
    def size(self) -> int:
        return self.data * self.shard * self.tensor

    @property
    def shares(self) -> int:
        """Number of parts a batch is split into. The ranks of a tensor group read the same part."""
        return self.data * self.shard

    @property
    def share(self) -> int:
        """Index of the part that this rank reads."""
        return self.rank // self.tensor

    def __str__(self) -> str:
        named = zip(("data", "shard", "tensor"), self[:3], strict=True)
        return " x ".join(f"{name} {count}" for name, count in named if count > 1) or "one rank"


def resolve_layout(config: TrainConfig, size: int, rank: int) -> ParallelLayout:
    """Return the layout of `size` ranks as seen by `rank`; raise ConfigError if [distributed] does not fit them."""
    wanted, batch = config.distributed, config.train.batch_size
    each = wanted.shard * wanted.tensor
    layout = ParallelLayout(wanted.data or max(1, size // each), wanted.shard, wanted.tensor, rank)
    there_are = "there is 1" if size == 1 else f"there are {size}"
    if layout.size != size and wanted.data:
        error = (
            f"[distributed] data = {wanted.data} x shard = {wanted.shard} x tensor = {wanted.tensor} is {layout.size} "
            f"ranks, but {there_are}: start {layout.size}, or set data = 0 to derive it"
        )
    elif layout.size != size:
        error = (
            f"[distributed] shard = {wanted.shard} x tensor = {wanted.tensor} is {each} ranks, but {there_are}: "
            f"start a multiple of {each}, or reduce shard or tensor"
        )
    elif batch % layout.shares:
        error = (
            f"[train] batch_size = {batch} counts all ranks, and cannot be split evenly over {layout.shares} "
            f"(data {layout.data} x shard {layout.shard}): make it a multiple of {layout.shares}"
        )
    else:
        return layout
    raise ConfigError([error], "train")
