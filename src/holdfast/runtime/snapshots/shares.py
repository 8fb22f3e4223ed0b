"""Which rank keeps which tensors of a snapshot, if ranks that hold equal tensors keep a share each.

A plain tensor is equal on every rank, as for a checkpoint on disk. Sharded tensors, tensors that are known to differ,
complex ones and single numbers are kept by every rank. Each rank computes the same shares from names and sizes alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.core.checkpoints.spread import spread
from holdfast.runtime.ports.checkpoint_store import TensorSpec
from holdfast.runtime.ports.ranks import Ranks
from holdfast.runtime.snapshots.layout import SnapshotLayout
from holdfast.runtime.state.run_state import RunState

_HOST = torch.device("cpu")


class Share(NamedTuple):
    """What one rank keeps of a snapshot."""

    owners: dict[str, int]
    """the rank that keeps each tensor that one rank keeps for all"""
    elsewhere: dict[str, TensorSpec]
    """those of other ranks"""

    def split(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors that this rank keeps, and those that others keep."""
        kept = {name: value for name, value in tensors.items() if name not in self.elsewhere}
        return kept, {name: tensors[name] for name in self.elsewhere}

    @property
    def nbytes_elsewhere(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.elsewhere.values())


class Shares:
    """Computes this rank's share. `is_on` is set by the snapshot manager, to the same value on every rank."""

    def __init__(self, state: RunState, ranks: Ranks, *, is_possible: bool) -> None:
        self._state, self._ranks = state, ranks
        self._is_possible = is_possible and ranks.size > 1
        self.is_on = False
        self._whole: SnapshotLayout | None = None
        """the layout of all tensors that `_share` was computed for"""
        self._rank_specific: set[str] = set()
        self._share = Share({}, {})

    def of(self, tensors: Mapping[str, Tensor]) -> Share | None:
        """Return this rank's share of a snapshot of these tensors; None: each rank keeps all of it."""
        return self._compute(tensors)[0] if self.is_on else None

    def sizes(self, tensors: Mapping[str, Tensor], layout: SnapshotLayout) -> tuple[int, int]:
        """Return the bytes of a whole snapshot, and of this rank's share; 0 if there is none. `layout`: as kept now."""
        if not self._is_possible:
            return layout.nbytes, 0
        share, whole = self._compute(tensors)
        return whole.nbytes, SnapshotLayout(share.split(tensors)[0], _HOST).nbytes if share.owners else 0

    def _compute(self, tensors: Mapping[str, Tensor]) -> tuple[Share, SnapshotLayout]:
        known = self._whole
        if known is not None and known.fits(tensors, _HOST) and self._rank_specific == self._state.rank_specific:
            return self._share, known
        whole, sharded = SnapshotLayout(tensors, _HOST), self._state.sharded_tensors()
        unpackable = {whole.names[i] for i in whole.unpackable}
        owners = spread(
            {
                name: value.nbytes
                for name, value in tensors.items()
                if value.dim() and not value.is_complex() and name not in sharded and name not in unpackable
                if not self._state.is_rank_specific(name)
            },
            [0] * self._ranks.size,
        )
        elsewhere = {
            name: TensorSpec(tuple(value.shape), value.dtype)
            for name, value in tensors.items()
            if owners.get(name, self._ranks.rank) != self._ranks.rank
        }
        self._whole, self._rank_specific = whole, set(self._state.rank_specific)
        self._share = Share(owners, elsewhere)
        return self._share, whole
