"""Silent corruption in a guarded run of several ranks."""

from __future__ import annotations


def test_bit_flipped_in_one_replica_is_found_named_and_healed(run):
    run("corrupted.four:4", "corrupted.two:2")
