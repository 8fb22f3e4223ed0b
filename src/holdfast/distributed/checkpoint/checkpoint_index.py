"""Combines the indices of all ranks: which tensors a checkpoint holds, and which files hold their chunks."""

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

from holdfast.core.base.durable import read_file, retry_interrupted, run_dir_error
from holdfast.core.base.errors import RunDirError
from holdfast.core.checkpoints.manifest import Manifest
from holdfast.distributed.checkpoint.rank_index import (
    MAX_INDEX_BYTES,
    ChunkRecord,
    RankIndex,
    bin_name,
    decode,
    format_box,
    index_name,
)


class ChunkLocation(NamedTuple):
    """Holds a chunk and the rank whose file holds it."""

    rank: int
    chunk: ChunkRecord


class CheckpointIndex(NamedTuple):
    """Lists what a checkpoint holds. Every chunk is inside its file; the chunks of a tensor cover it without overlap."""

    folder: Path
    ranks: tuple[RankIndex, ...]

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def bytes_on_disk(self) -> int:
        """Return the bytes that the tensors take on disk: few for a file with holes."""
        paths = [self.folder / bin_name(index.rank) for index in self.ranks]
        return sum(retry_interrupted(os.lstat, path).st_blocks * 512 for path in paths)

    def shared(self) -> dict[str, list[ChunkLocation]]:
        """Return the chunks of every tensor that is not private to a rank."""
        chunks: dict[str, list[ChunkLocation]] = {}
        for index in self.ranks:
            for chunk in index.tensors:
                if not chunk.private:
                    chunks.setdefault(chunk.name, []).append(ChunkLocation(index.rank, chunk))
        return chunks

    def loadable(self, rank: int) -> dict[str, list[ChunkLocation]]:
        """Return the chunks of every tensor that a rank may load: the shared ones, and its private ones if it has any."""
        private = self.ranks[rank].tensors if rank < self.world_size else ()
        return {**self.shared(), **{c.name: [ChunkLocation(rank, c)] for c in private if c.private}}


def read_rank_index(folder: Path, rank: int, manifest: Manifest | None = None) -> RankIndex:
    """Return one rank's index. RunDirError if it is invalid, or its checksum differs from a given manifest."""
    path = folder / index_name(rank)
    try:
        content = read_file(path, MAX_INDEX_BYTES)
    except OSError as error:
        raise run_dir_error(path, "read", error) from None
    if manifest is not None:
        expected = manifest.files.get(path.name)
        if expected is None:
            raise RunDirError(f"{path} is not in the manifest: the file was added or the manifest was edited")
        if expected.bytes != len(content) or expected.sum != f"sha256:{hashlib.sha256(content).hexdigest()}":
            raise RunDirError(f"{path} is damaged: its checksum differs from the manifest's; use another checkpoint")
    try:
        index = decode(content)
    except RunDirError as error:
        raise RunDirError(f"{path} {error}") from None
    if index.rank != rank:
        raise RunDirError(f"{path} says it is of rank {index.rank}: a file was renamed or edited")
    return index


def read_checkpoint_index(folder: Path, manifest: Manifest | None = None) -> CheckpointIndex:
    """Return the indices of all ranks, checked each, against each other, and against the length of the files."""
    first = read_rank_index(folder, 0, manifest)
    if manifest is not None and manifest.world_size != first.world:
        raise RunDirError(
            f"{folder} was written by {manifest.world_size} ranks, but {index_name(0)} says {first.world}"
        )
    ranks = [first]
    for rank in range(1, first.world):
        index = read_rank_index(folder, rank, manifest)
        if index.world != first.world:
            raise RunDirError(
                f"{folder / index_name(rank)} says {index.world} ranks, but that of rank 0 says {first.world}: "
                "the files are of different checkpoints"
            )
        ranks.append(index)
    checkpoint = CheckpointIndex(folder, tuple(ranks))
    _check_lengths(checkpoint, manifest)
    _check_tensors(checkpoint)
    return checkpoint


def to_dcp_metadata(chunks: Mapping[str, list[ChunkLocation]]) -> Metadata:
    """Return the chunks as metadata of torch.distributed.checkpoint, whose planners compute the slices to read."""
    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, ChunkLocation] = {}
    for name, locations in chunks.items():
        first = locations[0].chunk
        tensors[name] = TensorStorageMetadata(
            TensorProperties(dtype=first.torch_dtype),
            torch.Size(first.shape),
            [ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.sizes)) for _, c in locations],
        )
        storage.update((MetadataIndex(name, location.chunk.offset), location) for location in locations)
    return Metadata(state_dict_metadata=dict(tensors), storage_data=storage)


def _check_lengths(checkpoint: CheckpointIndex, manifest: Manifest | None) -> None:
    for index in checkpoint.ranks:
        path = checkpoint.folder / bin_name(index.rank)
        try:
            length = retry_interrupted(os.lstat, path).st_size
        except OSError as error:
            raise run_dir_error(path, "read", error) from None
        expected = index.bytes
        if manifest is not None:
            if path.name not in manifest.files:
                raise RunDirError(f"{path} is not in the manifest of its checkpoint: the manifest was edited")
            expected = manifest.files[path.name].bytes
        if not length == expected == index.bytes:
            written = min(expected, index.bytes)
            raise RunDirError(f"{path} has {length:,} bytes, but {written:,} were written: it is truncated or damaged")


def _check_tensors(checkpoint: CheckpointIndex) -> None:
    shared = checkpoint.shared()
    for index in checkpoint.ranks:
        for chunk in index.tensors:
            if chunk.private and chunk.name in shared:
                raise _damaged(checkpoint, chunk.name, "is private to one rank and shared by others")
    for name, locations in shared.items():
        chunks = [location.chunk for location in locations]
        first = chunks[0]
        if any((c.dtype, c.shape) != (first.dtype, first.shape) for c in chunks):
            raise _damaged(checkpoint, name, "differs in shape or dtype between ranks")
        if (overlap := _first_overlap(chunks)) is not None:
            raise _damaged(checkpoint, name, f"is stored twice at {overlap}")
        if sum(math.prod(c.sizes) for c in chunks) != math.prod(first.shape):
            raise _damaged(checkpoint, name, "is incomplete")


def _first_overlap(chunks: list[ChunkRecord]) -> str | None:
    """Return a chunk that overlaps another, or None. Sweep along the dimension with the most different offsets."""
    if len(chunks) < 2:
        return None
    shape = chunks[0].shape
    if not shape or 0 in shape:
        return format_box(chunks[1].offset, chunks[1].sizes)
    dim = max(range(len(shape)), key=lambda d: len({c.offset[d] for c in chunks}))
    open_: list[ChunkRecord] = []
    for chunk in sorted(chunks, key=lambda c: c.offset[dim]):
        open_ = [c for c in open_ if c.offset[dim] + c.sizes[dim] > chunk.offset[dim]]
        if any(_overlap(c, chunk) for c in open_):
            return format_box(chunk.offset, chunk.sizes)
        open_.append(chunk)
    return None


def _overlap(one: ChunkRecord, other: ChunkRecord) -> bool:
    """Return whether two boxes, neither of them empty, share an element."""
    edges = zip(one.offset, one.sizes, other.offset, other.sizes, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in edges)


def _damaged(checkpoint: CheckpointIndex, name: str, what: str) -> RunDirError:
    return RunDirError(f"{checkpoint.folder}: the tensor {name[:80]!r} {what}: an index is damaged or was edited")
