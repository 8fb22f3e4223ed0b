"""The Triton kernel behind `checksum`: reads every word once, sums it up, and compares its numbers with infinity.

With sources to copy from, it copies each word first.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 2048, 8


@triton.jit  # type: ignore[untyped-decorator]
def _largest_magnitude(word, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the largest number in a word without its sign, as an integer: that preserves the order of floats."""
    low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
    if LANES == 1:
        return high & 0x7FFFFFFF
    if LANES == 2:
        return tl.maximum(low & 0x7FFFFFFF, high & 0x7FFFFFFF)
    first = tl.maximum(low & 0x7FFF, (low >> 16) & 0x7FFF)
    return tl.maximum(first, tl.maximum(high & 0x7FFF, (high >> 16) & 0x7FFF))


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _checksum(  # type: ignore[no-untyped-def]
    rows,
    results,
    count,
    source_offsets,
    COPY: tl.constexpr,
    LANES: tl.constexpr,
    INF: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
):
    row = rows + tl.program_id(0).to(tl.int64) * 4
    start, words, tail, index = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    base = start.to(tl.pointer_type(tl.int64))
    source_offset = tl.load(source_offsets + index) if COPY else start
    total = tl.zeros([BLOCK], dtype=tl.int64)
    largest = tl.zeros([BLOCK], dtype=tl.int32)
    for turn in range(TURNS):
        at = turn * BLOCK + tl.arange(0, BLOCK)
        if COPY:
            source = (start + source_offset).to(tl.pointer_type(tl.int64))
            tl.store(base + at, tl.load(source + at, mask=at < words, other=0), mask=at < words)
        word = tl.load(base + at, mask=at < words, other=0, volatile=COPY)  # the word that arrived, not the one sent
        total += word
        if LANES > 0:
            largest = tl.maximum(largest, _largest_magnitude(word, LANES))
    each = tl.arange(0, 8)
    tail_start = start + words * 8
    target = tail_start.to(tl.pointer_type(tl.uint8)) + each
    if COPY:
        source_tail = (tail_start + source_offset).to(tl.pointer_type(tl.uint8)) + each
        tl.store(target, tl.load(source_tail, mask=each < tail, other=0), mask=each < tail)
    byte = tl.load(target, mask=each < tail, other=0, volatile=COPY).to(tl.int64)
    tl.atomic_add(results + index, tl.sum(total) + tl.sum(byte))
    if LANES > 0:
        last = tl.sum(byte << (8 * each).to(tl.int64))
        if tl.maximum(tl.max(largest), _largest_magnitude(last, LANES)) >= INF:
            tl.store(results + count + index, 1)


_FORMATS = {
    "32": (2, 0x7F800000),
    "64": (1, 0x7FF00000),
    "bf16": (4, 0x7F80),
    "fp16": (4, 0x7C00),
    "none": (0, 0),
}
"""number format -> numbers in a word, and the bits of infinity"""


def launch(rows: Tensor, results: Tensor, fmt: str, piece: int, source_offsets: Tensor | None = None) -> None:
    """Add the checksums of the rows' pieces, of at most `piece` words, to the first row of `results`. Set the second row
    to 1 for tensors that are not finite. `source_offsets` are the bytes from each tensor to its source."""
    lanes, infinity = _FORMATS[fmt]
    grid, copies = (rows.shape[0],), source_offsets is not None
    _checksum[grid](
        *(rows, results, results.shape[1], source_offsets if copies else rows),
        *(copies, lanes, infinity, _BLOCK, piece // _BLOCK),
        num_warps=_WARPS,
    )
