"""Computes which ranks hold the same bits of a tensor. Every rank gets the same result without communication."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from holdfast.core.decide.corruption import Groups, ReplicaClass
from holdfast.distributed.dtensor import is_dtensor
from holdfast.runtime.tensors.torch_private import mesh_slices


class MeshReplicas:
    """Implements Replicas. A plain tensor is equal on every rank. A DTensor is equal on ranks that differ only in their
    position along replicating mesh dimensions."""

    def __init__(self, size: int) -> None:
        self._size = size

    def classes(self, tensors: Mapping[str, Tensor]) -> list[ReplicaClass]:
        """Return the tensors that more than one rank holds, grouped by which do. The class of all ranks is first, and
        always present."""
        all_ranks: Groups = (tuple(range(self._size)),)
        names: dict[Groups, list[str]] = {all_ranks: []}
        for name, value in tensors.items():
            groups = self._groups(value) if is_dtensor(value) else all_ranks
            names.setdefault(groups, []).append(name)
        replicated = [groups for groups in names if groups != all_ranks and any(len(g) > 1 for g in groups)]
        return [ReplicaClass(tuple(names[groups]), groups) for groups in (all_ranks, *sorted(replicated))]

    def _groups(self, value: Any) -> Groups:
        """Partition all ranks into groups that hold the same bits."""
        sharding_dims = [dim for dim, placement in enumerate(value.placements) if not placement.is_replicate()]
        groups: list[tuple[int, ...]] = []
        for ranks in mesh_slices(value.device_mesh):
            shards_first = np.moveaxis(ranks, sharding_dims, range(len(sharding_dims)))
            shards = shards_first.reshape(int(np.prod(shards_first.shape[: len(sharding_dims)])), -1)
            groups += [tuple(sorted(shard)) for shard in shards.tolist()]
        holders = {rank for group in groups for rank in group}
        return tuple(sorted((*groups, *((rank,) for rank in range(self._size) if rank not in holders))))
