"""A finite excursion of the loss on several ranks: all of them experiment together and reach the same result."""

from __future__ import annotations

import pytest

from marks import slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *("fsdp-device-all", "ddp-host-one"),
        *slow("fsdp-host-all", "ddp-device-one", "ddp-host-all", "ddp-device-all"),
    ],
)
def test_scaled_weights_make_all_ranks_return_together_and_end_as_without_them(run, case):
    run(f"{case}/excursion_programs.scaled_weights:2")


@pytest.mark.parametrize("gate", ["device", *slow("host")])
def test_garbage_in_the_data_of_one_rank_is_left_out_on_all_ranks_at_the_same_step(run, gate):
    run(f"{gate}/excursion_programs.garbage_on_one_rank:2")


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["host", *slow("device")])
def test_jump_of_the_objective_of_one_rank_is_accepted_on_all_ranks_alike(run, gate):
    run(f"{gate}/excursion_programs.jump_of_the_objective:2")


def test_sample_that_spoils_the_running_statistics_of_one_rank_is_left_out_on_all_ranks(run):
    run("excursion_programs.spoilt_statistics:2")
