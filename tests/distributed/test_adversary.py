"""Attacks on "many ranks, one decision": each is a program of `adversary`."""

from __future__ import annotations

import pytest


def test_fsdp_over_tensor_parallel_goes_on_from_its_checkpoints_and_returns_to_them(run):
    run("adversary.resumes_and_returns_on_slices_of_a_mesh:4")


def test_run_on_flattened_slices_of_a_mesh_goes_on_from_its_checkpoints(run):
    run("adversary.goes_on_on_flattened_slices:4")


def test_hook_of_one_rank_alone_does_not_part_it_from_the_others(run):
    run("adversary.hooks_of_one_rank:2")


def test_random_number_drawn_on_one_rank_before_the_end_does_not_hold_up_the_last_save(run):
    run("adversary.draws_before_the_end:2")


@pytest.mark.parametrize("program", ["evaluates_alone", "looks_alone"])
def test_call_that_all_ranks_must_make_and_one_makes_ends_all_of_them_and_says_so(run, tmp_path, program):
    with pytest.raises(AssertionError):
        run(f"adversary.{program}:2")
    assert "waits for words of all ranks" in (tmp_path / "log").read_text()


def test_guard_made_before_the_process_group_is_refused(run):
    run("adversary.guard_made_before_the_group:2")


def test_rank_without_a_token_that_counts_does_not_spoil_the_step_of_the_others(run):
    run("adversary.mean_over_nothing:2")


def test_what_one_rank_asks_for_after_a_fault_before_the_first_and_after_the_last_step_is_heard(run):
    run("adversary.asks_of_one_rank:2")


def test_ranks_that_know_of_different_checkpoints_return_to_the_same(run):
    run("adversary.heard_of_earlier:2")


def test_loader_that_raises_on_one_rank_takes_all_out_without_with_guard_too(run, tmp_path):
    with pytest.raises(AssertionError):
        run("adversary.loader_raises_without_with:2")
    assert "rank 1 has failed" in (tmp_path / "log").read_text()


def test_accumulation_scaler_workers_and_single_rows_recover_exactly_on_two_ranks(run):
    run("adversary.two_that_hold:2")


def test_several_culprits_are_named_and_no_other(run):
    run("adversary.four_that_hold:4")
