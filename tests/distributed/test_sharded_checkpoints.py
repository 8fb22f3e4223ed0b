"""Tensors saved by some number of ranks are read by another, bit for bit; ranks exchange plain values."""

from __future__ import annotations


def test_four_ranks_save_reshard_and_exchange_values(run):
    """One job for many checks, since processes are slow to start. See the programs."""
    run("checkpoint_programs.everything:4")


def test_model_and_optimizer_saved_by_two_ranks_are_read_by_three(run):
    run("checkpoint_programs.save_trained:2", "checkpoint_programs.load_trained:3")


def test_missing_rank_is_reported_within_the_time_limit(run):
    run("checkpoint_programs.missing_rank:2")
