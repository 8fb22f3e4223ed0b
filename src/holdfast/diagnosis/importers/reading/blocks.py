"""Records by the million: blocks of columns, joined at the end, and thinned out when they would not fit.

Thinning never hides a spike: of every eight records in a row it keeps the ones with the lowest and the highest loss,
the highest gradient norm, and the first whose loss is not finite or left out. The first and the last of all stay too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MOST_ROWS = 4_000_000
MOST_CELLS = 24_000_000
MOST_COLUMNS = 256
BUCKET = 8


@dataclass
class Block:
    """Some consecutive records. A column that is not in `present` is there in every one of them."""

    length: int
    columns: dict[str, Floats] = field(default_factory=dict)
    present: dict[str, Bools] = field(default_factory=dict)

    def there(self, name: str) -> Bools:
        if name in self.present:
            return self.present[name]
        return np.full(self.length, name in self.columns)

    def take(self, keep: Bools) -> Block:
        taken = Block(int(keep.sum()))
        taken.columns = {name: values[keep] for name, values in self.columns.items()}
        taken.present = {name: there[keep] for name, there in self.present.items()}
        return taken


class Rows:
    """All records of a log so far."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.seen = 0
        """records there were"""
        self.kept = 0
        self.columns: set[str] = set()
        self.columns_lost: set[str] = set()

    def add(self, block: Block) -> None:
        for name in list(block.columns):
            if name not in self.columns and len(self.columns) >= MOST_COLUMNS:
                self.columns_lost.add(name)
                del block.columns[name]
                block.present.pop(name, None)
        self.columns |= set(block.columns)
        self.seen += block.length
        self.kept += block.length
        if block.length:
            self.blocks.append(block)
        if self.kept > self.most:
            self.join()
            (whole,) = self.blocks
            while whole.length > self.most // 2:
                whole = whole.take(keepers(whole))
            self.blocks, self.kept = [whole], whole.length

    @property
    def most(self) -> int:
        return max(BUCKET * 8, min(MOST_ROWS, MOST_CELLS // max(1, len(self.columns))))

    def join(self) -> Block:
        """One block of all; the pieces are let go column by column."""
        if len(self.blocks) == 1:
            return self.blocks[0]
        whole = Block(self.kept)
        for name in sorted({name for block in self.blocks for name in block.columns}):
            whole.columns[name] = np.concatenate(
                [
                    block.columns[name] if name in block.columns else np.full(block.length, np.nan)
                    for block in self.blocks
                ]
            )
            if any(name in block.present or name not in block.columns for block in self.blocks):
                whole.present[name] = np.concatenate([block.there(name) for block in self.blocks])
            for block in self.blocks:
                block.columns.pop(name, None)
                block.present.pop(name, None)
        self.blocks = [whole]
        return whole


def keepers(block: Block) -> Bools:
    """Which records to keep of a block when half of them, or a few fewer, have to go."""
    full = block.length // BUCKET * BUCKET
    keep = np.zeros(block.length, dtype=bool)
    keep[full:] = True
    keep[:1] = True
    picked = keep[:full].reshape(-1, BUCKET)
    at = np.arange(len(picked))
    extremes = [("loss", 1), ("loss", -1), ("grad_norm", 1)]
    if "loss" not in block.columns:
        picked[:, 0] = True
        extremes = [(name, sign) for name in list(block.columns)[:2] for sign in (1, -1) if name != "step"][:3]
    for name, sign in extremes:
        if name in block.columns:
            values = sign * block.columns[name][:full].reshape(-1, BUCKET)
            picked[at, np.argmax(np.where(np.isfinite(values), values, -np.inf), axis=1)] = True
    broken = np.zeros(full, dtype=bool)
    if "loss" in block.columns:
        broken |= ~np.isfinite(block.columns["loss"][:full])  # a loss left out counts too: some logs write NaN so
    if "grad_norm" in block.columns:
        broken |= ~np.isfinite(block.columns["grad_norm"][:full]) & block.there("grad_norm")[:full]
    first = broken.reshape(-1, BUCKET)
    picked[at[first.any(axis=1)], np.argmax(first, axis=1)[first.any(axis=1)]] = True
    keep[-1:] = True
    return keep
