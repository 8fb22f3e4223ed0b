"""Attacks on "many ranks, one decision": each is a program of `adversary`."""

from __future__ import annotations

import pytest


def test_runs_on_slices_of_a_mesh_go_on_from_their_checkpoints_and_return_to_them(run):
    run("adversary.resumes_and_returns_on_slices_of_a_mesh:4")


@pytest.mark.slow
def test_run_on_flattened_slices_of_a_mesh_goes_on_from_its_checkpoints(run):
    run("adversary.goes_on_on_flattened_slices:4")


def test_what_one_of_two_ranks_does_alone_parts_it_from_the_other_in_nothing(run):
    """A hook of its own; a random number before the last save; requests before, after and around a fault; other news of the
    disk; no token that counts; a guard made too early."""
    run(
        "adversary.hooks_of_one_rank:2",
        "draws/adversary.draws_before_the_end:2",
        "asks/adversary.asks_of_one_rank:2",
        "heard/adversary.heard_of_earlier:2",
        "nothing/adversary.mean_over_nothing:2",
        "early/adversary.guard_made_before_the_group:2",
    )


@pytest.mark.parametrize("program", ["looks_alone", pytest.param("evaluates_alone", marks=pytest.mark.slow)])
def test_call_that_all_ranks_must_make_and_one_makes_ends_all_of_them_and_says_so(run, tmp_path, program):
    with pytest.raises(AssertionError):
        run(f"adversary.{program}:2")
    assert "an exchange of all ranks" in (tmp_path / "log").read_text()


def test_loader_that_raises_on_one_rank_takes_all_out_without_with_guard_too(run, tmp_path):
    with pytest.raises(AssertionError):
        run("adversary.loader_raises_without_with:2")
    assert "rank 1 failed" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_accumulation_scaler_workers_and_single_rows_recover_exactly_and_culprits_are_named(run):
    run("adversary.two_that_hold:2", "four/adversary.four_that_hold:4")
