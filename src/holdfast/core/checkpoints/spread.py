"""Spreads tensors that every rank holds over the ranks, so that each keeps or writes about the same amount."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence


def spread(sizes: Mapping[str, int], loads: Sequence[int]) -> dict[str, int]:
    """Return the rank for each name: the largest first, to the rank with the least load. Equal on all ranks for equal input.

    `loads` are the bytes that each rank has already.
    """
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    chosen: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + sizes[name], rank))
        chosen[name] = rank
    return chosen
