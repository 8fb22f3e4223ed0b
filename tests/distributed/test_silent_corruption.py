"""Bits flipped in the memory of one rank of a guarded run."""

from __future__ import annotations


def test_flipped_bit_in_one_replica_is_found_and_named_and_healed(run):
    run("corruption_programs.four:4", "corruption_programs.two:2")
