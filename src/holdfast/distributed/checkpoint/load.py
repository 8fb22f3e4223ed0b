"""Loads the tensors of a checkpoint, by any number of ranks. Nothing is ever unpickled.

The planners of torch.distributed.checkpoint compute the slices that a rank needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.tensor import DTensor

from holdfast.core.base.errors import RunDirError, UnreadableError
from holdfast.core.checkpoints.manifest import Manifest
from holdfast.distributed.checkpoint.checkpoint_index import (
    CheckpointIndex,
    ChunkLocation,
    read_checkpoint_index,
    read_rank_index,
    to_dcp_metadata,
)
from holdfast.distributed.checkpoint.rank_index import ChunkRecord, bin_name
from holdfast.distributed.checkpoint.rank_reader import SliceRead, read_slices
from holdfast.distributed.checkpoint.shards import local_chunk
from holdfast.runtime.ports.checkpoint_store import TensorSpec
from holdfast.runtime.tensors.sharded import local
from holdfast.runtime.tensors.torch_private import shard_like


def read_parts(folder: Path, rank: int, manifest: Manifest | None = None) -> str:
    """Return the `parts` that the rank gave to `write_rank`. RunDirError if that rank wrote none."""
    return read_rank_index(folder, rank, manifest).parts


def read_tensors(
    folder: Path,
    manifest: Manifest,
    targets: Mapping[str, Tensor] | Callable[[str, tuple[int, ...]], Tensor | None],
    *,
    rank: int,
    size: int,
    check: bool = True,
    check_layout: Callable[[dict[str, TensorSpec], int], None] | None = None,
    is_wanted: Callable[[str], bool] | None = None,
    advance: Callable[[int], None] | None = None,
) -> dict[str, Tensor]:
    """Return every tensor of the checkpoint that this rank needs, on the host, in new memory, in the saved dtype.

    A tensor whose target is a DTensor is returned as a DTensor of the same mesh and placements; only its slices are read.
    All others are returned whole. `targets` may be a function of name and saved shape. Private tensors are this rank's; a
    rank that did not exist when the checkpoint was saved gets none.
    check: indices, and files that are read in full, must match the manifest; whole chunks must match the checksum taken
    before they were written. Rank `n % size` reads the file of rank n in full, so that together the ranks verify every
    byte. Without it only slices are read.
    check_layout: called with what is declared about each tensor, and the bytes that the files have on disk, before
    anything is allocated; it raises if they do not fit.
    is_wanted: whether to return a tensor of this name; all are without it.
    advance: called with the number of bytes of each read.
    """
    if not 0 <= rank < size:
        raise RunDirError(f"rank {rank} of {size} is impossible: ranks count from 0")
    checkpoint = read_checkpoint_index(folder, manifest if check else None)
    chunks = checkpoint.loadable(rank)
    if is_wanted is not None:
        chunks = {name: locations for name, locations in chunks.items() if is_wanted(name)}
    if check_layout is not None:
        layout = {name: TensorSpec(at[0].chunk.shape, at[0].chunk.torch_dtype) for name, at in chunks.items()}
        check_layout(layout, checkpoint.bytes_on_disk())
    find_target = targets if callable(targets) else lambda name, shape: targets.get(name)
    tensors = {n: _allocate(n, c[0].chunk, find_target(n, c[0].chunk.shape)) for n, c in chunks.items()}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, to_dcp_metadata(chunks), is_coordinator=rank == 0)
    full_ranks = range(rank, checkpoint.world_size, size) if check else ()
    plan = planner.create_local_plan()
    _execute(checkpoint, plan, planner, chunks, manifest if check else None, check, full_ranks, advance)
    return tensors


def _allocate(name: str, chunk: ChunkRecord, target: Tensor | None) -> Tensor:
    """Return an empty tensor for what this rank needs: the shard of a DTensor target, else the whole tensor."""
    if not isinstance(target, DTensor):
        return _empty(name, chunk.shape, chunk.torch_dtype)
    if tuple(target.shape) != chunk.shape:
        raise RunDirError(
            f"{name} was saved with shape {list(chunk.shape)} but now has shape {list(target.shape)}: "
            "build the model as it was, or use another checkpoint"
        )
    local_chunk(name, target)  # raises if its placement is not supported
    tensor: Tensor = shard_like(target, _empty(name, tuple(local(target).shape), chunk.torch_dtype))
    return tensor


def _empty(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError:  # too little memory here is no damage there
        nbytes = math.prod(shape) * dtype.itemsize
        raise UnreadableError(f"there is no memory for {name[:80]}, which has {nbytes:,} bytes") from None


def _execute(
    checkpoint: CheckpointIndex,
    plan: LoadPlan,
    planner: LoadPlanner,
    chunks: Mapping[str, list[ChunkLocation]],
    manifest: Manifest | None,
    check: bool,
    full_ranks: Iterable[int],
    advance: Callable[[int], None] | None,
) -> None:
    """Execute a plan, file by file. The files of `full_ranks` are read in full."""
    locations = {(name, at.chunk.offset): at for name, each in chunks.items() for at in each}
    slices: dict[int, list[SliceRead]] = {rank: [] for rank in full_ranks}
    full = set(slices)
    items = []
    for item in plan.items:
        source = item.storage_index
        rank, chunk = locations[source.fqn, tuple(source.offset or ())]
        with torch.no_grad():
            destination = planner.resolve_tensor(item).detach()
        items.append((item, destination))
        each = SliceRead(chunk, tuple(item.storage_offsets), tuple(item.lengths), destination)
        slices.setdefault(rank, []).append(each)
    for rank in sorted(slices):
        crc = None if manifest is None else manifest.files[bin_name(rank)].sum
        index, is_full = checkpoint.ranks[rank], rank in full
        read_slices(checkpoint.folder, index, slices[rank], crc, check=check, full=is_full, advance=advance)
    for item, destination in items:
        planner.commit_tensor(item, destination)
