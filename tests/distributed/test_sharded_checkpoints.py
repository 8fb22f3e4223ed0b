"""Tensors saved on some number of ranks come back on another, bit for bit; ranks tell each other plain values."""

from __future__ import annotations


def test_four_ranks_save_reshard_and_tell_each_other(run):
    """One job for many things: processes are slow to start. See the programs for what each asserts."""
    run("everything:4")


def test_model_and_optimizer_saved_on_two_ranks_come_back_on_three(run):
    run("save_trained:2", "load_trained:3")


def test_rank_that_does_not_come_is_told_within_the_bound(run):
    run("missing_rank:2")
