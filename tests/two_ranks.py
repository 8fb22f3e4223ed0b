"""Ranks of a run of two, in one process."""

from __future__ import annotations

from typing import Any

from holdfast.runtime.ports.ranks import SingleRank


class TwoRanks(SingleRank):
    """The first of two ranks; the other has the same values."""

    size = 2

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, value]
