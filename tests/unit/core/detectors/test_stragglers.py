"""A slow rank is named with its phase and its first step, and healthy ranks are not, however noisy they are."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from step_noise import BUSY_HOST, QUIET_HOST, Profile, Values, own_times, with_wait

from holdfast.core.base.types import Finding, Kind, Severity
from holdfast.core.detectors.stragglers import PHASES, Stragglers
from marks import slow

BETWEEN, DATA, COMPUTE = range(3)
OWN_SECONDS = 1e-3 * sum(QUIET_HOST.medians)


def watch(own: Values, hosts: bool = True) -> tuple[list[Finding], list[tuple[int, str]]]:
    """Return what is found, and what is noted at which step."""
    size = own.shape[2]
    stragglers = Stragglers([f"node{rank}" for rank in range(size)] if hosts else (), size)
    findings, notes = [], []
    for step, seconds in enumerate(with_wait(own), 1):
        found, over = stragglers.observe(step, seconds)
        findings += found
        notes += [(step, note) for note in over]
    return findings, notes


def slowed(ranks: int, phase: int, seed: int, *, begin: int, steps: int, by: float = 0.2) -> Values:
    """Return measured noise in which the last rank takes `by` of its own time longer in a phase."""
    own = own_times(QUIET_HOST, begin + steps + 200, ranks, seed)
    own[begin - 1 : begin - 1 + steps, phase, -1] += by * OWN_SECONDS
    return own


# ---- a rank slowed by 20% for 200 steps


@pytest.mark.parametrize("ranks", [2, 4, *slow(8, 64)])
@pytest.mark.parametrize("phase", [BETWEEN, DATA, COMPUTE])
def test_rank_slowed_by_a_fifth_is_named_with_its_phase_within_50_steps(ranks, phase):
    named = 0
    for seed in range(20):
        begin = 400 + seed % 8
        found, _ = watch(slowed(ranks, phase, seed, begin=begin, steps=200))
        assert {finding.evidence["rank"] for finding in found} <= {ranks - 1}
        named += bool(found) and found[0].evidence["phase"] == PHASES[phase] and begin <= found[0].step < begin + 50
    assert named >= 19


def test_finding_has_rank_host_phase_onset_and_cost_and_acts_on_nothing():
    (finding,), _ = watch(slowed(4, DATA, 1, begin=300, steps=400))
    assert (finding.kind, finding.severity, finding.detector) == (Kind.STRAGGLER, Severity.NOTE, "stragglers")
    evidence = finding.evidence
    assert (evidence["rank"], evidence["host"], evidence["phase"]) == (3, "node3", "data")
    assert abs(finding.onset - 300) <= 8 and not evidence["since_start"]
    assert 12 < evidence["percent"] < 25
    assert evidence["seconds"]["data"] > evidence["others"]["data"] + 0.8 * 0.2 * OWN_SECONDS
    assert evidence["seconds"]["wait"] < evidence["others"]["wait"], "the slow rank waits least"
    assert f"rank 3 (node3) has been slow in data since step {finding.onset}" in finding.message
    assert "the median of the others" in finding.message and "loader workers" in finding.message


def test_of_two_ranks_the_slower_one_is_named_relative_to_the_other():
    (finding,), _ = watch(slowed(2, COMPUTE, 3, begin=300, steps=400, by=0.4), hosts=False)
    assert (finding.evidence["rank"], finding.evidence["host"]) == (1, "")
    assert "rank 1 has been slow in compute" in finding.message and "the other rank" in finding.message


def test_rank_that_is_slow_from_the_beginning_is_named_once_as_such():
    (finding,), notes = watch(slowed(4, COMPUTE, 5, begin=1, steps=3000, by=0.25))
    assert finding.evidence["since_start"] and finding.step < 100
    assert "since the process started" in finding.message
    assert [step > 3000 for step, _ in notes] == [True]


def test_recovery_is_noted_once_and_a_second_episode_is_named_again():
    own = own_times(QUIET_HOST, 1500, 4, 7)
    own[299:599, DATA, 2] += 0.3 * OWN_SECONDS
    own[999:1299, COMPUTE, 2] += 0.3 * OWN_SECONDS
    found, notes = watch(own)
    assert [(f.evidence["rank"], f.evidence["phase"]) for f in found] == [(2, "data"), (2, "compute")]
    (first, note), (second, _) = notes
    assert 600 <= first < 700 and 1300 <= second < 1400
    assert "rank 2 (node2) is as fast as the other ranks again; it was slow in data" in note


@pytest.mark.parametrize("ranks", [2, 4])
def test_loader_whose_workers_are_too_slow_is_named_although_most_batches_are_there_at_once(ranks):
    for seed in range(5):
        own = own_times(QUIET_HOST, 1000, ranks, seed)
        own[300::4, DATA, -1] += 4 * 0.25 * OWN_SECONDS
        found, _ = watch(own)
        assert [(f.evidence["rank"], f.evidence["phase"]) for f in found] == [(ranks - 1, "data")]
        assert found[0].step < 500 and found[0].evidence["percent"] > 10


def test_two_slow_ranks_of_eight_are_both_named():
    own = slowed(8, DATA, 2, begin=300, steps=300, by=0.3)
    own[299:599, COMPUTE, 0] += 0.3 * OWN_SECONDS
    found, _ = watch(own)
    assert {(f.evidence["rank"], f.evidence["phase"]) for f in found} == {(7, "data"), (0, "compute")}


# ---- what is no straggler


def named_in(profile: Profile, steps: int, ranks: int, seed: int) -> list[str]:
    found, _ = watch(own_times(profile, steps, ranks, seed))
    return [finding.message for finding in found]


@pytest.mark.parametrize("profile", [QUIET_HOST, BUSY_HOST])
@pytest.mark.parametrize("ranks", [2, 4, *slow(64)])
def test_no_healthy_rank_is_named(profile, ranks):
    assert named_in(profile, 4000, ranks, seed=11) == []


@pytest.mark.slow
@pytest.mark.parametrize("profile", [QUIET_HOST, BUSY_HOST])
@pytest.mark.parametrize(("ranks", "seeds"), [(2, 4), (4, 4), (8, 2), (64, 1)])
def test_no_healthy_rank_is_named_in_a_hundred_thousand_steps(profile, ranks, seeds):
    for seed in range(100, 100 + seeds):
        assert named_in(profile, 100_000, ranks, seed) == []


def alter(change: Callable[[Values, np.random.Generator], None], ranks: int = 4, steps: int = 4000) -> list[Finding]:
    own = own_times(QUIET_HOST, steps, ranks, 21)
    change(own, np.random.default_rng(0))
    return watch(own)[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_pause_of_30_seconds_names_none(ranks):
    def pause(own: Values, _: np.random.Generator) -> None:
        own[500, COMPUTE, 1] += 30.0
        own[900, DATA, 0] += 30.0

    assert alter(pause, ranks) == []


def test_rank_that_evaluates_or_saves_every_ten_steps_is_not_named():
    def save(own: Values, _: np.random.Generator) -> None:
        own[::10, BETWEEN, 0] += 0.5

    assert alter(save) == []


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_that_take_turns_being_slow_are_not_named(ranks):
    def lengths(own: Values, rng: np.random.Generator) -> None:
        own[:, COMPUTE] *= rng.lognormal(0.0, 0.5, own[:, COMPUTE].shape)

    assert alter(lengths, ranks, steps=20_000) == []


def test_rank_whose_phase_is_slow_but_costs_next_to_nothing_is_not_named():
    def double(own: Values, _: np.random.Generator) -> None:
        own[:, DATA, 1] *= 2.0  # 0.6 ms of a step of 45 ms

    assert alter(double) == []


def test_rank_that_waits_for_a_slow_one_inside_its_own_phase_is_not_named_for_it():
    """Under FSDP2 the forward gathers parameters: the other rank's forward contains the wait for a slow loader."""
    own = own_times(QUIET_HOST, 1000, 2, 31)
    own[299:, DATA, 0] += 0.3 * OWN_SECONDS
    late = own[:, :2].sum(axis=1)
    own[:, COMPUTE] += late.max(axis=1, keepdims=True) - late
    found, _ = watch(own)
    assert [(f.evidence["rank"], f.evidence["phase"]) for f in found] == [(0, "data")]


def test_steps_of_a_few_milliseconds_name_none():
    own = 0.02 * own_times(QUIET_HOST, 2000, 4, 41)
    own[:, COMPUTE, 0] *= 1.5
    assert watch(own)[0] == []


def test_times_that_are_not_finite_name_none_and_do_not_spoil_later_ones():
    own = slowed(4, DATA, 1, begin=300, steps=400)
    own[100, COMPUTE, 2] = np.nan
    own[150, DATA, 0] = np.inf
    (finding,), _ = watch(own)
    assert finding.evidence["rank"] == 3


# ---- cost


@pytest.mark.parametrize("ranks", [2, 1000])
def test_a_step_takes_a_fraction_of_a_millisecond(ranks):
    times = with_wait(own_times(QUIET_HOST, 400, ranks, 0))
    stragglers = Stragglers((), ranks)
    began = time.thread_time()
    for step, seconds in enumerate(times, 1):
        stragglers.observe(step, seconds)
    assert (time.thread_time() - began) / 400 < 1e-3
