"""Writes one rank's share of a checkpoint: rank_00000.bin and rank_00000.json."""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from holdfast.core.base.durable import close, create_file, retry_interrupted, run_dir_error, write_all, write_file
from holdfast.core.base.errors import RunDirError
from holdfast.core.checkpoints.manifest import FileSum
from holdfast.distributed.checkpoint.rank_index import (
    DTYPE_NAMES,
    MAX_INDEX_BYTES,
    ChunkRecord,
    RankIndex,
    align,
    bin_name,
    byte_view,
    check_byte_order,
    encode,
    index_name,
)
from holdfast.distributed.checkpoint.shards import Chunk, IsPrivate, chunks_to_write
from holdfast.distributed.checkpoint.worker_queue import BackgroundCrc32, WorkerQueue

WRITE_BYTES = 32 << 20
"""bytes a write"""
SMALL_BYTES = 1 << 20
"""smaller pieces are joined, so that ten thousand biases do not take ten thousand writes"""
EARLY_SYNC_BYTES = 128 << 20
"""the disk begins to sync after this many bytes, while later ones are handed to the kernel"""


def write_rank(
    folder: Path,
    tensors: Mapping[str, Tensor],
    parts: str,
    *,
    rank: int,
    size: int,
    sums: Mapping[str, int] | Callable[[], Mapping[str, int]],
    is_private: IsPrivate,
    owners: Mapping[str, int] = {},
    wait_for: Callable[[str], None] = lambda name: None,
) -> dict[str, FileSum]:
    """Write this rank's share into the existing `folder`. Return the two files' checksums when both are on disk.

    `tensors` are on the host, DTensors with their local shard. Names, shapes, dtypes, placements and `is_private` must be
    equal on all ranks. So must the values of plain tensors that are not private: one rank writes them for all. A tensor in
    `owners` is on the rank that writes it, and need not be on others.
    `sums[name]` is the checksum of this rank's shard. A callable is called after the tensors are written, so that
    computing checksums may overlap with writing.
    `wait_for(name)` blocks until a tensor is complete; the tensor must not change after that. This way the first tensors
    are written while the last are copied. All torch operators run before the first byte is written.
    RunDirError on any failure; discard the folder then.
    """
    check_byte_order()
    chunks = []
    for chunk in chunks_to_write(tensors, is_private, rank=rank, size=size, owners=owners):
        if not chunk.data.is_contiguous() or chunk.data.is_conj() or chunk.data.is_neg():
            wait_for(chunk.name)  # it is copied now
        chunks.append(chunk._replace(data=_to_contiguous(chunk.name, chunk.data)))
    records = _lay_out(chunks)
    length = records[-1].at + records[-1].bytes if records else 0
    pieces = _pieces(records, [byte_view(chunk.data) for chunk in chunks], wait_for)
    path = folder / bin_name(rank)
    try:
        crc = _write(path, pieces, length)
        checksums = sums() if callable(sums) else sums
        summed = tuple(msgspec.structs.replace(record, sum=checksums.get(record.name)) for record in records)
        parts_sum = zlib.crc32(parts.encode())
        content = encode(
            RankIndex(rank=rank, world=size, bytes=length, tensors=summed, parts=parts, parts_sum=parts_sum)
        )
        path = folder / index_name(rank)
        if len(content) > MAX_INDEX_BYTES:
            raise RunDirError(
                f"{path} would hold {len(content) >> 20} MB of numbers and text, and may hold {MAX_INDEX_BYTES >> 20} MB: "
                "keep large values of registered objects in tensors"
            )
        write_file(path, content)
    except OSError as error:
        raise run_dir_error(path, "written", error) from None
    return {
        bin_name(rank): FileSum(length, str(crc)),
        index_name(rank): FileSum(len(content), f"sha256:{hashlib.sha256(content).hexdigest()}"),
    }


@torch.no_grad()
def _to_contiguous(name: str, value: Tensor) -> Tensor:
    """Return the tensor in row-major order, without a copy if possible. RunDirError if it cannot be written as bytes."""
    if value.device.type != "cpu":
        raise RunDirError(f"{name} is on {value.device}, but only tensors on the host can be written: copy it first")
    if value.dtype not in DTYPE_NAMES:
        raise RunDirError(f"{name} is {value.dtype}, which a checkpoint cannot hold: convert it to another dtype")
    return value.detach().resolve_conj().resolve_neg().contiguous()


def _lay_out(chunks: list[Chunk]) -> list[ChunkRecord]:
    records, at = [], 0
    for chunk in chunks:
        at = align(at)
        records.append(
            ChunkRecord(
                name=chunk.name,
                dtype=DTYPE_NAMES[chunk.data.dtype],
                shape=chunk.shape,
                offset=chunk.offset,
                sizes=tuple(chunk.data.shape),
                at=at,
                bytes=chunk.data.nbytes,
                sum=None,
                private=chunk.private,
            )
        )
        at += chunk.data.nbytes
    return records


def _pieces(
    records: list[ChunkRecord], memory: list[memoryview], wait_for: Callable[[str], None]
) -> Iterator[memoryview]:
    """Yield the file's bytes in order: slices of the tensors' memory, with small tensors and padding joined."""
    joined = bytearray()
    end = 0
    for record, view in zip(records, memory, strict=True):
        wait_for(record.name)
        joined += bytes(record.at - end)
        end = record.at + record.bytes
        if len(view) < SMALL_BYTES:
            joined += view
            if len(joined) < SMALL_BYTES:
                continue
            view = memoryview(b"")
        if joined:
            yield memoryview(joined)
            joined = bytearray()  # a new one: the CRC thread may still read the last
        for start in range(0, len(view), WRITE_BYTES):
            yield view[start : start + WRITE_BYTES]
    if joined:
        yield memoryview(joined)


def _write(path: Path, pieces: Iterator[memoryview], length: int) -> BackgroundCrc32:
    """Write and sync the file. Return its checksum, which another thread computes meanwhile."""
    descriptor = create_file(path)
    try:
        with BackgroundCrc32() as crc, _early_sync(length) as sync_queue:
            done = unsynced = 0
            for piece in pieces:
                crc.add(piece)
                write_all(descriptor, piece)
                done += len(piece)
                unsynced += len(piece)
                if sync_queue is not None and unsynced >= EARLY_SYNC_BYTES:
                    sync_queue.put(descriptor)
                    unsynced = 0
        retry_interrupted(os.fsync, descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            close(descriptor)
        raise
    close(descriptor)
    if done != length:
        raise RunDirError(f"{path} has {done:,} bytes instead of {length:,}: a tensor changed while it was written")
    return crc


def _early_sync(length: int) -> contextlib.AbstractContextManager[WorkerQueue[int] | None]:
    """Return a queue that syncs the descriptors put into it. The kernel alone would leave a gigabyte to the last sync."""
    if length < 2 * EARLY_SYNC_BYTES:
        return contextlib.nullcontext()
    return WorkerQueue(lambda fd: retry_interrupted(os.fdatasync, fd), 64, "holdfast-sync")
