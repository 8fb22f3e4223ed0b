"""Who brought it, from the rows of all ranks and what they say of their data."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from holdfast.core.base.types import Flag
from holdfast.runtime.agree.attribution import find_origin
from holdfast.runtime.agree.rows import Column, Rows

NAN, INF = math.nan, math.inf


def rows(**columns: list[float]) -> Rows:
    size = len(next(iter(columns.values())))
    table = torch.zeros(size, len(Column), dtype=torch.float64)
    table[:, Column.WEIGHT] = 1.0
    table[:, Column.BATCH] = torch.arange(size)
    for name, values in columns.items():
        table[:, Column[name]] = torch.tensor(values, dtype=torch.float64)
    return Rows(table.reshape(-1), size)


def said(size: int, broken: dict[int, list[int]] | None = None) -> list[dict[str, Any]]:
    return [
        {
            "host": f"node{r}",
            "data": [[0, 8 * r, 8 * r + 8]],
            "micro_batch": None,
            "samples": [r],
            "nonfinite_samples": (broken or {}).get(r, []),
        }
        for r in range(size)
    ]


@pytest.mark.parametrize(
    ("flags", "columns", "broken", "ranks", "by"),
    [
        (Flag.LOSS_NONFINITE, {"LOSS": [1.0, NAN, 1.1]}, {}, [1], "loss"),
        (Flag.LOSS_NONFINITE, {"LOSS": [INF, 1.0, NAN]}, {}, [0, 2], "loss"),
        (Flag.LOSS_NONFINITE, {"LOSS": [NAN, 1.0], "WEIGHT": [0.0, 1.0]}, {0: [7]}, [0], "data"),
        (Flag.GRAD_NONFINITE, {"LOSS": [1.0, 1.0, 1.0], "LOCAL_GRAD_NORM": [0.2, 0.3, NAN]}, {}, [2], "gradient"),
        (Flag.GRAD_NONFINITE, {"LOSS": [1.0, 1.0], "LOCAL_GRAD_NORM": [NAN, NAN]}, {1: [4]}, [1], "data"),
        (Flag.GRAD_NONFINITE, {"LOSS": [1.0, 1.0, 1.0], "NORM": [0.5, INF, 0.5]}, {}, [1], "gradient"),
        (Flag.LOSS_HIGH, {"LOSS": [1.0, 40.0, 1.2, 0.9]}, {}, [1], "loss"),
        (Flag.LOSS_HIGH, {"LOSS": [1.0, 2.6]}, {}, [1], "loss"),  # over the limit of 2, the other is not
        (Flag.LOSS_HIGH, {"LOSS": [9.0, 9.1, 8.9]}, {}, [], ""),
        (Flag.GRAD_HIGH, {"LOSS": [1.0, 1.0, 1.0], "LOCAL_GRAD_NORM": [1e6, 0.2, 0.3]}, {}, [0], "gradient"),
        (Flag.GRAD_HIGH, {"LOSS": [1.0, 1.0], "LOCAL_GRAD_NORM": [5.0, 5.0]}, {}, [], ""),
        (Flag.LOSS_HIGH, {"LOSS": [1.0, 1.0, 50.0, 50.0], "BATCH": [3, 3, 4, 4]}, {}, [2, 3], "loss"),
        (Flag.LOSS_HIGH, {"LOSS": [50.0, 50.0], "BATCH": [3, 3]}, {}, [0, 1], "all ranks read the same data"),
        (Flag.LOSS_NONFINITE, {"LOSS": [1.0, NAN], "BATCH": [3, 3]}, {}, [1], "loss"),
    ],
)
def test_rank_is_named_by_what_it_measured_itself(flags, columns, broken, ranks, by):
    table = rows(**columns)
    found = find_origin(table, said(table.size, broken), int(flags), loss_limit=2.0)
    assert (found.ranks, found.by) == (ranks, by)
    assert [s["rank"] for s in found.evidence["suspects"]] == ranks
    assert found.samples == sorted(i for ids in broken.values() for i in ids)


def test_where_nothing_tells_ranks_apart_it_says_so():
    found = find_origin(rows(LOSS=[9.0, 9.0]), said(2), int(Flag.LOSS_HIGH), loss_limit=2.0)
    assert found.evidence["by"] == "nothing tells the ranks apart" and found.evidence["losses"] == [9.0, 9.0]
