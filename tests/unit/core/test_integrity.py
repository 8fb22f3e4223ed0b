"""Who is at fault, from the sums of all ranks; and what it is when it comes back."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.base.types import Kind, Severity
from holdfast.core.decide.corruption import (
    DIFFERS,
    SAME,
    UNSEEN,
    Corruption,
    Decision,
    corrupt_tensors,
    differing_tensors,
    find_corruption,
    make_finding,
)
from holdfast.core.decide.recurrence import Recurrence

words = st.integers(-(2**63), 2**63 - 1)


@st.composite
def partitions(draw, size: int, least: int = 1):
    """The ranks in any order, cut into groups of at least `least`."""
    ranks = draw(st.permutations(range(size)))
    groups, start = [], 0
    while start < size:
        most = size - start
        length = draw(st.integers(min(least, most), most))
        if 0 < most - length < least:
            length = most
        groups.append(tuple(sorted(ranks[start : start + length])))
        start += length
    return tuple(sorted(groups))


@st.composite
def healthy(draw, least: int = 1):
    """Groups of one to three classes over some ranks, and rows in which every group agrees."""
    size = draw(st.integers(max(1, least), 9))
    groups = [draw(partitions(size, least)) for _ in range(draw(st.integers(1, 3)))]
    rows = [[0] * len(groups) for _ in range(size)]
    for which, partition in enumerate(groups):
        for group in partition:
            value = draw(words)
            for rank in group:
                rows[rank][which] = value
    return groups, rows


def everyone(size: int):
    return [(tuple(range(size)),)]


@given(healthy(), st.sampled_from([SAME, UNSEEN]))
def test_groups_that_agree_are_fine_whatever_other_groups_hold(case, said):
    groups, rows = case
    assert find_corruption(7, rows, groups, window=False) == []
    assert find_corruption(7, [[*row, said] for row in rows], groups, window=True) == []


@given(healthy(least=3), st.data())
def test_single_rank_among_three_or_more_is_named(case, data):
    groups, rows = case
    rank = data.draw(st.integers(0, len(rows) - 1))
    hit = data.draw(st.sets(st.integers(0, len(groups) - 1), min_size=1))
    for which in hit:
        rows[rank][which] ^= 1 << data.draw(st.integers(0, 61))
    (found,) = find_corruption(7, rows, groups, window=False)
    assert found == Corruption(kind="replica", step=7, ranks=(rank,), named=True, classes=tuple(sorted(hit)))


@given(healthy(least=2), st.data())
def test_faulty_rank_is_always_among_the_suspects_and_outsiders_never_are(case, data):
    groups, rows = case
    rank = data.draw(st.integers(0, len(rows) - 1))
    which = data.draw(st.integers(0, len(groups) - 1))
    rows[rank][which] ^= 1
    (found,) = find_corruption(7, rows, groups, window=False)
    group = next(g for g in groups[which] if rank in g)
    assert rank in found.ranks and set(found.ranks) <= set(group)
    assert found.named == (found.ranks == (rank,)) == (len(group) >= 3)


@given(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=2, max_size=8))
def test_any_rows_at_all_are_judged_by_what_they_hold_and_nothing_else(rows):
    """Every rank has the same rows, so every rank has the same answer: nothing but the rows goes in."""
    size = len(rows)
    groups = [*everyone(size), tuple((r,) for r in range(size))]
    told = json.loads(json.dumps(rows))
    found = find_corruption(3, rows, groups, window=True)
    assert found == find_corruption(3, told, groups, window=True)
    kinds = [f.kind for f in found]
    assert ("replica" in kinds) == (len({row[0] for row in rows}) > 1)
    assert ("window" in kinds) == any(row[2] == DIFFERS for row in rows)


@pytest.mark.parametrize("values", [[5, 6], [1, 1, 2, 2], [1, 2, 3], [1, 1, 2, 3], [1, 1, 2, 2, 3, 3]])
def test_without_a_majority_all_are_suspects(values):
    (found,) = find_corruption(9, [[v] for v in values], everyone(len(values)), window=False)
    assert found.ranks == tuple(range(len(values))) and not found.named
    note = make_finding(found, Decision(cause="unknown", text="..."), ["w"], last_good=4)
    assert "cannot be told" in note.message


def test_majority_names_several_at_once():
    (found,) = find_corruption(9, [[1], [2], [1], [3], [1]], everyone(5), window=False)
    assert found.ranks == (1, 3) and found.named


def test_two_suspects_are_told_apart_by_another_class_or_by_the_window():
    pairs = ((0, 2), (1, 3))
    rows = [[1, 4], [1, 8], [9, 5], [1, 8]]
    (found,) = find_corruption(9, rows, [*everyone(4), pairs], window=False)
    assert found.ranks == (2,) and found.named and found.classes == (0, 1)

    rows = [[4, SAME], [8, SAME], [5, DIFFERS], [8, UNSEEN]]
    replica, window = find_corruption(9, rows, [pairs], window=True)
    assert replica.ranks == (2,) and replica.named
    assert window == Corruption(kind="window", step=9, ranks=(2,), named=True)

    rows = [[4, DIFFERS], [8, DIFFERS], [5, DIFFERS], [8, DIFFERS]]
    replica, _ = find_corruption(9, rows, [pairs], window=True)
    assert replica.ranks == (0, 2) and not replica.named


def test_a_named_rank_elsewhere_does_not_speak_for_a_pair_it_is_not_in():
    rows = [[4, 1], [8, 1], [5, 1], [8, 7]]
    (found,) = find_corruption(9, rows, [((0, 2), (1, 3)), *everyone(4)], window=False)
    assert found.ranks == (0, 2, 3) and not found.named


def test_tensors_that_differ_are_found_and_so_are_missing_ones():
    same = [{"w": 1, "b": 2}, {"s": 5}]
    told = [same, [{"w": 1, "b": 3}, {"s": 6}], [{"w": 1, "b": 2, "new": 0}, {"s": 5}], same]
    groups = [*everyone(4), ((0, 2), (1, 3))]
    assert differing_tensors(told, groups) == ("b", "new", "s")
    assert differing_tensors([same] * 4, groups) == ()


def test_culprits_come_from_all_accounts():
    accounts = [
        {"sums": [{"w": rank // 3}], "changed": ["b"] if rank == 1 else [], "fresh": {"replica": ["w"], "window": []}}
        for rank in range(4)
    ]
    replica = Corruption(kind="replica", step=3, ranks=(3,), named=True, classes=(0,))
    window = Corruption(kind="window", step=3, ranks=(1,), named=True)
    assert corrupt_tensors(replica, accounts, everyone(4)) == (("w",), frozenset({"w"}))
    assert corrupt_tensors(window, accounts, everyone(4)) == (("b",), frozenset())


def test_finding_returns_to_before_it_could_have_happened():
    unknown = Decision(cause="unknown", text="seen for the first time")
    replica = Corruption(kind="replica", step=200, ranks=(2,), named=True, classes=(0,))
    found = make_finding(replica, unknown, [f"w{n}" for n in range(11)], last_good=99)
    assert (found.kind, found.severity, found.step, found.onset) == (Kind.DESYNC, Severity.ROLLBACK, 200, 100)
    assert "rank 2" in found.message and "w7 and 3 more" in found.message and found.evidence["tensor_count"] == 11
    window = Corruption(kind="window", step=200, ranks=(1, 3), named=True)
    found = make_finding(window, unknown, ["w"], last_good=99)
    assert (found.kind, found.onset) == (Kind.SILENT_CORRUPTION, 200)
    assert "ranks 1 and 3" in found.message and "step 199" in found.message
    json.dumps(found.evidence)


# ---- again


def replica(*ranks: int, step: int = 100, named: bool = True) -> Corruption:
    return Corruption(kind="replica", step=step, ranks=ranks, named=named, classes=(0,))


def window(*ranks: int, step: int = 100) -> Corruption:
    return Corruption(kind="window", step=step, ranks=ranks, named=True)


def test_what_does_not_come_back_was_transient():
    held = Recurrence(4)
    first = held.diagnose(replica(2), ["w"])
    assert first.cause == "unknown" and first.heals and not first.leave_out
    held.record_clean_check("replica")
    (closed,) = held.close_incident()
    assert closed.cause == "transient" and closed.ranks == (2,)
    assert held.close_incident() == []
    held.diagnose(replica(2, step=900), ["w"])
    (closed,) = held.close_incident()
    assert "time 2 for rank 2" in closed.text


def test_same_rank_again_is_a_broken_device():
    for kind in (replica, window):
        held = Recurrence(4)
        held.diagnose(kind(2), ["w"])
        again = held.diagnose(kind(2, step=200), ["v"])
        assert again.cause == "persistent" and again.ranks == (2,) and not again.heals, kind
        assert "device of rank 2" in again.text


def test_other_ranks_or_every_rank_again_is_the_program():
    for kind, then in ((replica, (1,)), (replica, (0, 1, 2, 3)), (window, (0, 3))):
        held = Recurrence(4)
        held.diagnose(kind(2), ["w"])
        again = held.diagnose(kind(*then), ["w"])
        assert again.cause == "software" and not again.heals and not again.leave_out, (kind, then)


def test_two_replicas_cannot_tell_device_from_program():
    held = Recurrence(2)
    held.diagnose(replica(0, 1, named=False), ["w"])
    again = held.diagnose(replica(0, 1, named=False), ["w"])
    assert again.cause == "unknown" and not again.heals and "cannot be told" in again.text


def test_pair_of_suspects_narrowed_by_a_named_rank():
    held = Recurrence(4)
    held.diagnose(replica(0, 2, named=False), ["w"])
    again = held.diagnose(replica(2), ["w"])
    assert again.cause == "persistent" and again.ranks == (2,)


def test_same_window_at_the_very_next_check_is_a_program_that_leaves_no_trace():
    for size in (1, 4):
        held = Recurrence(size)
        held.diagnose(window(*range(size)), ["w", "b"])
        again = held.diagnose(window(*range(size), step=200), ["b", "w"])
        assert again.cause == "software" and set(again.leave_out) == {"w", "b"} and not again.heals
        note = make_finding(window(*range(size)), again, ["w", "b"], last_good=1)
        assert note.severity == Severity.NOTE and ".data" in note.message
        assert held.close_incident() == []


def test_window_that_was_clean_in_between_or_in_other_tensors_is_the_device():
    held = Recurrence(1)
    held.diagnose(window(0), ["w"])
    held.record_clean_check("window")
    assert held.diagnose(window(0), ["w"]).cause == "persistent"
    held = Recurrence(1)
    held.diagnose(window(0), ["w"])
    assert held.diagnose(window(0), ["v"]).cause == "persistent"


def test_what_never_was_the_same_is_left_out_without_going_back():
    for kind in (replica, window):
        found = Recurrence(3).diagnose(kind(0, 1, 2), ["w"], fresh={"w", "v"})
        assert found.cause == "software" and found.leave_out == ("w",) and not found.heals
        assert Recurrence(3).diagnose(kind(0, 1, 2), ["w", "x"], fresh={"w"}).cause == "unknown"
        assert Recurrence(3).diagnose(kind(1), ["w"], fresh={"w"}).cause == "unknown"  # one rank alone: no design


def test_kinds_are_kept_apart():
    for first, then in itertools.product((replica, window), repeat=2):
        held = Recurrence(4)
        held.diagnose(first(2), ["w"])
        assert held.diagnose(then(2), ["w"]).cause == ("persistent" if first is then else "unknown")
