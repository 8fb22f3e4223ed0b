"""Stores millions of records as columns, and thins them out when they would not fit in memory.

Thinning never hides a spike. Of every eight consecutive records it keeps the lowest and the highest loss, the highest
gradient norm, and the first loss that is missing or not finite. It also keeps the first and the last record of the log.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MAX_ROWS = 4_000_000
MAX_CELLS = 24_000_000
MAX_COLUMNS = 256
BUCKET = 8


@dataclass
class ColumnBlock:
    """Holds consecutive records. A column without an entry in `present` has a value in every record."""

    length: int
    columns: dict[str, Floats] = field(default_factory=dict)
    present: dict[str, Bools] = field(default_factory=dict)

    def is_present(self, name: str) -> Bools:
        """Return for each record whether it has a value in this column."""
        return self.present[name] if name in self.present else np.full(self.length, name in self.columns)


class RecordStore:
    """Holds all records read so far, in blocks. Thins them out above the row limit."""

    def __init__(self) -> None:
        self.blocks: list[ColumnBlock] = []
        self.added = 0
        """records added, including those thinned out since"""
        self.kept = 0
        self.columns: set[str] = set()
        self.dropped_columns: set[str] = set()

    def add(self, block: ColumnBlock) -> None:
        for name in list(block.columns):
            if name not in self.columns and len(self.columns) >= MAX_COLUMNS:
                self.dropped_columns.add(name)
                del block.columns[name]
                block.present.pop(name, None)
        self.columns |= set(block.columns)
        self.added += block.length
        self.kept += block.length
        if block.length:
            self.blocks.append(block)
        max_rows = max(BUCKET * 8, min(MAX_ROWS, MAX_CELLS // max(1, len(self.columns))))
        if self.kept > max_rows:
            merged = self.merge()
            while merged.length > max_rows // 2:
                merged = _thin(merged)
            self.blocks, self.kept = [merged], merged.length

    def merge(self) -> ColumnBlock:
        """Merge all blocks into one and return it. Frees each column of the parts once it is copied, to limit memory."""
        if len(self.blocks) == 1:
            return self.blocks[0]
        merged = ColumnBlock(self.kept)
        for name in sorted({name for block in self.blocks for name in block.columns}):
            if any(name in block.present or name not in block.columns for block in self.blocks):
                merged.present[name] = np.concatenate([block.is_present(name) for block in self.blocks])
            parts = [block.columns.pop(name, None) for block in self.blocks]
            lengths = [block.length for block in self.blocks]
            merged.columns[name] = np.concatenate(
                [np.full(n, np.nan) if part is None else part for part, n in zip(parts, lengths, strict=True)]
            )
            for block in self.blocks:
                block.present.pop(name, None)
        self.blocks = [merged]
        return merged


def _thin(block: ColumnBlock) -> ColumnBlock:
    """Return at most about half of the records of a block: the extremes of each bucket, and the ends."""
    full = block.length // BUCKET * BUCKET
    keep = np.zeros(block.length, dtype=bool)
    keep[full:] = True
    keep[:1] = keep[-1:] = True
    buckets = keep[:full].reshape(-1, BUCKET)
    bucket_index = np.arange(len(buckets))
    extremes = [("loss", 1), ("loss", -1), ("grad_norm", 1)]
    if "loss" not in block.columns:
        buckets[:, 0] = True
        extremes = [(name, sign) for name in list(block.columns)[:2] for sign in (1, -1) if name != "step"][:3]
    for name, sign in extremes:
        if name in block.columns:
            values = sign * block.columns[name][:full].reshape(-1, BUCKET)
            buckets[bucket_index, np.argmax(np.where(np.isfinite(values), values, -np.inf), axis=1)] = True
    nonfinite = np.zeros(full, dtype=bool)
    if "loss" in block.columns:
        nonfinite |= ~np.isfinite(block.columns["loss"][:full])  # also a missing loss: some logs write NaN that way
    if "grad_norm" in block.columns:
        nonfinite |= ~np.isfinite(block.columns["grad_norm"][:full]) & block.is_present("grad_norm")[:full]
    nonfinite_buckets = nonfinite.reshape(-1, BUCKET)
    affected = nonfinite_buckets.any(axis=1)
    buckets[bucket_index[affected], np.argmax(nonfinite_buckets, axis=1)[affected]] = True
    return ColumnBlock(
        int(keep.sum()),
        {name: values[keep] for name, values in block.columns.items()},
        {name: present[keep] for name, present in block.present.items()},
    )
