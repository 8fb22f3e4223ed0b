"""Encodes and validates rank_00000.json, which lists the tensor chunks in rank_00000.bin and holds the rest of the state.

The .bin file holds raw bytes: each chunk is little-endian, row-major, starts at a multiple of 64, with zeros in between.
An index may have been edited. It is validated completely before anything is read or allocated, so that it cannot request
more memory than the .bin file has bytes.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from holdfast.core.base.errors import RunDirError

FORMAT = 1
ALIGNMENT = 64
MAX_DIMENSIONS = 64
MAX_INDEX_BYTES = 64 << 20
"""a larger file is neither written nor read: decoding takes several times its size"""
"""torch's own limit"""

# A dtype name from a file is looked up here, never in torch.
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz,
        torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex128, torch.complex64, torch.complex32,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
    )
}  # fmt: skip
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


class ChunkRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes one chunk: the box of `sizes` at `offset` in tensor `name` of `shape`, at byte `at` of the .bin file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int
    bytes: int
    sum: int | None = None
    """checksum of the chunk's bits, taken on the device that held the tensor; None if not taken"""
    private: bool = False
    """belongs to this rank alone: the tensor of that name on another rank is a different one"""

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


class RankIndex(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lists what one rank wrote."""

    format: int = FORMAT
    rank: int
    world: int
    bytes: int
    """the length of the .bin file"""
    tensors: tuple[ChunkRecord, ...]
    parts: str
    """the rest of this rank's state, as JSON"""
    parts_sum: int
    """CRC-32 of `parts`"""


def bin_name(rank: int) -> str:
    return f"rank_{rank:05d}.bin"


def index_name(rank: int) -> str:
    return f"rank_{rank:05d}.json"


@torch.no_grad()
def byte_view(value: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor. The view is writable and keeps the tensor's memory alive."""
    flat = value.detach().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(bytearray())


def align(at: int) -> int:
    """Return the first offset at or after `at` where a chunk may start."""
    return -(-at // ALIGNMENT) * ALIGNMENT


def encode(index: RankIndex) -> bytes:
    return json.dumps(msgspec.to_builtins(index), separators=(",", ":")).encode() + b"\n"


def decode(content: bytes) -> RankIndex:
    """Return the validated index. RunDirError, with a message that lacks the path, if it is invalid."""
    check_byte_order()
    try:
        index = msgspec.convert(json.loads(content), RankIndex)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors too
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
        raise RunDirError(f"is not a checkpoint index ({reason}): it is damaged or was edited") from None
    if index.format != FORMAT:
        raise RunDirError(f"has format {index.format}, but this version reads format {FORMAT}")
    if problem := _problem(index):
        raise RunDirError(f"{problem}: it is damaged or was edited")
    return index


def check_byte_order() -> None:
    if sys.byteorder != "little":
        raise RunDirError("checkpoints hold little-endian numbers, but this machine is big-endian: use another machine")


def _problem(index: RankIndex) -> str | None:
    """Return what is inconsistent in the index, or None."""
    if not (0 <= index.rank < index.world):
        return f"says rank {index.rank} of {index.world}"
    if zlib.crc32(index.parts.encode()) != index.parts_sum:
        return "has parts that do not match their checksum"
    at, seen = 0, set()
    for chunk in index.tensors:
        if chunk.name in seen:
            return f"lists {chunk.name[:80]!r} twice"
        seen.add(chunk.name)
        if problem := _chunk_problem(chunk, align(at)):
            return f"lists {chunk.name[:80]!r} with {problem}"
        at = chunk.at + chunk.bytes
    if index.bytes != at:
        return f"says {_number(index.bytes)} bytes, but its tensors end at {_number(at)}"
    return None


def _chunk_problem(chunk: ChunkRecord, at: int) -> str | None:
    dtype = DTYPES.get(chunk.dtype)
    if dtype is None:
        return f"the unknown dtype {chunk.dtype[:40]!r}"
    if len(chunk.shape) > MAX_DIMENSIONS or not (len(chunk.shape) == len(chunk.offset) == len(chunk.sizes)):
        return "too many dimensions, or shape, offset and sizes of different lengths"
    if any(n < 0 for n in (*chunk.shape, *chunk.offset, *chunk.sizes)):
        return "a negative size or offset"
    # torch multiplies strides out with empty dimensions counted as one
    if math.prod(max(1, n) for n in chunk.shape) * dtype.itemsize >= 2**63:
        return "a shape too large for memory"
    if any(o + n > whole for o, n, whole in zip(chunk.offset, chunk.sizes, chunk.shape, strict=True)):
        return "a chunk that exceeds its shape"
    if math.prod(chunk.sizes) == 0 and math.prod(chunk.shape) != 0:
        return "an empty chunk"
    if chunk.bytes != math.prod(chunk.sizes) * dtype.itemsize:
        return f"{_number(chunk.bytes)} bytes, which do not match its sizes"
    if chunk.at != at:
        return f"offset {_number(chunk.at)} in the file instead of {at}"
    if chunk.private and chunk.sizes != chunk.shape:
        return "only a part of it, although it is private"
    if chunk.sum is not None and not -(2**63) <= chunk.sum < 2**63:
        return "a checksum of more than 64 bits"
    return None


def _number(value: int) -> str:
    """Format a number for a message. Python refuses to print one with thousands of digits."""
    return str(value) if abs(value) < 2**64 else "far too many"


def format_box(offset: Sequence[int], sizes: Sequence[int]) -> str:
    """Return the box as slices: [0:4, 2:6]."""
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(offset, sizes, strict=True)) + "]"
