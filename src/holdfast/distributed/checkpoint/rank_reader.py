"""Reads tensors from a rank_00000.bin: the whole file in one pass with its checksum, or only the slices needed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.core.base.durable import close, open_regular, retry_interrupted, run_dir_error
from holdfast.core.base.errors import RunDirError
from holdfast.distributed.checkpoint.rank_index import ChunkRecord, RankIndex, bin_name, byte_view
from holdfast.distributed.checkpoint.worker_queue import BackgroundCrc32
from holdfast.runtime.tensors.inspect import checksums

READ_BYTES = 16 << 20
"""bytes a read"""
MAX_UNNEEDED_SHARE, MAX_UNNEEDED_BYTES = 1 / 8, 4 << 20
"""a file is read in full, to verify its checksum, if the part not needed is at most the larger of these"""


class SliceRead(NamedTuple):
    """Holds the box of `lengths` at `offsets` in a chunk, and the tensor of that size to read it into."""

    chunk: ChunkRecord
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    destination: Tensor

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of the chunk, in elements."""
        sizes = self.chunk.sizes
        return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))

    @property
    def byte_range(self) -> tuple[int, int]:
        """The bytes of the file from the first element needed to the last."""
        dims = list(zip(self.offsets, self.lengths, self.strides, strict=True))
        first = sum(offset * stride for offset, _, stride in dims)
        last = sum((offset + length - 1) * stride for offset, length, stride in dims)
        width = self.chunk.torch_dtype.itemsize
        return self.chunk.at + first * width, self.chunk.at + (last + 1) * width

    @property
    def is_direct(self) -> bool:
        """Whether the file's bytes can be read straight into the destination's memory."""
        start, stop = self.byte_range
        into = self.destination
        plain = type(into) is Tensor and into.device.type == "cpu" and into.is_contiguous()
        same = into.dtype == self.chunk.torch_dtype and not into.is_conj() and not into.is_neg()
        return plain and same and stop - start == into.nbytes


def read_slices(
    folder: Path,
    index: RankIndex,
    slices: list[SliceRead],
    expected_crc: str | None,
    *,
    check: bool = True,
    full: bool = False,
    advance: Callable[[int], None] | None = None,
) -> None:
    """Read all slices from one rank's file.

    With `full`, or if little else is in it, the file is read in full. RunDirError if it then differs from `expected_crc`.
    """
    path = folder / bin_name(index.rank)
    slices = sorted((s for s in slices if math.prod(s.lengths)), key=lambda s: s.byte_range)
    unneeded = index.bytes - sum(stop - start for start, stop in (s.byte_range for s in slices))
    full = full or (bool(slices) and unneeded <= max(MAX_UNNEEDED_SHARE * index.bytes, MAX_UNNEEDED_BYTES))
    if not slices and not full:
        return
    try:
        descriptor = open_regular(path)
        try:
            source = _RankFile(path, descriptor, index.bytes, advance)
            if check and expected_crc is not None and full:
                _read_all(source, slices, expected_crc)
            else:
                for each in slices:
                    _read_slice(source, each, check)
        finally:
            close(descriptor)
    except OSError as error:
        raise run_dir_error(path, "read", error) from None


class _RankFile:
    """Reads a file. With a CRC attached, adds every byte to it once, in order."""

    def __init__(self, path: Path, descriptor: int, length: int, advance: Callable[[int], None] | None = None) -> None:
        self.path = path
        self._advance = advance
        self.length = length
        self.crc: BackgroundCrc32 | None = None
        self._descriptor = descriptor
        self._summed = 0

    def read(self, into: memoryview, at: int) -> None:
        """Fill `into` from byte `at`. RunDirError if the file ends before."""
        if self.crc is not None and at > self._summed:
            self.sum_up_to(at)
        for start in range(0, len(into), READ_BYTES):
            piece = into[start : start + READ_BYTES]
            self._read_piece(piece, at + start)
            if self.crc is not None and at + start == self._summed:
                self.crc.add(piece)
                self._summed += len(piece)

    def sum_up_to(self, end: int) -> None:
        """Read on to byte `end` for the checksum alone."""
        while self._summed < end:
            self.read(memoryview(bytearray(min(READ_BYTES, end - self._summed))), self._summed)

    def _read_piece(self, piece: memoryview, at: int) -> None:
        while piece:
            count = retry_interrupted(os.preadv, self._descriptor, [piece], at)
            if count <= 0:
                raise RunDirError(f"{self.path} ends at byte {at:,} of {self.length:,}: it is truncated")
            piece, at = piece[count:], at + count
            if self._advance is not None:
                self._advance(count)


def _read_all(source: _RankFile, slices: list[SliceRead], expected_crc: str) -> None:
    """Read the whole file in one pass, and compare its checksum."""
    with BackgroundCrc32() as crc:
        source.crc = crc
        for each in slices:
            _read_slice(source, each, check=True)
        source.sum_up_to(source.length)
    if str(crc) != expected_crc:
        raise RunDirError(
            f"{source.path} is damaged: its checksum is {crc}, but the manifest says {expected_crc[:80]}; "
            "use another checkpoint"
        )


@torch.no_grad()
def _read_slice(source: _RankFile, each: SliceRead, check: bool) -> None:
    """Read one slice; a whole chunk must match the checksum taken before it was written."""
    start, stop = each.byte_range
    chunk = each.chunk
    if each.is_direct:
        memory = byte_view(each.destination)
        source.read(memory, start)
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(chunk.torch_dtype)
    else:
        scratch = torch.empty(stop - start, dtype=torch.uint8)
        source.read(byte_view(scratch), start)
        flat = scratch.view(chunk.torch_dtype)
        each.destination.copy_(flat.as_strided(each.lengths, each.strides))
    if not check or chunk.sum is None or each.lengths != chunk.sizes:
        return
    if checksums({chunk.name: flat})[chunk.name] != chunk.sum:
        raise RunDirError(
            f"{source.path}: the tensor {chunk.name[:80]!r} differs from the checksum taken before it was written: "
            "it was damaged on the way to the disk or since; use another checkpoint"
        )
