"""State that is spread over ranks is taken apart, put back and saved without any of it being gathered."""

from __future__ import annotations


def test_two_ranks_go_back_bit_for_bit_and_ask_each_other_nothing(run):
    """Under DDP, FSDP2 and tensor parallelism, with three optimizers; see the programs for what each asserts."""
    run("sharded_state.state_of_two:2")


def test_four_ranks_sharded_in_two_dimensions_go_back_bit_for_bit(run):
    run("sharded_state.state_of_four:4")


def test_saved_by_two_ranks_and_read_by_four_by_one_and_by_two(run):
    run("sharded_state.save_sharded:2", *(f"sharded_state.load_sharded:{size}" for size in (4, 1, 2)))
