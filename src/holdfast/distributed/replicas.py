"""Which ranks hold the same bits of a tensor. Every rank comes to the same answer without asking another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from holdfast.core.decide.corruption import Class, Groups
from holdfast.distributed.checkpoint.shards import is_dtensor, slices_of


class MeshReplicas:
    """A plain tensor is the same on every rank; a DTensor, where the mesh dimensions that do not replicate it agree."""

    def __init__(self, size: int) -> None:
        self._size = size

    def classes(self, tensors: Mapping[str, Tensor]) -> list[Class]:
        """The tensors that somebody else holds too, by who does. What all ranks hold comes first, and is always there."""
        everyone: Groups = (tuple(range(self._size)),)
        names: dict[Groups, list[str]] = {everyone: []}
        for name, value in tensors.items():
            groups = self._groups(value) if is_dtensor(value) else everyone
            names.setdefault(groups, []).append(name)
        shared = [groups for groups in names if groups != everyone and any(len(g) > 1 for g in groups)]
        return [Class(tuple(names[groups]), groups) for groups in (everyone, *sorted(shared))]

    def _groups(self, value: Any) -> Groups:
        apart = [dim for dim, placement in enumerate(value.placements) if not placement.is_replicate()]
        found: list[tuple[int, ...]] = []
        slices = slices_of(value.device_mesh)
        for ranks in () if slices is None else slices:
            together = np.moveaxis(ranks, apart, range(len(apart)))
            shards = together.reshape(int(np.prod(together.shape[: len(apart)])), -1)
            found += [tuple(sorted(shard)) for shard in shards.tolist()]
        return tuple(sorted((*found, *self._alone(found))))

    def _alone(self, found: Iterable[tuple[int, ...]]) -> list[tuple[int]]:
        held = {rank for group in found for rank in group}
        return [(rank,) for rank in range(self._size) if rank not in held]
