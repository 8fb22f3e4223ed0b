"""Bytes of a rank_00000.bin into tensors: the whole file in one pass, with its checksum, or only the slices needed."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.core.base.durable import again, close, open_regular, refused
from holdfast.core.base.errors import RunDirError
from holdfast.distributed.checkpoint.behind import Crc
from holdfast.distributed.checkpoint.index import Entry, Index, bin_name
from holdfast.distributed.checkpoint.memory import raw
from holdfast.runtime.tensors.inspect import checksums

SLICE = 16 << 20
SPARED_SHARE, SPARED_BYTES = 1 / 8, 4 << 20
"""what is not needed of a file is read all the same, for the checksum's sake, up to the larger of these"""


class Wanted(NamedTuple):
    """The box of `lengths` at `offsets` of a chunk, and the tensor of that size that it goes into."""

    entry: Entry
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    into: Tensor

    @property
    def elements(self) -> int:
        return math.prod(self.lengths)

    @property
    def whole(self) -> bool:
        return self.lengths == self.entry.sizes

    @property
    def strides(self) -> tuple[int, ...]:
        """Of the chunk, in elements."""
        sizes = self.entry.sizes
        return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))

    @property
    def span(self) -> tuple[int, int]:
        """The bytes of the file from the first element needed to the last."""
        pairs = list(zip(self.offsets, self.lengths, self.strides, strict=True))
        first = sum(offset * stride for offset, _, stride in pairs)
        last = sum((offset + length - 1) * stride for offset, length, stride in pairs)
        width = self.entry.torch_dtype.itemsize
        return self.entry.at + first * width, self.entry.at + (last + 1) * width

    @property
    def direct(self) -> bool:
        """Whether the file's bytes, as they are, are those of the tensor."""
        start, stop = self.span
        plain = type(self.into) is Tensor and self.into.device.type == "cpu" and self.into.is_contiguous()
        same = self.into.dtype == self.entry.torch_dtype and not self.into.is_conj() and not self.into.is_neg()
        return plain and same and stop - start == self.into.nbytes


def read_wanted(
    folder: Path, index: Index, wants: list[Wanted], said: str | None, *, check: bool = True, full: bool = False
) -> None:
    """Fill every tensor wanted of one rank's file. Where it is read in full, it must have the checksum `said` of it.

    It is read in full where that is asked for, or costs little more; never without a checksum to compare.
    """
    path = folder / bin_name(index.rank)
    wants = sorted((w for w in wants if w.elements), key=lambda w: w.span)
    spared = index.bytes - sum(stop - start for start, stop in (w.span for w in wants))
    full = full or (bool(wants) and spared <= max(SPARED_SHARE * index.bytes, SPARED_BYTES))
    if not wants and not full:
        return
    try:
        descriptor = open_regular(path)
        try:
            source = _Source(path, descriptor, index.bytes)
            if check and said is not None and full:
                _read_all(source, wants, said)
            else:
                for want in wants:
                    _fill(source, want, check)
        finally:
            close(descriptor)
    except OSError as error:
        raise refused(path, "read", error) from None


class _Source:
    """A file that is read; where a checksum is taken of it, every byte goes into that once, in order."""

    def __init__(self, path: Path, descriptor: int, length: int) -> None:
        self.path = path
        self.length = length
        self._descriptor = descriptor
        self._crc: Crc | None = None
        self._summed = 0

    def sum_into(self, crc: Crc) -> None:
        self._crc = crc

    def read(self, into: memoryview, at: int) -> None:
        """Fill `into` from byte `at`."""
        if self._crc is not None and at > self._summed:
            self.skip(at)
        for start in range(0, len(into), SLICE):
            piece = into[start : start + SLICE]
            self._read_piece(piece, at + start)
            if self._crc is not None and at + start == self._summed:
                self._crc.add(piece)
                self._summed += len(piece)

    def skip(self, to: int) -> None:
        """Read on to byte `to` for the checksum alone."""
        while self._summed < to:
            self.read(memoryview(bytearray(min(SLICE, to - self._summed))), self._summed)

    def _read_piece(self, piece: memoryview, at: int) -> None:
        while piece:
            count = again(os.preadv, self._descriptor, [piece], at)
            if count <= 0:
                raise RunDirError(f"{self.path} ends at byte {at:,} of {self.length:,}: it is truncated")
            piece, at = piece[count:], at + count


def _read_all(source: _Source, wants: list[Wanted], said: str) -> None:
    """One pass over the file, its checksum on the way."""
    with Crc() as crc:
        source.sum_into(crc)
        for want in wants:
            _fill(source, want, check=True)
        source.skip(source.length)
    if str(crc) != said:
        raise RunDirError(
            f"{source.path} is not what was written: its checksum is {crc}, the manifest's is {said[:80]}; "
            "take another checkpoint"
        )


@torch.no_grad()
def _fill(source: _Source, want: Wanted, check: bool) -> None:
    start, stop = want.span
    if want.direct:
        memory = raw(want.into)
        source.read(memory, start)
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(want.entry.torch_dtype)
    else:
        scratch = torch.empty(stop - start, dtype=torch.uint8)
        source.read(raw(scratch), start)
        flat = scratch.view(want.entry.torch_dtype)
        want.into.copy_(flat.as_strided(want.lengths, want.strides))
    entry = want.entry
    if check and want.whole and entry.sum is not None and checksums({entry.name: flat})[entry.name] != entry.sum:
        raise RunDirError(
            f"{source.path}: the tensor {entry.name[:80]!r} does not have the bits it had where it lived; "
            "it was damaged on the way to the disk or since: take another checkpoint"
        )
