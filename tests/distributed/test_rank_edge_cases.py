"""Cases in which ranks could diverge or hang. The programs are in `edge_case_programs`."""

from __future__ import annotations

import pytest


@pytest.mark.slow
def test_run_on_slices_of_a_mesh_resumes_from_a_checkpoint_and_rolls_back_to_one(run):
    run("edge_case_programs.resume_and_roll_back_on_mesh_slices:4")


@pytest.mark.slow
def test_run_on_flattened_mesh_slices_resumes_from_its_checkpoints(run):
    run("edge_case_programs.resume_on_flattened_slices:4")


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "hooks_of_one_rank",
        "random_draw_before_the_end",
        "requests_of_one_rank",
        "checkpoint_events_arrive_earlier",
        "mean_over_no_tokens",
        "guard_made_before_the_group",
        "scheduler_of_one_rank",
        "parameters_that_do_not_move",
    ],
)
def test_what_one_of_two_ranks_does_alone_does_not_make_them_diverge(run, program):
    run(f"edge_case_programs.{program}:2")


@pytest.mark.slow
@pytest.mark.parametrize("program", ["reads_outcome_alone", pytest.param("evaluates_alone", marks=pytest.mark.slow)])
def test_collective_call_on_one_rank_alone_ends_all_ranks_and_names_the_mistake(run, tmp_path, program):
    with pytest.raises(AssertionError):
        run(f"edge_case_programs.{program}:2")
    assert "an exchange of all ranks" in (tmp_path / "log").read_text()


def test_loader_error_on_one_rank_ends_all_ranks_without_a_with_block(run, tmp_path):
    with pytest.raises(AssertionError):
        run("edge_case_programs.loader_error_without_with_block:2")
    assert "rank 1 failed" in (tmp_path / "log").read_text()


def test_every_sample_quarantined_ends_all_ranks_and_names_the_cure(run, tmp_path):
    with pytest.raises(AssertionError):
        run("edge_case_programs.every_sample_quarantined:2")
    log = (tmp_path / "log").read_text()
    assert "no sample left that is not quarantined" in log and "--release-data" in log
    assert "Timeout" not in log


def test_gradients_cleared_on_one_rank_end_all_ranks_and_name_the_mistake(run, tmp_path):
    with pytest.raises(AssertionError):
        run("edge_case_programs.gradients_cleared_on_one_rank:2")
    log = (tmp_path / "log").read_text()
    assert "remove your zero_grad()" in log and "rank 1 failed" in log


@pytest.mark.slow
def test_accumulation_scaler_workers_and_single_rows_recover_exactly(run):
    run("edge_case_programs.combinations_on_two_ranks:2", "four/edge_case_programs.several_culprits:4")


@pytest.mark.slow
def test_evaluation_in_a_late_hook_leaves_no_stale_weights_behind(run):
    run("edge_case_programs.late_hook_evaluates:2")
