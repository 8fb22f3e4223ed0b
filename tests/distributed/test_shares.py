"""Ranks that hold equal tensors keep a share of each snapshot, because whole ones do not fit, and gather on return."""

from __future__ import annotations

import pytest

from marks import slow


@pytest.mark.parametrize(("gate", "size"), [("host", 2), ("device", 2), *slow(("host", 4), ("device", 4))])
def test_rollback_from_shares_is_exact(run, gate, size):
    run(f"{gate}-{size}/share_programs.rolled_back:{size}")


@pytest.mark.parametrize("size", [2, *slow(4)])
def test_scaled_weights_of_one_rank_are_undone_from_shares(run, size):
    run(f"share_programs.scaled_weights:{size}")


@pytest.mark.parametrize("size", [2, *slow(4)])
def test_a_damaged_share_rejects_the_snapshot_on_all_ranks(run, size):
    run(f"share_programs.damaged:{size}")


def test_a_snapshot_of_replicas_that_differed_is_rejected(run):
    run("share_programs.differing:2")


@pytest.mark.parametrize("size", [2, *slow(4)])
def test_a_rank_killed_in_the_gather_leaves_no_rank_waiting(run, tmp_path, size):
    with pytest.raises(AssertionError) as failure:
        run(f"share_programs.killed_in_the_gather:{size}")
    assert (tmp_path / "killed").exists()
    assert "not done after" not in str(failure.value)


@pytest.mark.parametrize(("gate", "size"), [("host", 2), *slow(("device", 2), ("host", 4))])
def test_a_stop_writes_the_newest_certified_state_from_shares(run, gate, size):
    run(f"{gate}-{size}/share_programs.stopped:{size}")


@pytest.mark.parametrize("size", [2, 4])
def test_a_snapshot_takes_its_share_of_the_memory_of_a_rank(run, size):
    run(f"share_programs.memory_of_a_rank:{size}")


def test_ranks_share_only_if_all_of_them_can(run):
    run("share_programs.room_is_exchanged:2")
