"""The comparison tells a rank that never came from one that called something else."""

from __future__ import annotations

from typing import Any

import pytest
from flight_dumps import dump, steps

from holdfast.core.hang import desync
from holdfast.core.hang.flight_records import group_records

FIRST, SECOND, THIRD = ("all_reduce", [3]), ("all_gather", [5]), ("all_reduce", [25])


def compare(*dumps: dict[str, Any]) -> list[desync.Mismatch]:
    return desync.compare({rank: group_records(each) for rank, each in enumerate(dumps)})


def one(*dumps: dict[str, Any]) -> tuple[str, tuple[int, ...], bool]:
    (found,) = compare(*dumps)
    return found.kind, found.ranks, found.is_certain


def test_ranks_at_the_same_call_differ_in_nothing():
    assert compare(dump(steps(5, FIRST)), dump(steps(5, FIRST))) == []


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_never_came_is_named_with_the_call(size):
    others = [dump(steps(5, FIRST), ranks=size)] * (size - 1)
    (found,) = compare(*others, dump(steps(5), ranks=size, waits=False))
    assert (found.kind, found.ranks, found.expected.seq) == ("never_came", (size - 1,), 16)
    assert "never came to all_reduce number 16 of [[3]] Float called at /home/me/train.py:26" in found.describe()


def test_a_rank_that_has_called_nothing_at_all_is_named():
    empty = {**dump([]), "entries": []}
    (found,) = desync.compare({0: group_records(dump([FIRST])), 1: group_records(empty)})
    assert (found.kind, found.ranks) == ("never_came", (1,))


@pytest.mark.parametrize("size", [2, 4])
def test_a_call_left_out_is_found_from_a_rank_that_never_came(size):
    """On two ranks there is no majority: the past of the rank itself names it."""
    others = [dump(steps(5, FIRST), ranks=size)] * (size - 1)
    assert one(*others, dump(steps(5, SECOND), ranks=size)) == ("left_out", (size - 1,), True)


@pytest.mark.parametrize("size", [2, 4])
def test_another_shape_is_named(size):
    others = [dump(steps(5, FIRST), ranks=size)] * (size - 1)
    assert one(*others, dump(steps(5, ("all_reduce", [7])), ranks=size)) == ("other_shape", (size - 1,), True)


def test_another_order_is_found_if_the_calls_go_on():
    """NCCL enqueues: ranks that differ may both make the next call."""
    usual = dump(steps(5, FIRST, SECOND, THIRD), backend="nccl")
    assert one(usual, usual, dump(steps(5, SECOND, FIRST, THIRD), backend="nccl")) == ("other_order", (2,), True)


def test_a_call_too_many_is_found():
    usual = dump(steps(5, FIRST, SECOND, THIRD), backend="nccl")
    extra = dump(steps(5, ("broadcast", [1]), FIRST, SECOND), backend="nccl")
    assert one(usual, usual, extra) == ("added", (2,), True)


def test_two_ranks_without_a_past_are_both_suspects():
    kind, _, is_certain = one(dump([FIRST]), dump([SECOND]))
    assert not is_certain
    assert kind == "other_call"


def test_the_group_that_differs_is_named_among_several():
    both = dump(steps(3, FIRST))
    late = dump(steps(3), waits=False)
    other = dump(steps(2), group="7", waits=False)
    for each in (both, late):
        each["entries"] = [*each["entries"], *other["entries"]]
        each["pg_config"] = {**each["pg_config"], **other["pg_config"]}
    (found,) = compare(both, late)
    assert found.group == "0/default_pg"


def test_a_rank_whose_call_does_not_follow_from_its_past_explains_the_death_of_another():
    records = {1: group_records(dump(steps(5, ("all_reduce", [7]))))}
    (found,) = desync.unusual_calls(records)
    assert (found.kind, found.ranks, found.expected.sizes) == ("other_shape", (1,), "[[3]]")
    assert desync.unusual_calls({0: group_records(dump(steps(5, FIRST)))}) == []


def test_no_rank_dies_of_an_unusual_call_that_is_complete():
    records = {1: group_records(dump(steps(5, ("all_reduce", [7])), waits=False))}
    assert desync.unusual_calls(records) == []
