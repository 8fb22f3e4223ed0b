"""Dumps of NCCL runs: transfers, batches, sizes by rank, groups of one name, hosts that run ahead, older torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.core.hang.flight_records import decode
from holdfast.core.hang.verdict import HangVerdict, RankReport, judge

WORLD, RANKS = "0", [0, 1, 2, 3]
Sizes = Sequence[Sequence[int]]


def call(
    seq: int, op: str = "all_reduce", sizes: Sizes = ((25,),), *, to: Sizes | None = None, state: str = "completed",
    group: str = WORLD, transfer: int = 0, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return an entry as torch writes it for NCCL. transfer: the number of a send or receive."""
    desc = "default_pg" if group == WORLD else "mesh"
    outputs = sizes if to is None else to
    return {
        "collective_seq_id": seq, "p2p_seq_id": transfer, "is_p2p": bool(transfer), "process_group": [group, desc],
        "profiling_name": f"nccl:{op}", "input_sizes": [*sizes], "input_dtypes": ["Float"] * len(sizes),
        "output_sizes": [*outputs], "output_dtypes": ["Float"] * len(outputs), "state": state,
        "retired": state == "completed", **more,
    }  # fmt: skip


def past(count: int) -> list[dict[str, Any]]:
    return [call(seq) for seq in range(1, count + 1)]


def waits(seq: int, op: str = "all_reduce", sizes: Sizes = ((25,),), **more: Any) -> dict[str, Any]:
    return call(seq, op, sizes, **{"state": "started", **more})


def verdict(
    of_rank: dict[int, list[dict[str, Any]]], groups: dict[int, dict[str, list[int]]] | None = None, world: int = 4
) -> HangVerdict:
    """Judge the dumps of these ranks. groups: by rank, the members of the groups that it is in, besides all ranks."""
    reports = []
    for rank, entries in of_rank.items():
        members = {WORLD: list(range(world)), **(groups or {}).get(rank, {})}
        config = {name: {"name": name, "desc": "", "ranks": str(ranks)} for name, ranks in members.items()}
        reports.append(RankReport(rank=rank, flight_record={"entries": entries, "pg_config": config}))
    return judge(reports, world)


def named(found: HangVerdict) -> tuple[str, list[int]]:
    return found.kind, found.culprits


@pytest.mark.parametrize(
    ("op", "inputs", "outputs"),
    [
        ("all_to_all", lambda rank: [[10 + rank]], lambda rank: [[12 + rank]]),
        ("scatter", lambda rank: [[4]] * 4 if rank == 0 else [], lambda rank: [[4]]),
        ("gather", lambda rank: [[4]], lambda rank: [[4]] * 4 if rank == 0 else []),
        ("all_gather", lambda rank: [[3 + rank]], lambda rank: [[3], [4], [5], [6]]),
        ("reduce_scatter", lambda rank: [[3], [4], [5], [6]], lambda rank: [[3 + rank]]),
    ],
)
def test_sizes_that_may_differ_by_rank_are_no_desync(op, inputs, outputs):
    entries = {rank: [*(call(n, op, inputs(rank), to=outputs(rank)) for n in range(1, 6)), *past(0)] for rank in RANKS}
    for rank in (0, 1, 3):
        entries[rank].append(waits(6, op, inputs(rank), to=outputs(rank)))
    assert named(verdict(entries)) == ("absent", [2])


def test_groups_of_one_name_and_other_members_are_not_compared():
    """A mesh that is split gives its groups one name."""
    entries = {rank: [call(n, "all_gather", [[7]], group="1") for n in range(1, 9)] for rank in (0, 1)}
    entries |= {rank: [call(n, "all_gather", [[9]], group="1") for n in range(1, 5)] for rank in (2, 3)}
    entries[2].append(waits(5, "all_gather", [[9]], group="1"))
    groups = {rank: {"1": [0, 1] if rank < 2 else [2, 3]} for rank in RANKS}
    found = verdict(entries, groups)
    assert named(found) == ("absent", [3]) and "of group 1/mesh of ranks 2, 3" in found.summary


def test_a_work_that_has_timed_out_is_retired_and_not_complete():
    entries = {rank: [*past(5), waits(6, retired=True)] for rank in (0, 1, 2)}
    assert named(verdict({**entries, 3: past(5)})) == ("absent", [3])


def test_hosts_that_run_ahead_by_different_lengths_are_at_the_same_call():
    entries = {rank: [*past(5), waits(6), *(call(n, state="scheduled") for n in range(7, 9 + rank))] for rank in RANKS}
    assert named(verdict(entries)) == ("network", RANKS)


def test_hosts_that_run_ahead_wait_for_the_one_that_has_not_queued_their_call():
    entries = {rank: [*past(5), waits(6), call(7, state="scheduled")] for rank in (0, 1, 2)}
    found = verdict({**entries, 3: past(5)})
    assert named(found) == ("absent", [3]) and "all_reduce number 6" in found.summary


def test_a_device_that_has_not_begun_the_call_in_which_the_others_wait_is_named():
    entries = {
        rank: [*past(5), call(6, state="scheduled" if rank == 2 else "started"), call(7, state="scheduled")]
        for rank in RANKS
    }
    found = verdict(entries)
    assert named(found) == ("device", [2]) and "its device has not begun it" in found.summary


def test_a_batch_of_collectives_is_compared_as_one():
    def batch(seq: int, *sizes: int, state: str = "completed") -> list[dict[str, Any]]:
        return [
            *(call(seq, "all_reduce", [[size]], state=state) for size in sizes),
            call(seq, "coalesced", (), state=state),
        ]

    before = [each for n in range(1, 5) for each in batch(n, 3, 4)]
    entries = {rank: [*before, *batch(5, 3, 4, state="started")] for rank in RANKS}
    assert named(verdict({**entries, 1: before})) == ("absent", [1])
    assert named(verdict({**entries, 1: [*before, *batch(5, 3, 9, state="started")]})) == ("desync", [1])
    assert named(verdict({**entries, 1: [*before, *batch(5, 3, state="started")]})) == ("desync", [1])


# ---- sends and receives


def transfer(text: str, number: int, state: str = "completed", **more: Any) -> dict[str, Any]:
    is_send = text.startswith("send")
    sizes = ([[8]], ()) if is_send else ((), [[8]])
    return call(4, text, sizes[0], to=sizes[1], transfer=number, state=state, **more)


def test_the_stage_that_sends_nothing_is_named_and_not_those_that_wait_for_it_in_turn():
    entries = {rank: [*past(3), transfer(f"recv {rank}<-{rank - 1}", 9, "started")] for rank in (1, 2, 3)}
    found = verdict({0: past(3), **entries})
    assert named(found) == ("absent", [0]) and "recv 1<-0 number 9 of [[8]]" in found.summary


def test_ranks_of_a_transfer_are_those_of_its_group():
    entries = {rank: [*past(3), waits(4)] for rank in (0, 1)}
    entries |= {2: past(3), 3: [*past(3), transfer("recv 1<-0", 1, "started", group="7")]}
    assert named(verdict(entries, {2: {"7": [2, 3]}, 3: {"7": [2, 3]}})) == ("absent", [2])


def test_a_ring_of_sends_and_receives_waits_for_the_rank_that_did_not_come():
    entries: dict[int, list[dict[str, Any]]] = {2: past(3)}
    for rank in (0, 1, 3):
        both = (f"send {rank}->{(rank + 1) % 4}", f"recv {rank}<-{(rank - 1) % 4}")
        entries[rank] = [*past(3), *(transfer(each, 5, "started") for each in both)]
        entries[rank].append(call(4, "coalesced", (), transfer=5, state="started"))
    assert named(verdict(entries)) == ("absent", [2])


def test_two_ranks_that_both_receive_are_both_named():
    entries = {rank: [*past(3), transfer(f"recv {rank}<-{1 - rank}", 1, "started")] for rank in (0, 1)}
    found = verdict(entries, world=2)
    assert named(found) == ("desync", [0, 1]) and "wait for each other" in found.summary


# ---- ranks that wait for each other in different groups


def steps(count: int) -> list[dict[str, Any]]:
    return [each for n in range(1, count + 1) for each in (call(n, group="1"), call(n, "barrier", (), group="2"))]


GROUPS = {rank: {"1": [0, 1, 2], "2": [0, 1, 2]} for rank in range(3)}


def test_of_ranks_that_wait_for_each_other_the_one_that_left_its_usual_order_is_named():
    entries = {rank: [*steps(8), waits(9, group="1")] for rank in (0, 1)}
    entries[2] = [*steps(8), waits(9, "barrier", (), group="2")]
    found = verdict(entries, GROUPS, world=3)
    assert named(found) == ("desync", [2]) and "left out, or makes only later, all_reduce number 9" in found.summary


def test_ranks_that_wait_for_each_other_and_are_not_overdue_yet_are_not_ended():
    reports = []
    for rank, last in ((0, waits(9, group="1")), (1, waits(9, "barrier", (), group="2"))):
        config = {name: {"ranks": "[0, 1]"} for name in (WORLD, "1", "2")}
        record = {"entries": [*steps(8), last], "pg_config": config}
        reports.append(RankReport(rank=rank, pid=9, phase="forward", seconds=1.0, timeout=8.0, flight_record=record))
    assert not judge(reports, 2).is_hang


def test_a_rank_that_waits_in_a_group_of_unknown_members_is_not_named_beside_the_one_that_waits_in_none():
    """gloo does not record who is in a group. Rank 2 waits for rank 3 in the first call of theirs."""
    entries = {rank: [*past(5), waits(6)] for rank in (0, 1)}
    entries |= {2: [*past(5), waits(1, "barrier", (), group="7")], 3: past(5)}
    assert named(verdict(entries)) == ("absent", [3])


def test_ranks_that_wait_in_a_group_with_a_rank_that_sent_nothing_are_not_named():
    entries = {rank: [*past(5), waits(6)] for rank in (0, 1)}
    entries[2] = [*past(5), waits(3, "all_gather", [[4]], group="7")]
    assert named(verdict(entries, {2: {"7": [2, 3]}})) == ("silent", [3])


# ---- older torch


def test_entries_that_are_numbered_by_seq_id_and_a_dump_that_is_a_list_are_read():
    def old(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        new = ("p2p_seq_id", "is_p2p", "input_dtypes", "process_group", "collective_seq_id")
        return [
            {"seq_id": each["collective_seq_id"], "pg_id": 0, **{k: v for k, v in each.items() if k not in new}}
            for each in entries
        ]

    dumps = [decode(json.dumps(old(each)).encode()) for each in ([*past(5), waits(6)], past(5))]
    found = judge([RankReport(rank=rank, flight_record=each) for rank, each in enumerate(dumps)], 2)
    assert named(found) == ("absent", [1]) and "all_reduce number 6" in found.summary
