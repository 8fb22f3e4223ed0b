"""The ring keeps few snapshots, and one before every onset within reach."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.base.config import SnapshotSection
from holdfast.core.base.types import Health
from holdfast.runtime.snapshots.copy import SnapshotCopy
from holdfast.runtime.snapshots.ring import Ring
from holdfast.runtime.snapshots.snapshot import Snapshot


def snapshot(step: int, health: Health = Health.GOOD, initial: bool = False) -> Snapshot:
    made = Snapshot(step, SnapshotCopy({}, []), initial=initial)
    made.health = health
    return made


def ring_of(every: int, reach: int) -> Ring:
    return Ring(SnapshotSection(every_steps=every, reach_steps=reach, memory_gb=1.0))


class Run:
    """Commits steps one after another, and certifies each snapshot `lag` steps after it was taken."""

    def __init__(self, ring: Ring, lag: int, start: int = 0) -> None:
        self.ring, self.lag, self.start, self.step = ring, lag, start, start
        ring.add(snapshot(start, Health.CANDIDATE, initial=True))

    def commit(self) -> None:
        self.step += 1
        for s in self.ring:
            if s.health is Health.CANDIDATE and (self.step - s.step >= self.lag or s.initial):
                s.health = Health.GOOD
        if self.ring.due(self.step):
            self.ring.add(snapshot(self.step, Health.CANDIDATE))

    def good(self) -> list[int]:
        return [s.step for s in self.ring if s.health is Health.GOOD]


cases = st.fixed_dictionaries(
    {
        "every": st.integers(1, 12),
        "times": st.integers(1, 64),
        "steps": st.integers(1, 600),
        "start": st.integers(0, 50),
    }
)


@given(cases)
@settings(max_examples=80, deadline=None)
def test_every_onset_within_reach_has_a_snapshot_shortly_before_it(how):
    every, reach = how["every"], how["every"] * how["times"]
    run = Run(ring_of(every, reach), lag=0, start=how["start"])
    for _ in range(how["steps"]):
        run.commit()
    kept = [s.step for s in run.ring]
    for age in range(1, min(reach, run.step - run.start) + 1):
        before = [k for k in kept if k <= run.step - age]
        assert before, f"no snapshot before an onset {age} steps ago: {kept} at {run.step}"
        assert run.step - max(before) <= 4 * age + 2 * every


@given(cases, st.integers(0, 60))
@settings(max_examples=80, deadline=None)
def test_the_ring_and_the_snapshot_in_progress_never_exceed_max_snapshots(how, lag):
    ring = ring_of(how["every"], how["every"] * how["times"])
    run = Run(ring, lag, how["start"])
    for _ in range(how["steps"]):
        run.commit()
        assert len(ring) + 1 <= ring.max_snapshots(), [s.step for s in ring]


@given(cases, st.integers(1, 60), st.data())
@settings(max_examples=60, deadline=None)
def test_the_newest_good_snapshot_is_never_dropped(how, lag, data):
    """Candidates are rejected at random, and the run rolls back to good ones at random."""
    ring = ring_of(how["every"], how["every"] * how["times"])
    run = Run(ring, lag, how["start"])
    for _ in range(min(200, how["steps"])):
        best = max(run.good(), default=None)
        run.commit()
        assert best is None or max(run.good()) >= best
        choice = data.draw(st.integers(0, 30))
        candidates = [s for s in ring if s.health is Health.CANDIDATE and not s.initial]
        if choice == 0 and candidates:
            candidates[0].reject("by the test")
        if choice == 1 and run.good():
            target = data.draw(st.sampled_from(run.good()))
            ring.drop_after(target)
            run.step = target
            assert max(run.good()) == target
    assert run.good()


@given(cases)
@settings(max_examples=40, deadline=None)
def test_snapshots_are_in_order_and_unique(how):
    run = Run(ring_of(how["every"], how["every"] * how["times"]), lag=3, start=how["start"])
    for _ in range(how["steps"]):
        run.commit()
    steps = [s.step for s in run.ring]
    assert steps == sorted(set(steps))
    assert all(s == run.start or s % how["every"] == 0 for s in steps)


def test_the_count_grows_with_the_logarithm_of_the_reach():
    assert [ring_of(10, reach).max_snapshots() for reach in (10, 100, 1_000, 10_000, 100_000)] == [4, 8, 11, 14, 18]


def test_only_good_snapshots_are_offered_newest_first():
    ring = ring_of(10, 1000)
    for step, health in ((0, "good"), (10, "good"), (20, "candidate")):
        ring.add(snapshot(step, Health(health)))
    assert [s.step for s in ring.good_at_or_before(25)] == [10, 0]
    assert [s.step for s in ring.good_at_or_before(9)] == [0]
    assert ring.oldest() is next(iter(ring))


def test_a_rejected_snapshot_is_dropped_when_the_next_is_added():
    ring = ring_of(10, 1000)
    bad = snapshot(10)
    ring.add(snapshot(0))
    ring.add(bad)
    bad.reject("by the test")
    assert ring.add(snapshot(20)) == [bad]


def test_nothing_is_due_if_snapshots_are_disabled():
    ring = Ring(SnapshotSection(enabled=False, memory_gb=1.0))
    assert not any(ring.due(step) for step in range(100))


@pytest.mark.parametrize("every", [1, 3, 10])
def test_due_at_multiples_of_the_cadence(every):
    assert [s for s in range(1, 31) if ring_of(every, 100).due(s)] == list(range(every, 31, every))
