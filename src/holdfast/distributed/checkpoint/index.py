"""rank_00000.json: which tensors, or parts of tensors, lie where in rank_00000.bin, and the rest of that rank's state.

The .bin file is nothing but bytes: each chunk little-endian and row by row, beginning at a multiple of 64, zeros between.
An index is checked whole before anything is read or allocated by it: it may have been edited, and it must not be able to
ask for more memory than the file beside it has bytes.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Iterable, Sequence

import msgspec
import torch

from holdfast.core.base.errors import RunDirError

FORMAT = 1
ALIGNMENT = 64
DIMENSIONS = 64
"""more than any tensor torch computes with has"""

# Written out: a name in a file is looked up here and nowhere else.
DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
    "complex128": torch.complex128,
    "complex64": torch.complex64,
    "complex32": torch.complex32,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint64": torch.uint64,
    "uint32": torch.uint32,
    "uint16": torch.uint16,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One chunk: the box of `sizes` at `offset` in the tensor `name` of `shape`, at byte `at` of the .bin file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int
    bytes: int
    sum: int | None = None
    """over the chunk's bits, taken where the tensor lived; None where nobody took one"""
    private: bool = False
    """this rank's own: a tensor of that name on another rank is another tensor"""

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


class Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank wrote."""

    format: int = FORMAT
    rank: int
    world: int
    bytes: int
    """the length of the .bin file"""
    tensors: tuple[Entry, ...]
    parts: str
    """the rest of this rank's state, JSON, as it was given"""
    parts_sum: int | None = None
    """its CRC-32; None in those of an earlier version"""


def bin_name(rank: int) -> str:
    return f"rank_{rank:05d}.bin"


def index_name(rank: int) -> str:
    return f"rank_{rank:05d}.json"


def aligned(at: int) -> int:
    """The first place at or after `at` where a chunk may begin."""
    return -(-at // ALIGNMENT) * ALIGNMENT


def encode(index: Index) -> bytes:
    return json.dumps(msgspec.to_builtins(index), separators=(",", ":")).encode() + b"\n"


def decode(content: bytes) -> Index:
    """The index, with everything in it checked that can be checked alone; RunDirError, without the path, otherwise."""
    check_byte_order()
    try:
        index = msgspec.convert(json.loads(content), Index)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors too
        raise RunDirError(f"is not an index of ours ({_short(error)}): it is damaged or was edited") from None
    if index.format != FORMAT:
        raise RunDirError(f"is of format {index.format}; this version reads format {FORMAT}")
    wrong = _wrong(index)
    if wrong:
        raise RunDirError(f"{wrong}: it is damaged or was edited")
    return index


def check_byte_order() -> None:
    if sys.byteorder != "little":
        raise RunDirError(
            "checkpoints hold little-endian numbers and this machine's are big-endian; use another machine"
        )


def _wrong(index: Index) -> str | None:
    """What in it cannot be, if anything."""
    if not (0 <= index.rank < index.world):
        return f"says rank {index.rank} of {index.world}"
    if index.parts_sum is not None and zlib.crc32(index.parts.encode()) != index.parts_sum:
        return "its parts are not what they were"
    at, seen = 0, set()
    for entry in index.tensors:
        if entry.name in seen:
            return f"names {entry.name[:80]!r} twice"
        seen.add(entry.name)
        wrong = _wrong_entry(entry, aligned(at))
        if wrong:
            return f"says of {entry.name[:80]!r} {wrong}"
        at = entry.at + entry.bytes
    if index.bytes != at:
        return f"says {_number(index.bytes)} bytes where its tensors end at {_number(at)}"
    return None


def _wrong_entry(entry: Entry, at: int) -> str | None:
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        return f"dtype {entry.dtype[:40]!r}, which is none of ours"
    if len(entry.shape) > DIMENSIONS or not (len(entry.shape) == len(entry.offset) == len(entry.sizes)):
        return "shape, offset and sizes that do not go together"
    if any(n < 0 for n in (*entry.shape, *entry.offset, *entry.sizes)):
        return "a negative size or offset"
    if _span(entry.shape) * dtype.itemsize >= 2**63:
        return "a shape that no memory holds"
    if any(o + n > whole for o, n, whole in zip(entry.offset, entry.sizes, entry.shape, strict=True)):
        return "a chunk that reaches out of its shape"
    if math.prod(entry.sizes) == 0 and math.prod(entry.shape) != 0:
        return "a chunk with nothing in it"
    if entry.bytes != math.prod(entry.sizes) * dtype.itemsize:
        return f"{_number(entry.bytes)} bytes, which its size does not make"
    if entry.at != at:
        return f"place {_number(entry.at)} where only {at} can be"
    if entry.private and entry.sizes != entry.shape:
        return "that it is private and a part only"
    if entry.sum is not None and not -(2**63) <= entry.sum < 2**63:
        return "a sum of more than 64 bits"
    return None


def _span(shape: Iterable[int]) -> int:
    """The product of the sizes, empty dimensions counted as one: torch multiplies out strides that way."""
    return math.prod(max(1, n) for n in shape)


def _number(value: int) -> str:
    """A number for a message: one of thousands of digits is not written out (Python would refuse)."""
    return str(value) if abs(value) < 2**64 else "far too many"


def _short(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def box(offset: Sequence[int], sizes: Sequence[int]) -> str:
    """A chunk in words: [0:4, 2:6]."""
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(offset, sizes, strict=True)) + "]"
