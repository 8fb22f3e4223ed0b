"""Sharded state is copied, restored and saved without gathering it."""

from __future__ import annotations


def test_two_ranks_roll_back_bit_for_bit_without_collectives(run):
    """Under DDP, FSDP2 and tensor parallelism, with three optimizers. See the programs."""
    run("state_programs.state_of_two:2")


def test_four_ranks_sharded_in_two_dimensions_roll_back_bit_for_bit(run):
    run("state_programs.state_of_four:4")


def test_checkpoint_of_two_ranks_is_read_by_four_one_and_two(run):
    run("state_programs.save_sharded:2", *(f"state_programs.load_sharded:{size}" for size in (4, 1, 2)))
