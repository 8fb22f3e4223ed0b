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
def test_slow_rank_is_named_with_its_phase_and_the_run_is_bit_identical(run, case, size, tmp_path):
    run_undisturbed(run, f"{case}/straggler_programs.named:{size}")
    for folder in tmp_path.glob(f"*/{case}"):
        assert len(list(folder.glob("exact-*"))) == size, folder


@pytest.mark.slow
def test_equally_slow_ranks_are_not_named(run):
    run("healthy/straggler_programs.healthy:4")


@pytest.mark.slow
def test_throttled_rank_is_the_cause_of_a_slowdown(run):
    run_undisturbed(run, "throttled/slowdown_programs.throttled:2")


def run_undisturbed(run, job):
    """Run a job up to three times: other programs may slow a rank down by as much, or hide that it is slow."""
    for attempt in ("first/", "second/"):
        try:
            return run(attempt + job)
        except AssertionError:
            continue
    return run("third/" + job)
