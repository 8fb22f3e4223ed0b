"""A rank that is really slower than the others is named, with its host and the phase, and nothing else changes."""

from __future__ import annotations

import pytest

from marks import slow


@pytest.mark.parametrize(
    ("case", "size"),
    [
        ("ddp-data-72", 2),
        *slow(("ddp-compute-72", 2), ("ddp-between_steps-72", 2), ("ddp-data-200", 4), ("ddp-compute-200", 4)),
        *slow(("fsdp-data-72", 2), ("wrap-data-72", 2), ("wrap-compute-72", 2)),
    ],
)
def test_slow_rank_is_named_with_its_phase_and_the_run_is_bit_identical(run, case, size):
    run(f"{case}/straggler_programs.named:{size}")


@pytest.mark.slow
def test_equally_slow_ranks_are_not_named(run):
    run("healthy/straggler_programs.healthy:4")


@pytest.mark.slow
def test_throttled_rank_is_the_cause_of_a_slowdown(run):
    try:
        run("throttled/slowdown_programs.throttled:2")
    except AssertionError:  # other programs may slow the ranks down by as much
        run("again/slowdown_programs.throttled:2")
