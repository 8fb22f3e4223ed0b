"""How the ranks of a run share it: `[distributed]`, fitted to the world there is. No torch here."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.base.errors import ConfigError
from holdfast.reference.config import TrainConfig


class Layout(NamedTuple):
    """`data` copies of the model, each in `shard` shards, each shard's matrices cut among `tensor` ranks; and which rank
    this is: neighbours are of one tensor group."""

    data: int = 1
    shard: int = 1
    tensor: int = 1
    rank: int = 0

    @property
    def size(self) -> int:
        return self.data * self.shard * self.tensor

    @property
    def shares(self) -> int:
        """How many parts a batch is dealt out in: the ranks of one tensor group read the same."""
        return self.data * self.shard

    @property
    def share(self) -> int:
        """Which of them is this rank's."""
        return self.rank // self.tensor

    def __str__(self) -> str:
        named = zip(("data", "shard", "tensor"), self[:3], strict=True)
        return " x ".join(f"{name} {count}" for name, count in named if count > 1) or "one rank"


def fit(config: TrainConfig, size: int, rank: int) -> Layout:
    """The layout of `size` ranks, as rank `rank` has it; ConfigError with every number that does not come out even."""
    wanted, train = config.distributed, config.train
    each = wanted.shard * wanted.tensor
    layout = Layout(wanted.data or max(1, size // each), wanted.shard, wanted.tensor, rank)
    errors = []
    if layout.size != size and wanted.data:
        errors.append(
            f"[distributed] data = {wanted.data} x shard = {wanted.shard} x tensor = {wanted.tensor} is {layout.size} "
            f"ranks, and there {_are(size)}: start {layout.size}, or set data = 0, which takes what is left"
        )
    elif layout.size != size:
        errors.append(
            f"[distributed] shard = {wanted.shard} x tensor = {wanted.tensor} is {each} ranks, and there {_are(size)}: "
            f"start a multiple of {each}, or make them smaller"
        )
    elif train.batch_size % layout.shares:
        errors.append(
            f"[train] batch_size = {train.batch_size} is the batch of all ranks together, and cannot be dealt out evenly to "
            f"{layout.shares} (data {layout.data} x shard {layout.shard}): make it a multiple of {layout.shares}"
        )
    if errors:
        raise ConfigError(errors, "train")
    return layout


def _are(size: int) -> str:
    return "is 1" if size == 1 else f"are {size}"
