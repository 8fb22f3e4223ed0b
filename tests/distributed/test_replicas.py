"""Ranks that should hold the same, and do: no alarm. One that does not: found, and found on the right rank."""

from __future__ import annotations


def test_four_ranks_know_who_holds_the_same_and_who_of_them_is_wrong(run):
    """One job for many things: processes are slow to start. See the programs for what each asserts."""
    run("replicated.everything:4")
