"""One rank's share of a checkpoint, written: rank_00000.bin and rank_00000.json."""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
from torch import Tensor

from holdfast.core.base.durable import again, close, refused, write_all, write_file
from holdfast.core.base.errors import RunDirError
from holdfast.core.checkpoints.manifest import FileSum
from holdfast.distributed.checkpoint.behind import Behind, Crc
from holdfast.distributed.checkpoint.index import (
    NAMES,
    Entry,
    Index,
    aligned,
    bin_name,
    check_byte_order,
    encode,
    index_name,
)
from holdfast.distributed.checkpoint.memory import dense, raw
from holdfast.distributed.checkpoint.shards import Chunk, Private, to_write

Progress = Callable[[int, int], None]
"""told the bytes written so far, and of how many"""

SLICE = 32 << 20
SMALL = 1 << 20
"""pieces shorter than this are gathered: a model of ten thousand biases is not ten thousand writes"""
EARLY = 128 << 20
"""after so many bytes the disk is set to work, while the next are handed to the kernel"""


def write_rank(
    folder: Path,
    tensors: Mapping[str, Tensor],
    parts: str,
    *,
    rank: int,
    size: int,
    sums: Mapping[str, int] | Callable[[], Mapping[str, int]],
    private: Private,
    progress: Progress | None = None,
    ready: Callable[[str], None] = lambda name: None,
) -> dict[str, FileSum]:
    """Write this rank's share into `folder`, which exists; both files are whole and on disk when this returns.

    `tensors` are on the host; of a DTensor the local shard is. Their names, shapes, dtypes and placements, and what is
    `private`, must be the same on every rank, and so must the values of plain tensors that are not private: one rank
    writes them for all. `sums[name]` belongs to what this rank has of the tensor: its shard of a DTensor. They may be asked
    for, once the tensors are written: who is still summing goes on meanwhile.
    `ready` waits until a tensor holds what it is to hold, so that the first ones are written while the last are copied; from
    then on nothing may change it until this returns. All torch operators run before the first byte is written.
    RunDirError if anything fails; the folder is then to be thrown away.
    """
    check_byte_order()
    chunks = []
    for chunk in to_write(tensors, private, rank=rank, size=size):
        if not chunk.data.is_contiguous() or chunk.data.is_conj() or chunk.data.is_neg():
            ready(chunk.name)  # it is laid out anew, now
        chunks.append(chunk._replace(data=dense(chunk.name, chunk.data)))
    entries = _lay_out(chunks)
    length = entries[-1].at + entries[-1].bytes if entries else 0
    pieces = _pieces(entries, [raw(chunk.data) for chunk in chunks], ready)
    path = folder / bin_name(rank)
    try:
        crc = _write(path, pieces, length, progress)
        known = sums() if callable(sums) else sums
        summed = tuple(msgspec.structs.replace(entry, sum=known.get(entry.name)) for entry in entries)
        own = zlib.crc32(parts.encode())
        content = encode(Index(rank=rank, world=size, bytes=length, tensors=summed, parts=parts, parts_sum=own))
        path = folder / index_name(rank)
        write_file(path, content)
    except OSError as error:
        raise refused(path, "written", error) from None
    return {
        bin_name(rank): FileSum(length, str(crc)),
        index_name(rank): FileSum(len(content), f"sha256:{hashlib.sha256(content).hexdigest()}"),
    }


def _lay_out(chunks: list[Chunk]) -> list[Entry]:
    entries, at = [], 0
    for chunk in chunks:
        at = aligned(at)
        entries.append(
            Entry(
                name=chunk.name,
                dtype=NAMES[chunk.data.dtype],
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
    return entries


def _pieces(entries: list[Entry], memory: list[memoryview], ready: Callable[[str], None]) -> Iterator[memoryview]:
    """The file from its first byte to its last: slices of the tensors' own memory, small ones and padding gathered."""
    gathered = bytearray()
    end = 0
    for entry, view in zip(entries, memory, strict=True):
        ready(entry.name)
        gathered += bytes(entry.at - end)
        end = entry.at + entry.bytes
        if len(view) < SMALL:
            gathered += view
            if len(gathered) < SMALL:
                continue
            view = memoryview(b"")
        if gathered:
            yield memoryview(gathered)
            gathered = bytearray()  # a new one: the checksum may still be reading the last
        for start in range(0, len(view), SLICE):
            yield view[start : start + SLICE]
    if gathered:
        yield memoryview(gathered)


def _write(path: Path, pieces: Iterator[memoryview], length: int, progress: Progress | None) -> Crc:
    """Write all of it and sync it. The checksum is taken meanwhile, on another core where there is one."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = again(os.open, path, flags, 0o644)
    try:
        with Crc() as crc, _early_sync(length) as synced:
            done = unsynced = 0
            for piece in pieces:
                crc.add(piece)
                write_all(descriptor, piece)
                done += len(piece)
                unsynced += len(piece)
                if synced is not None and unsynced >= EARLY:
                    synced.put(descriptor)
                    unsynced = 0
                if progress is not None:
                    progress(done, length)
        again(os.fsync, descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            close(descriptor)
        raise
    close(descriptor)
    if done != length:
        raise RunDirError(
            f"{path} came out {done:,} bytes long instead of {length:,}: a tensor changed while it was written"
        )
    return crc


def _early_sync(length: int) -> contextlib.AbstractContextManager[Behind[int] | None]:
    """What keeps the disk busy from the start: the kernel by itself lets a gigabyte pile up until the last sync."""
    if length < 2 * EARLY:
        return contextlib.nullcontext()
    return Behind(lambda fd: again(os.fdatasync, fd), 64, "holdfast-sync")
