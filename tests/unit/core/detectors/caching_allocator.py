"""A model of torch's caching allocator that keeps real segments and blocks, for programs about memory without a GPU.

Requests are rounded to 512 bytes. Small ones (up to 1 MB) come from segments of 2 MB, others below 10 MB from segments of
20 MB, larger ones from a segment of their own, rounded to 2 MB. The smallest free block that fits is used, and split if the
rest is worth it; freed neighbours are merged. If the device is full, unused segments are returned and the request is tried
again (a retry); if that fails too, it raises torch's error with torch's text.
"""

from __future__ import annotations

import bisect
import itertools

from holdfast.core.detectors.memory import MemoryReading

MB = 1 << 20
SMALL, LARGE = MB, 10 * MB


class OutOfMemoryError(RuntimeError):
    """Stands for torch.OutOfMemoryError."""


class Block:
    """A part of a segment; `before` and `after` are its neighbours there."""

    def __init__(self, size: int, pool: str) -> None:
        self.size, self.pool, self.is_free = size, pool, False
        self.before: Block | None = None
        self.after: Block | None = None

    @property
    def is_split(self) -> bool:
        return self.before is not None or self.after is not None


class CachingAllocator:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.allocated = self.reserved = self.peak = self.retries = self.ooms = 0
        self._count = itertools.count()
        self._free: dict[str, list[tuple[int, int, Block]]] = {"small": [], "large": []}
        """free blocks in the order of their sizes"""
        self._keys: dict[Block, tuple[int, int, Block]] = {}

    def allocate(self, wanted: int) -> Block:
        size = -(-max(wanted, 1) // 512) * 512
        pool = "small" if size <= SMALL else "large"
        block = self._take(size, pool) or self._reserve(size, pool)
        rest = block.size - size
        if rest >= 512 if pool == "small" else rest > MB:
            other = Block(rest, pool)
            other.before, other.after, block.after, block.size = block, block.after, other, size
            if other.after is not None:
                other.after.before = other
            self._put(other)
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        return block

    def free(self, block: Block) -> None:
        self.allocated -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self._remove(neighbour)
                first, second = (neighbour, block) if neighbour is block.before else (block, neighbour)
                first.size, first.after = first.size + second.size, second.after
                if second.after is not None:
                    second.after.before = first
                block = first
        self._put(block)

    def _put(self, block: Block) -> None:
        block.is_free = True
        self._keys[block] = key = (block.size, next(self._count), block)
        bisect.insort(self._free[block.pool], key)

    def _remove(self, block: Block) -> None:
        block.is_free = False
        blocks = self._free[block.pool]
        del blocks[bisect.bisect_left(blocks, self._keys.pop(block))]

    def _take(self, size: int, pool: str) -> Block | None:
        blocks = self._free[pool]
        at = bisect.bisect_left(blocks, (size, -1))
        if at == len(blocks):
            return None
        block = blocks[at][2]
        self._remove(block)
        return block

    def _reserve(self, size: int, pool: str) -> Block:
        segment = 2 * MB if pool == "small" else 20 * MB if size < LARGE else -(-size // (2 * MB)) * 2 * MB
        if self.reserved + segment > self.limit:
            self.retries += 1
            for block in [key[2] for keys in self._free.values() for key in keys if not key[2].is_split]:
                self._remove(block)
                self.reserved -= block.size
        if self.reserved + segment > self.limit:
            self.ooms += 1
            raise OutOfMemoryError(self.message(size))
        self.reserved += segment
        return Block(segment, pool)

    def message(self, asked: int) -> str:
        free, unallocated = self.limit - self.reserved, self.reserved - self.allocated
        asked_text, total, free_text, allocated, unused = (
            f"{size / (1 << 30):.4f} GiB" for size in (asked, self.limit, free, self.allocated, unallocated)
        )
        return (
            f"CUDA out of memory. Tried to allocate {asked_text}. GPU 0 has a total capacity of {total} of which "
            f"{free_text} is free. Of the allocated memory {allocated} is allocated by PyTorch, and {unused} is "
            f"reserved by PyTorch but "
            "unallocated."
        )

    def inactive_split(self) -> int:
        return sum(key[0] for keys in self._free.values() for key in keys if key[2].is_split)

    def reading(self, step: int) -> MemoryReading:
        return MemoryReading(
            step, self.allocated, self.reserved, self.peak, self.inactive_split(), self.retries, self.ooms, self.limit
        )
