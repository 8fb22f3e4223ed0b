"""All the indices of a checkpoint as one: which tensors there are, and in which files their chunks lie."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.core.base.durable import again, read_file, refused
from holdfast.core.base.errors import RunDirError
from holdfast.core.checkpoints.manifest import Manifest
from holdfast.distributed.checkpoint.index import Entry, Index, bin_name, box, decode, index_name

_LONGEST = 1 << 32
"""bytes of an index: what no run needs, and no machine minds"""


class Place(NamedTuple):
    """A chunk, and the rank whose file holds it."""

    rank: int
    entry: Entry


class Catalogue(NamedTuple):
    """What a checkpoint holds. Every chunk lies within its file, the chunks of a tensor cover it, and none overlaps."""

    folder: Path
    indices: tuple[Index, ...]

    @property
    def world(self) -> int:
        return len(self.indices)

    def shared(self) -> dict[str, list[Place]]:
        """The chunks of every tensor that belongs to the run as a whole."""
        found: dict[str, list[Place]] = {}
        for index in self.indices:
            for entry in index.tensors:
                if not entry.private:
                    found.setdefault(entry.name, []).append(Place(index.rank, entry))
        return found

    def private(self, rank: int) -> dict[str, list[Place]]:
        """The tensors that were a rank's own; none for a rank that was not there."""
        if rank >= self.world:
            return {}
        return {e.name: [Place(rank, e)] for e in self.indices[rank].tensors if e.private}

    def of(self, rank: int) -> dict[str, list[Place]]:
        """Everything that a rank may load."""
        return {**self.shared(), **self.private(rank)}


def read_index(folder: Path, rank: int, manifest: Manifest | None = None) -> Index:
    """One rank's index; where there is a manifest, its checksum must hold."""
    path = folder / index_name(rank)
    try:
        content = read_file(path, _LONGEST)
    except OSError as error:
        raise refused(path, "read", error) from None
    if manifest is not None:
        said = manifest.files.get(path.name)
        if said is None:
            raise RunDirError(
                f"{path} is not in the manifest of its checkpoint: it was added or the manifest was edited"
            )
        if said.bytes != len(content) or said.sum != f"sha256:{hashlib.sha256(content).hexdigest()}":
            raise RunDirError(f"{path} is not what was written: its checksum does not match the manifest's")
    try:
        index = decode(content)
    except RunDirError as error:
        raise RunDirError(f"{path} {error}") from None
    if index.rank != rank:
        raise RunDirError(f"{path} says it is of rank {index.rank}: a file was renamed or edited")
    return index


def read_catalogue(folder: Path, manifest: Manifest | None = None) -> Catalogue:
    """Every index of the checkpoint, each checked, and all checked against each other and the files they speak of."""
    first = read_index(folder, 0, manifest)
    if manifest is not None and manifest.world_size != first.world:
        raise RunDirError(
            f"{folder} was written by {manifest.world_size} ranks, and {index_name(0)} says {first.world}"
        )
    indices = [first]
    for rank in range(1, first.world):
        index = read_index(folder, rank, manifest)
        if index.world != first.world:
            raise RunDirError(
                f"{folder / index_name(rank)} says {index.world} ranks, and that of rank 0 says {first.world}: "
                "the files are of different checkpoints"
            )
        indices.append(index)
    catalogue = Catalogue(folder, tuple(indices))
    _check_lengths(catalogue, manifest)
    _check_tensors(catalogue)
    return catalogue


def metadata_of(places: Mapping[str, list[Place]]) -> Metadata:
    """The same in the words of torch.distributed.checkpoint, whose planners then say which slices are to be read."""
    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, Place] = {}
    for name, chunks in places.items():
        entry = chunks[0].entry
        tensors[name] = TensorStorageMetadata(
            TensorProperties(dtype=entry.torch_dtype),
            torch.Size(entry.shape),
            [ChunkStorageMetadata(torch.Size(p.entry.offset), torch.Size(p.entry.sizes)) for p in chunks],
        )
        storage.update((MetadataIndex(name, p.entry.offset), p) for p in chunks)
    return Metadata(state_dict_metadata=dict(tensors), storage_data=storage)


def _check_lengths(catalogue: Catalogue, manifest: Manifest | None) -> None:
    for index in catalogue.indices:
        path = catalogue.folder / bin_name(index.rank)
        try:
            length = again(os.lstat, path).st_size
        except OSError as error:
            raise refused(path, "read", error) from None
        said = index.bytes
        if manifest is not None:
            if path.name not in manifest.files:
                raise RunDirError(f"{path} is not in the manifest of its checkpoint: the manifest was edited")
            said = manifest.files[path.name].bytes
        if not length == said == index.bytes:
            raise RunDirError(
                f"{path} is {length:,} bytes long, and {min(said, index.bytes):,} were written: it is truncated or damaged"
            )


def _check_tensors(catalogue: Catalogue) -> None:
    shared = catalogue.shared()
    for index in catalogue.indices:
        for entry in index.tensors:
            if entry.private and entry.name in shared:
                raise RunDirError(_wrong(catalogue, entry.name, "is private to one rank and shared by others"))
    for name, places in shared.items():
        first = places[0].entry
        if any((p.entry.dtype, p.entry.shape) != (first.dtype, first.shape) for p in places):
            raise RunDirError(_wrong(catalogue, name, "has another shape or dtype on another rank"))
        twice = _overlap([p.entry for p in places])
        if twice is not None:
            raise RunDirError(_wrong(catalogue, name, f"is there twice at {twice}"))
        if sum(math.prod(p.entry.sizes) for p in places) != math.prod(first.shape):
            raise RunDirError(_wrong(catalogue, name, "is not there whole"))


def _overlap(entries: list[Entry]) -> str | None:
    """Where two boxes overlap, if any do: swept along the dimension that tells most of them apart."""
    if len(entries) < 2:
        return None
    shape = entries[0].shape
    if not shape or 0 in shape:
        return box(entries[1].offset, entries[1].sizes)
    along = max(range(len(shape)), key=lambda d: len({e.offset[d] for e in entries}))
    open_: list[Entry] = []
    for entry in sorted(entries, key=lambda e: e.offset[along]):
        open_ = [e for e in open_ if e.offset[along] + e.sizes[along] > entry.offset[along]]
        if any(_meet(e, entry) for e in open_):
            return box(entry.offset, entry.sizes)
        open_.append(entry)
    return None


def _meet(one: Entry, other: Entry) -> bool:
    """Whether two boxes, neither of them empty, have an element in common."""
    edges = zip(one.offset, one.sizes, other.offset, other.sizes, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in edges)


def _wrong(catalogue: Catalogue, name: str, what: str) -> str:
    return f"{catalogue.folder}: the tensor {name[:80]!r} {what}: an index is damaged or was edited"
