"""Computes which rank holds which part of a tensor, and which rank writes it. Every rank gets the same result on its own.

A plain tensor is equal on every rank, and one rank writes it. The shards of a DTensor are written by the ranks of one
replica. Writers are chosen so that all ranks write about the same amount.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from holdfast.core.base.errors import RunDirError
from holdfast.core.checkpoints.spread import spread
from holdfast.distributed.dtensor import is_dtensor
from holdfast.runtime.tensors.torch_private import mesh_slices

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

IsPrivate = Callable[[str], bool]


class Chunk(NamedTuple):
    """Holds a box of a tensor, and its data."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: Tensor
    private: bool = False


@torch.no_grad()
def chunks_to_write(
    tensors: Mapping[str, Tensor], is_private: IsPrivate, *, rank: int, size: int, owners: Mapping[str, int]
) -> list[Chunk]:
    """Return what this rank writes, in the given order. Names, shapes and placements must be equal on every rank.

    `owners` are the ranks that write some of the tensors: only they need to have them.
    """
    others = {name: value for name, value in tensors.items() if name not in owners}
    writers = _choose_writers(others, is_private, size)
    writers |= {name: frozenset({owner}) for name, owner in owners.items()}
    chunks = []
    for name, value in tensors.items():
        _check_layout(name, value)
        if is_dtensor(value) and value.numel():
            _check_placement(name, value)
        if name in writers and rank not in writers[name]:
            continue
        chunk = local_chunk(name, value)
        if chunk is not None:
            chunks.append(chunk._replace(private=name not in writers))
    return chunks


@torch.no_grad()
def local_chunk(name: str, value: Tensor) -> Chunk | None:
    """Return this rank's part of a tensor: all of a plain one, the shard of a DTensor, None if it has no shard.
    RunDirError if its placement is not supported."""
    shape = tuple(value.shape)
    if not is_dtensor(value):
        return Chunk(name, shape, (0,) * len(shape), value.detach())
    if value.numel() == 0:
        return Chunk(name, shape, (0,) * len(shape), value.to_local().detach().new_empty(shape))
    _check_placement(name, value)
    if value.device_mesh.get_coordinate() is None:
        return None
    (box,) = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
    local = value.to_local().detach()
    if tuple(box.sizes) != tuple(local.shape):
        raise RunDirError(
            f"{name} is placed as {value.placements} over {tuple(value.device_mesh.shape)}, so its local shard should be "
            f"{tuple(box.sizes)}, but it is {tuple(local.shape)}: shard it evenly, or it cannot be saved"
        )
    return Chunk(name, shape, tuple(box.offsets), local) if local.numel() else None


def _choose_writers(tensors: Mapping[str, Tensor], is_private: IsPrivate, size: int) -> dict[str, frozenset[int]]:
    """Return the ranks that write each tensor that is not private. Greedy: largest first, to the least loaded ranks."""
    shared = [name for name, value in tensors.items() if is_dtensor(value) or not is_private(name)]
    order = sorted(shared, key=lambda name: (-_bytes(tensors[name]), name))
    loads = np.zeros(size, dtype=np.int64)
    writers: dict[str, frozenset[int]] = {}
    # Sharded tensors first: fewer ranks can write them. An empty DTensor has no shards and is written by one rank.
    for name in order:
        if is_dtensor(tensors[name]) and tensors[name].numel():
            replicas = _replicas(name, tensors[name], size)
            chosen = replicas[int(loads[replicas].max(axis=1).argmin())]
            loads[chosen] += _bytes(tensors[name]) // len(chosen)
            writers[name] = frozenset(chosen.tolist())
    plain = spread({name: _bytes(tensors[name]) for name in order if name not in writers}, loads.tolist())
    return writers | {name: frozenset({rank}) for name, rank in plain.items()}


def _replicas(name: str, value: Any, size: int) -> np.ndarray:
    """Return one row for each replica: the ranks that together hold the whole tensor once."""
    ranks = mesh_slices(value.device_mesh)
    if int(ranks.max()) >= size:
        raise RunDirError(
            f"the mesh of {name} has rank {int(ranks.max())}, but the world size is {size}: pass the world's size"
        )
    copies = [0, *(dim for dim, placement in enumerate(value.placements, 1) if placement.is_replicate())]
    count = math.prod(ranks.shape[dim] for dim in copies)
    rows: np.ndarray = np.moveaxis(ranks, copies, range(len(copies))).reshape(count, -1)
    return rows


def _bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


def _check_layout(name: str, value: Tensor) -> None:
    if value.layout is not torch.strided or value.is_nested:
        layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise RunDirError(
            f"{name} is a {layout} tensor, which a checkpoint cannot hold: make it dense, or save its parts"
        )


def _check_placement(name: str, value: DTensor) -> None:
    """Raise unless each shard is one box. A strided shard is one if later mesh dimensions undo its stride."""
    for dim, placement in enumerate(value.placements):
        if placement.is_replicate():
            continue
        factor = getattr(placement, "split_factor", 1)
        later = [
            value.device_mesh.shape[d]
            for d, other in enumerate(value.placements)
            if d > dim and getattr(other, "dim", None) == getattr(placement, "dim", None)
        ]
        known = placement.is_shard() or hasattr(placement, "split_factor")
        if not known or factor not in (1, math.prod(later)):
            raise RunDirError(
                f"{name} is placed as {placement}, so a rank's part is not one box of the tensor: "
                "redistribute it to Shard or Replicate before saving"
            )
