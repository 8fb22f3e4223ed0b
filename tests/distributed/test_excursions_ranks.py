"""A finite excursion of the loss on several ranks: all of them experiment together and reach the same result."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("program", ["scaled_on_all_ranks", "scaled_on_one_rank"])
def test_scaled_weights_make_all_ranks_return_together_and_end_as_without_them(run, program):
    run(f"excursion_programs.{program}:2")


def test_garbage_in_the_data_of_one_rank_is_left_out_on_all_ranks_at_the_same_step(run):
    run("excursion_programs.garbage_on_one_rank:2")


def test_jump_of_the_objective_of_one_rank_is_accepted_on_all_ranks_alike(run):
    run("excursion_programs.jump_of_the_objective:2")
