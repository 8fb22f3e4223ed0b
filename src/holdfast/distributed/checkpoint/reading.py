"""Tensors of a checkpoint read back, by as many ranks as there are now. Nothing is ever unpickled.

Which slices a rank needs is worked out by the planners of torch.distributed.checkpoint; `Reader` is a storage for them:

    torch.distributed.checkpoint.load(state_dict, storage_reader=Reader(folder))
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from holdfast.core.base.errors import RunDirError
from holdfast.core.checkpoints.manifest import Manifest
from holdfast.distributed.checkpoint.catalogue import Catalogue, Place, metadata_of, read_catalogue, read_index
from holdfast.distributed.checkpoint.files import Wanted, read_wanted
from holdfast.distributed.checkpoint.index import bin_name
from holdfast.distributed.checkpoint.shards import chunk_of
from holdfast.runtime.tensors.sharded import local, shard_like


def read_parts(folder: Path, rank: int, manifest: Manifest | None = None) -> str:
    """The rest of a rank's state, as it was given to `write_rank`; RunDirError for a rank that was not there."""
    return read_index(folder, rank, manifest).parts


def world_size(folder: Path, manifest: Manifest | None = None) -> int:
    """How many ranks wrote the checkpoint."""
    return read_index(folder, 0, manifest).world


def metadata(folder: Path, rank: int = 0) -> Metadata:
    """What is in the checkpoint, for planners; of what was each rank's own, the tensors of `rank`."""
    return metadata_of(read_catalogue(folder).of(rank))


def read_tensors(
    folder: Path,
    manifest: Manifest,
    targets: Mapping[str, Tensor] | Callable[[str, tuple[int, ...]], Tensor | None],
    *,
    rank: int,
    size: int,
    check: bool = True,
) -> dict[str, Tensor]:
    """Every tensor of the checkpoint that this rank needs, on the host, in memory of its own.

    A name whose target is a DTensor comes as a DTensor of the same mesh and placements, and only its slices are read. All
    others come whole, whatever `targets` says of them; it may also be a function, asked by name and saved shape. Dtypes are
    as saved. What was each rank's own is this rank's; a rank that was not there when it was saved gets none.
    check: indices must match the manifest, and so must every file that is read in full; every chunk that is read in full
    must have the bits it had where it lived. Each file is read in full by one rank at least (by rank `n % size` for that
    of rank n), so that together, and one rank alone, the ranks compare every byte. Without it only slices are read.
    """
    if not 0 <= rank < size:
        raise RunDirError(f"rank {rank} of {size} cannot be: ranks count from 0")
    catalogue = read_catalogue(folder, manifest if check else None)
    places = catalogue.of(rank)
    target = targets if callable(targets) else lambda name, shape: targets.get(name)
    found = {name: _made(name, c[0], target(name, c[0].entry.shape)) for name, c in places.items()}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(found, metadata_of(places), is_coordinator=rank == 0)
    full = range(rank, catalogue.world, size) if check else ()
    _read(catalogue, planner.create_local_plan(), planner, places, manifest if check else None, check, full)
    return found


class Reader(StorageReader):
    """A checkpoint as storage for torch.distributed.checkpoint.load, for who wants the tensors without the run.

    Of what was each rank's own it offers the tensors of `rank`. With a manifest, checksums are compared as well.
    """

    def __init__(self, folder: str | os.PathLike[str], *, rank: int = 0, manifest: Manifest | None = None) -> None:
        self.folder = Path(folder)
        self.rank = rank
        self.manifest = manifest
        self._catalogue: Catalogue | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id)
        self._catalogue = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return metadata_of(self._read_catalogue().of(self.rank))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: every rank has read the indices."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        catalogue = self._read_catalogue()
        _read(catalogue, plan, planner, catalogue.of(self.rank), self.manifest, True, ())
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()

    def _read_catalogue(self) -> Catalogue:
        if self._catalogue is None:
            self._catalogue = read_catalogue(self.folder, self.manifest)
        return self._catalogue


def _made(name: str, place: Place, target: Tensor | None) -> Tensor:
    """Memory for what this rank needs of a tensor."""
    entry = place.entry
    if not isinstance(target, DTensor):
        return torch.empty(entry.shape, dtype=entry.torch_dtype)
    if tuple(target.shape) != entry.shape:
        raise RunDirError(
            f"{name} was saved with shape {list(entry.shape)} and is {list(target.shape)} now: "
            "make the model as it was, or begin from another checkpoint"
        )
    chunk_of(name, target)  # refuses what cannot be placed
    made: Tensor = shard_like(target, torch.empty(local(target).shape, dtype=entry.torch_dtype))
    return made


def _read(
    catalogue: Catalogue,
    plan: LoadPlan,
    planner: LoadPlanner,
    places: Mapping[str, list[Place]],
    manifest: Manifest | None,
    check: bool,
    full: Iterable[int],
) -> None:
    """Carry out a plan, one file after the other; the files of the ranks in `full` are read to the last byte."""
    at = {(name, place.entry.offset): place for name, chunks in places.items() for place in chunks}
    by_rank: dict[int, list[Wanted]] = {rank: [] for rank in full}
    whole = set(by_rank)
    given = []
    for item in plan.items:
        source = item.storage_index
        place = at[source.fqn, tuple(source.offset or ())]
        with torch.no_grad():
            into = planner.resolve_tensor(item).detach()
        given.append((item, into))
        want = Wanted(place.entry, tuple(item.storage_offsets), tuple(item.lengths), into)
        by_rank.setdefault(place.rank, []).append(want)
    for rank in sorted(by_rank):
        index = catalogue.indices[rank]
        said = None if manifest is None else manifest.files[bin_name(rank)].sum
        read_wanted(catalogue.folder, index, by_rank[rank], said, check=check, full=rank in whole)
    for item, into in given:
        planner.commit_tensor(item, into)
