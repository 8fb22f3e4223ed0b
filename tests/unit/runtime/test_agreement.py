"""What follows from the rows of all ranks: the same on each, and never spoilt by one of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.base.errors import RanksDisagree
from holdfast.core.decide.engine import Limits
from holdfast.runtime.agree.rows import AgreedStep, Column, HostFields, LocalMeasurements, Rows, agree
from holdfast.runtime.step.pipeline import agree_alone
from holdfast.runtime.tensors.norms import Norm
from marks import examples


class Others:
    """A rank whose others bring rows that are given."""

    def __init__(self, rows: list[torch.Tensor], rank: int = 0) -> None:
        self.rank, self.size = rank, len(rows) + 1
        self._others = rows

    def supports_device(self, device: torch.device) -> bool:
        return True

    def all_gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        self.row = row
        rows = [*self._others]
        rows.insert(self.rank, row)
        return torch.stack(rows)

    def all_gather_object(self, value: Any) -> list[Any]:
        raise AssertionError("a healthy step needs no second round")

    broadcast_object = all_gather_object


def host(weight: float = 1.0, limits: Limits = Limits(None, None), **changed: Any) -> HostFields:
    return HostFields(4, 1, 0.1, 7, 8, None, weight, False, limits)._replace(**changed)


def measured(loss: float, norm: float = 1.0, **changed: Any) -> LocalMeasurements:
    value = torch.tensor(loss, dtype=torch.float32)
    whole = Norm(torch.tensor(norm, dtype=torch.float32))
    return LocalMeasurements(value, whole, None, (), None, None, None, None)._replace(**changed)


def row(h: HostFields, m: LocalMeasurements) -> torch.Tensor:
    others = Others([])
    others.size = 2  # only to have the row made
    agree(others, h, m)
    return others.row


def together(*ranks: tuple[HostFields, LocalMeasurements], me: int = 0) -> AgreedStep:
    rows = [row(h, m) for h, m in ranks]
    mine = rows.pop(me)
    del mine
    return agree(Others(rows, me), *ranks[me])


def test_loss_is_the_mean_over_all_ranks_by_weight():
    found = together((host(3.0), measured(2.0)), (host(1.0), measured(6.0)))
    assert float(found.loss) == 3.0
    assert float(found.total_weight) == 4.0


def test_times_of_the_phases_arrive_rank_by_rank_and_a_row_is_as_long_as_documented():
    slow, fast = (0.1, 0.2, 0.3, 0.4), (0.1, 0.1, 0.3, 0.5)
    found = together((host(phases=slow), measured(1.0)), (host(phases=fast), measured(1.0)))
    assert Rows(found.extra, 2).phases().T.tolist() == [list(slow), list(fast)]
    docs = Path(__file__).parents[3] / "docs"
    for page in ("ranks.md", "performance.md"):
        assert f"row of {row(host(), measured(1.0)).nbytes} bytes" in (docs / page).read_text()


def test_rank_that_counts_nothing_does_not_spoil_the_mean():
    assert float(together((host(0.0), measured(math.nan)), (host(2.0), measured(5.0))).loss) == 5.0
    assert math.isnan(float(together((host(0.0), measured(1.0)), (host(0.0), measured(1.0))).loss))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_loss_that_is_not_finite_makes_the_step_so_and_stays_in_its_row(bad):
    found = together((host(), measured(1.0)), (host(), measured(bad)), (host(), measured(3.0)))
    assert math.isnan(float(found.loss))
    losses = Rows(found.extra, 3).values(Column.LOSS)
    assert losses[0] == 1.0 and losses[2] == 3.0 and not math.isfinite(losses[1])


def test_whole_norms_give_the_largest_and_shares_add_up():
    assert float(together((host(), measured(1.0, 2.0)), (host(), measured(1.0, 2.5))).norm) == 2.5
    shares = [measured(1.0, norm=0.0)._replace(norm=Norm(torch.tensor(v), is_total=False)) for v in (9.0, 16.0)]
    assert float(together((host(), shares[0]), (host(), shares[1])).norm) == 5.0
    broken = shares[1]._replace(norm=Norm(torch.tensor(math.nan), is_total=False))
    assert math.isnan(float(together((host(), shares[0]), (host(), broken)).norm))


def test_gradients_that_should_be_the_same_and_are_not_are_seen():
    assert bool(together((host(), measured(1.0, 2.0)), (host(), measured(1.0, 2.1))).norms_differ)
    assert not bool(together((host(), measured(1.0, 2.0)), (host(), measured(1.0, 2.0000001))).norms_differ)


def test_tightest_limit_of_any_rank_holds():
    loss, grad = together(
        (host(limits=Limits(3.0, None)), measured(1.0)), (host(limits=Limits(2.5, 7.0)), measured(1.0))
    ).limits
    assert (float(loss), float(grad)) == (2.5, 7.0)


@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=6))
def test_whole_numbers_of_a_check_come_through_bit_for_bit(values):
    mine = measured(1.0, checks=torch.tensor(values))
    found = together((host(), mine), (host(), mine))
    assert Rows(found.extra, 2).checks == [values, values]
    only = agree_alone(host().limits, mine)
    assert Rows(only.extra, 1).checks == [values]


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(allow_nan=True), st.floats(0, 1e6)), min_size=2, max_size=5))
def test_every_rank_comes_to_the_same_bits(ranks):
    parts = [(host(weight), measured(loss, abs(loss) if math.isfinite(loss) else 1.0)) for loss, weight in ranks]
    found = [together(*parts, me=me) for me in range(len(parts))]
    for other in found[1:]:
        for a, b in ((found[0].loss, other.loss), (found[0].norm, other.norm), (found[0].extra, other.extra)):
            assert torch.equal(a.reshape(-1).view(torch.int64), b.reshape(-1).view(torch.int64))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"step": 5}, "at steps 4, 5"),
        ({"attempt": 2}, "at attempts 1, 2"),
        ({"decisions": 9}, "decided differently"),
        ({"is_weighted": True}, "weight="),
    ],
)
def test_ranks_that_are_not_in_step_are_told_so(changed, said):
    found = together((host(), measured(1.0)), (host(**changed), measured(1.0)))
    with pytest.raises(RanksDisagree, match=said):
        Rows(found.extra, 2).check_lockstep()
    Rows(together((host(), measured(1.0)), (host(), measured(2.0))).extra, 2).check_lockstep()
