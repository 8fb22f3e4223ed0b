"""The kernel behind `bits`: every word is read once, added up, and its numbers compared with infinity; where tensors are
brought, it is first copied there."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 2048, 8


@triton.jit  # type: ignore[untyped-decorator]
def _largest(word, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The greatest of a word's numbers without their signs, as a whole number: that orders floats."""
    low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
    if LANES == 1:
        return high & 0x7FFFFFFF
    if LANES == 2:
        return tl.maximum(low & 0x7FFFFFFF, high & 0x7FFFFFFF)
    first = tl.maximum(low & 0x7FFF, (low >> 16) & 0x7FFF)
    return tl.maximum(first, tl.maximum(high & 0x7FFF, (high >> 16) & 0x7FFF))


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _look(  # type: ignore[no-untyped-def]
    rows,
    found,
    count,
    ways,
    BRING: tl.constexpr,
    LANES: tl.constexpr,
    INF: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
):
    row = rows + tl.program_id(0).to(tl.int64) * 4
    start, words, tail, place = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    base = start.to(tl.pointer_type(tl.int64))
    way = tl.load(ways + place) if BRING else start
    total = tl.zeros([BLOCK], dtype=tl.int64)
    most = tl.zeros([BLOCK], dtype=tl.int32)
    for turn in range(TURNS):
        at = turn * BLOCK + tl.arange(0, BLOCK)
        if BRING:
            source = (start + way).to(tl.pointer_type(tl.int64))
            tl.store(base + at, tl.load(source + at, mask=at < words, other=0), mask=at < words)
        word = tl.load(base + at, mask=at < words, other=0, volatile=BRING)  # what has arrived, not what was sent
        total += word
        if LANES > 0:
            most = tl.maximum(most, _largest(word, LANES))
    each = tl.arange(0, 8)
    last_bytes = start + words * 8
    ends = last_bytes.to(tl.pointer_type(tl.uint8)) + each
    if BRING:
        left = (last_bytes + way).to(tl.pointer_type(tl.uint8)) + each
        tl.store(ends, tl.load(left, mask=each < tail, other=0), mask=each < tail)
    byte = tl.load(ends, mask=each < tail, other=0, volatile=BRING).to(tl.int64)
    tl.atomic_add(found + place, tl.sum(total) + tl.sum(byte))
    if LANES > 0:
        last = tl.sum(byte << (8 * each).to(tl.int64))
        if tl.maximum(tl.max(most), _largest(last, LANES)) >= INF:
            tl.store(found + count + place, 1)


_KINDS = {
    "32": (2, 0x7F800000),
    "64": (1, 0x7FF00000),
    "bf16": (4, 0x7F80),
    "fp16": (4, 0x7C00),
    "none": (0, 0),
}


def launch(rows: Tensor, found: Tensor, kind: str, piece: int, ways: Tensor | None = None) -> None:
    """Add what the rows' pieces, of so many words at most, hold to `found`: sums in its first row, what is not finite in
    its second. `ways`: how many bytes from each tensor lies what is to be copied into it first."""
    lanes, infinity = _KINDS[kind]
    grid, bring = (rows.shape[0],), ways is not None
    _look[grid](
        *(rows, found, found.shape[1], ways if bring else rows),
        *(bring, lanes, infinity, _BLOCK, piece // _BLOCK),
        num_warps=_WARPS,
    )
