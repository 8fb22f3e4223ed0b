"""Bits flipped in the memory of one rank of a guarded run."""

from __future__ import annotations

import pytest

from marks import slow


@pytest.mark.parametrize(
    ("program", "size"),
    [
        ("replicas", 4),
        ("persistent", 4),
        ("gradient", 2),
        ("window", 2),
        *slow(("replicas", 2), ("gradient", 4)),
    ],
)
def test_flipped_bit_in_one_replica_is_found_and_named_and_healed(run, program, size):
    run(f"corruption_programs.{program}:{size}")
