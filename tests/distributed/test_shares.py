"""Ranks that hold equal tensors keep a share of each snapshot, because whole ones do not fit, and gather on return."""

from __future__ import annotations

import multiprocessing
import signal

import pytest
import share_programs

from marks import slow

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["torch._dynamo", "holdfast.distributed.watchdog"])  # DDP imports the first


@pytest.mark.slow
@pytest.mark.parametrize(("gate", "size"), [("host", 2), ("device", 2), *slow(("host", 4), ("device", 4))])
def test_rollback_from_shares_is_exact(run, gate, size):
    run(f"{gate}-{size}/share_programs.rolled_back:{size}")


@pytest.mark.slow
def test_tensors_arrive_bit_for_bit_in_any_pieces(run):
    run("share_programs.broadcast:3")


@pytest.mark.slow
def test_rollback_from_shares_is_exact_if_the_optimizer_state_was_another(run):
    run("share_programs.other_structure:2")


@pytest.mark.slow
def test_ranks_decide_again_if_whole_snapshots_fit_after_all(run):
    run("share_programs.decided_again:2")


@pytest.mark.parametrize("size", [2, *slow(4)])
def test_scaled_weights_of_one_rank_are_undone_from_shares(run, size):
    run(f"share_programs.scaled_weights:{size}")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, *slow(4)])
def test_a_damaged_share_rejects_the_snapshot_on_all_ranks(run, size):
    run(f"share_programs.damaged:{size}")


def test_a_snapshot_of_replicas_that_differed_is_rejected(run):
    run("share_programs.differing:2")


@pytest.mark.parametrize("size", [2, *slow(4)])
def test_a_rank_killed_in_the_gather_leaves_no_rank_waiting(tmp_path, monkeypatch, size):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ranks = [
        FORKSERVER.Process(target=share_programs.killed_in_the_gather, args=(tmp_path, rank, size))
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    for rank in reversed(ranks):
        rank.join(100)
    statuses = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    assert (tmp_path / "killed").exists()
    assert statuses[-1] == -signal.SIGKILL
    assert all(status not in (None, 0) for status in statuses), statuses


@pytest.mark.slow
@pytest.mark.parametrize(("gate", "size"), [("host", 2), *slow(("device", 2), ("host", 4))])
def test_a_stop_writes_the_newest_certified_state_from_shares(run, gate, size):
    run(f"{gate}-{size}/share_programs.stopped:{size}")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_snapshot_takes_its_share_of_the_memory_of_a_rank(run, size):
    run(f"share_programs.memory_of_a_rank:{size}")


def test_ranks_share_only_if_all_of_them_can(run):
    run("share_programs.room_is_exchanged:2")
