"""Which rank holds what of a tensor, and which rank writes it. Every rank comes to the same answer without asking another.

A plain tensor is the same on every rank: one of them writes it. A DTensor is written by the ranks that hold its shards;
where a mesh dimension replicates it, by one of the replicas. Who it is, is chosen so that all write about as much.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor

from holdfast.core.base.errors import RunDirError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Private = Callable[[str], bool]


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Without importing what takes a second to import: where nobody has, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


class Chunk(NamedTuple):
    """A box of a tensor, and the memory that holds it."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: Tensor
    private: bool = False


@torch.no_grad()
def to_write(tensors: Mapping[str, Tensor], private: Private, *, rank: int, size: int) -> list[Chunk]:
    """What this rank writes, in the order given. The names, shapes and placements must be the same on every rank."""
    writers = _writers(tensors, private, size)
    chunks = []
    for name, value in tensors.items():
        _refuse_strange(name, value)
        if is_dtensor(value) and value.numel():
            _refuse_placement(name, value)
        if name in writers and rank not in writers[name]:
            continue
        chunk = chunk_of(name, value)
        if chunk is not None:
            chunks.append(chunk._replace(private=name not in writers))
    return chunks


@torch.no_grad()
def chunk_of(name: str, value: Tensor) -> Chunk | None:
    """This rank's part of a tensor: all of a plain one; None where it has nothing of a DTensor."""
    shape = tuple(value.shape)
    if not is_dtensor(value):
        return Chunk(name, shape, (0,) * len(shape), value.detach())
    if value.numel() == 0:
        return Chunk(name, shape, (0,) * len(shape), value.to_local().detach().new_empty(shape))
    _refuse_placement(name, value)
    if value.device_mesh.get_coordinate() is None:
        return None
    (place,) = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
    local = value.to_local().detach()
    if tuple(place.sizes) != tuple(local.shape):
        raise RunDirError(
            f"{name} is placed as {value.placements} over {tuple(value.device_mesh.shape)}, which makes a shard of "
            f"{tuple(place.sizes)} here, and the one here is {tuple(local.shape)}: shard it evenly to have it saved"
        )
    return Chunk(name, shape, tuple(place.offsets), local) if local.numel() else None


def _writers(tensors: Mapping[str, Tensor], private: Private, size: int) -> dict[str, frozenset[int]]:
    """The ranks that write each tensor that is not private; greedy, the largest first, onto those with the least."""
    shared = [name for name, value in tensors.items() if is_dtensor(value) or not private(name)]
    order = sorted(shared, key=lambda name: (-_bytes(tensors[name]), name))
    sharded = [name for name in order if _is_sharded(tensors[name])]
    loads = np.zeros(size, dtype=np.int64)
    writers: dict[str, frozenset[int]] = {}
    for name in sharded:  # first: they have the least choice
        replicas = _replicas(name, tensors[name], size)
        chosen = replicas[int(loads[replicas].max(axis=1).argmin())]
        loads[chosen] += _bytes(tensors[name]) // len(chosen)
        writers[name] = frozenset(chosen.tolist())
    heap = [(int(load), rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for name in order:
        if name not in writers:
            load, rank = heap[0]
            heapq.heapreplace(heap, (load + _bytes(tensors[name]), rank))
            writers[name] = frozenset({rank})
    return writers


def _is_sharded(value: Tensor) -> bool:
    """Whether there are shards to write: a DTensor with nothing in it is one empty tensor, written by one rank."""
    return is_dtensor(value) and value.numel() > 0


def _replicas(name: str, value: Any, size: int) -> np.ndarray:
    """One row a replica: the ranks that together hold the whole tensor once."""
    slices = slices_of(value.device_mesh)
    ranks = np.array(value.device_mesh.mesh.tolist())[None] if slices is None else slices
    if int(ranks.max()) >= size:
        raise RunDirError(
            f"{name} lies on rank {int(ranks.max())} of its mesh, and the world has {size}: name the world's size"
        )
    copies = [0, *(dim for dim, placement in enumerate(value.placements, 1) if placement.is_replicate())]
    count = math.prod(ranks.shape[dim] for dim in copies)
    rows: np.ndarray = np.moveaxis(ranks, copies, range(len(copies))).reshape(count, -1)
    return rows


def slices_of(mesh: Any) -> np.ndarray | None:
    """The ranks of a mesh and, where it was sliced out of a larger one, of its siblings, in which each rank sees its own:
    (slices, *mesh.shape), the same on every rank. FSDP2 over tensor parallel leaves what is not parallelised on a slice.

    None, with an older torch, for a slice whose dimensions the larger one does not know by name (some flattened into one).
    """
    layout, everyone = getattr(mesh, "_layout", None), getattr(mesh, "_rank_map", None)
    if layout is not None and everyone is not None:
        return np.array(layout.remap_to_tensor(everyone).tolist())
    root, names = mesh._get_root_mesh(), mesh.mesh_dim_names
    own, ranks = np.array(mesh.mesh.tolist()), np.array(root.mesh.tolist())
    if own.size == ranks.size:
        return own[None]
    known = root.mesh_dim_names or ()
    if not names or not set(names) <= set(known):
        return None
    kept = [known.index(name) for name in names]
    slices = np.moveaxis(ranks, kept, range(ranks.ndim - len(kept), ranks.ndim))
    return slices.reshape(-1, *own.shape)


def _bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


def _refuse_strange(name: str, value: Tensor) -> None:
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise RunDirError(
            f"{name} is a {kind} tensor, which a checkpoint cannot hold: make it dense, or keep its parts"
        )


def _refuse_placement(name: str, value: DTensor) -> None:
    """A shard must be one box of the tensor. A strided one is, where the later mesh dimensions undo its stride."""
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
                f"{name} is placed as {placement}, which is no box of the tensor on each rank: "
                "redistribute it to Shard or Replicate before it is saved"
            )
