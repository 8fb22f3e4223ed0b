"""Bits flipped in the memory of one rank of a guarded run."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("program", "size"),
    [
        pytest.param("replicas", 2, marks=pytest.mark.slow),
        ("replicas", 4),
        ("persistent", 4),
        ("gradient", 2),
        pytest.param("gradient", 4, marks=pytest.mark.slow),
        ("window", 2),
    ],
)
def test_flipped_bit_in_one_replica_is_found_and_named_and_healed(run, program, size):
    run(f"corruption_programs.{program}:{size}")
