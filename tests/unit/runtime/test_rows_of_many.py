"""The rows of all ranks, read a column at a time: what follows is what follows rank by rank."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.base.config import Config
from holdfast.core.base.errors import RanksDisagree
from holdfast.core.base.types import Signal
from holdfast.runtime.agree.attribution import group_by_batch
from holdfast.runtime.agree.coordinator import RankCoordinator
from holdfast.runtime.agree.rows import Column, Rows
from marks import examples

LARGE = 2.0**32 - 1
RANK = st.fixed_dictionaries(
    {
        Column.SECONDS: st.floats(0, 10),
        Column.BATCH: st.sampled_from([-1.0, 0.0, 1.0, 2.0, LARGE]),
        Column.SAMPLES: st.sampled_from([-1.0, 0.0, 3.0, 8.0, 8.0]),
        Column.LENGTH: st.sampled_from([-1.0, 128.0, 128.0, 256.0]),
        Column.LOSS_LIMIT: st.sampled_from([math.inf, 2.5, 3.0]),
        Column.GRAD_LIMIT: st.sampled_from([math.inf, 1.0]),
        Column.LOSS: st.floats(allow_nan=True),
    }
)


class Many:
    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size


def table(ranks: list[dict[Column, float]]) -> torch.Tensor:
    found = torch.zeros(len(ranks), len(Column), dtype=torch.float64)
    for n, rank in enumerate(ranks):
        for column, value in rank.items():
            found[n, column] = value
    return found


def over_all(found: torch.Tensor) -> tuple[Signal, Rows]:
    rows = Rows(found.reshape(-1), len(found))
    coordinator = RankCoordinator(cast(Any, Many(len(found))), Config())
    return coordinator.merge_signal(Signal(step=4, loss=1.0), rows), rows


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(st.lists(RANK, min_size=2, max_size=9))
def test_signal_over_all_ranks_is_what_it_is_rank_by_rank(ranks):
    signal, rows = over_all(table(ranks))
    samples = [r[Column.SAMPLES] for r in ranks]
    lengths = {r[Column.LENGTH] for r in ranks}
    limits = [min(r[c] for r in ranks) for c in (Column.LOSS_LIMIT, Column.GRAD_LIMIT)]
    assert signal.samples == (None if min(samples) < 0 else sum(samples[group[0]] for group in group_by_batch(rows)))
    assert signal.length == (lengths.pop() if len(lengths) == 1 and lengths != {-1.0} else None)
    assert signal.seconds == max(r[Column.SECONDS] for r in ranks)
    assert [signal.loss_limit, signal.grad_limit] == [None if limit == math.inf else limit for limit in limits]
    assert (signal.batch is None) == (min(r[Column.BATCH] for r in ranks) < 0)
    losses = torch.tensor([r[Column.LOSS] for r in ranks], dtype=torch.float64)
    assert torch.equal(
        torch.tensor(rows.values(Column.LOSS), dtype=torch.float64).view(torch.int64), losses.view(torch.int64)
    )


def test_fingerprint_of_a_step_is_that_of_all_batches_in_the_order_of_ranks():
    found = torch.zeros(3, len(Column), dtype=torch.float64)
    prints = []
    for batches in ([7, 8, 9], [7, 8, 9], [8, 7, 9], [7, 8, 10]):
        found[:, Column.BATCH] = torch.tensor(batches, dtype=torch.float64)
        prints.append(over_all(found)[0].batch)
    assert prints[0] == prints[1] and len(set(prints)) == 3


def test_rows_are_kept_when_their_memory_serves_another_step():
    found = table([{Column.LOSS: 1.0}, {Column.LOSS: 2.0}])
    rows = Rows(found.view(-1), 2)
    found.fill_(9.0)
    assert rows.values(Column.LOSS) == [1.0, 2.0]


@pytest.mark.parametrize("size", [2, 17, 4096])
def test_the_last_of_many_ranks_is_heard_and_missed(size):
    found = torch.zeros(size, len(Column), dtype=torch.float64)
    calm = Rows(found.view(-1), size)
    calm.check_lockstep()
    assert not calm.has_requests()
    found[-1, Column.HAS_REQUESTS] = 1.0
    assert Rows(found.view(-1), size).has_requests()
    found[-1, Column.STEP] = 5.0
    with pytest.raises(RanksDisagree, match="at steps 0, .*run the same loop") as raised:
        Rows(found.view(-1), size).check_lockstep()
    assert ("..." in str(raised.value)) == (size > 16)
