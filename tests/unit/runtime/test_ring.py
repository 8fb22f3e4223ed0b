"""The ring keeps few snapshots, and one before every onset within reach; with little room, the newest good ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.base.config import SnapshotSection
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.snapshot_rule import SnapshotRoom, SnapshotRule, ages, describe_room, should_share
from holdfast.core.checkpoints.spread import spread
from holdfast.runtime.snapshots.copy import SnapshotCopy
from holdfast.runtime.snapshots.ring import Ring
from holdfast.runtime.snapshots.snapshot import Snapshot
from marks import examples


def snapshot(step: int, health: Health = Health.GOOD, initial: bool = False) -> Snapshot:
    made = Snapshot(step, SnapshotCopy({}, []), initial=initial)
    made.health = health
    return made


def ring_of(every: int, reach: int, copies: int | None = None) -> Ring:
    """Return a ring with room for so many copies, or for all."""
    ring = Ring(SnapshotSection(every_steps=every, reach_steps=reach, memory_gb=1.0))
    ring.budget([SnapshotRoom(1, 0, 100 if copies is None else copies)])
    return ring


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
        if self.ring.keeps(self.step):
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
@settings(max_examples=examples(80), deadline=None)
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
@settings(max_examples=examples(80), deadline=None)
def test_the_ring_and_the_snapshot_in_progress_never_exceed_max_snapshots(how, lag):
    ring = ring_of(how["every"], how["every"] * how["times"])
    run = Run(ring, lag, how["start"])
    for _ in range(how["steps"]):
        run.commit()
        assert len(ring) + 1 <= ring.max_snapshots(), [s.step for s in ring]


@given(cases, st.integers(1, 60), st.data())
@settings(max_examples=examples(60), deadline=None)
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


def test_nothing_is_kept_if_snapshots_are_disabled():
    ring = Ring(SnapshotSection(enabled=False, memory_gb=1.0))
    assert not any(ring.keeps(step) for step in range(100))


@pytest.mark.parametrize("every", [1, 3, 10])
def test_kept_at_multiples_of_the_cadence(every):
    assert [s for s in range(1, 31) if ring_of(every, 100).keeps(s)] == list(range(every, 31, every))


# ---- plenty of room: the same snapshots as ever


def kept_by_powers_of_two(held: list[Snapshot], every: int, reach: int) -> list[int]:
    """Return the steps that are kept after the last of `held` was added: the rule, written out once more."""
    levels = max(1, math.ceil(math.log2(max(1.0, reach / every))) + 1)
    spacings = [every * 2**level for level in range(levels)]
    newest = held[-1].step
    wanted = {newest // s * s - back for s in spacings for back in (0, s)}
    last_good = max((s.step for s in held if s.health is Health.GOOD), default=None)
    return [
        s.step
        for s in held
        if s.health is not Health.BAD
        and (s.step in wanted or s.step == last_good or (s.initial and min(wanted) <= s.step))
    ]


@given(cases, st.integers(0, 60), st.data())
@settings(max_examples=examples(60), deadline=None)
def test_with_room_for_all_the_ring_keeps_the_multiples_of_every_power_of_two(how, lag, data):
    every, reach = how["every"], how["every"] * how["times"]
    ring = ring_of(every, reach)
    assert not ring.is_limited
    run = Run(ring, lag, how["start"])
    add, added = ring.add, []

    def compared(new: Snapshot) -> list[Snapshot]:
        expected = kept_by_powers_of_two([*ring, new], every, reach)
        dropped = add(new)
        added.append(new.step)
        assert [s.step for s in ring] == expected
        return dropped

    ring.add = compared
    for _ in range(how["steps"]):
        run.commit()
        candidates = [s for s in ring if s.health is Health.CANDIDATE and not s.initial]
        if candidates and data.draw(st.integers(0, 40)) == 0:
            candidates[0].reject("by the test")
    assert added == [s for s in range(how["start"] + 1, run.step + 1) if s % every == 0]


# ---- little room


class LimitedRun:
    """A run with room for `copies`, as the snapshot manager drives the ring. `ranks`: the others hear one step later."""

    def __init__(self, every: int, reach: int, copies: int, certify_after: int, ranks: int = 1) -> None:
        self.ring, self.copies, self.certify_after, self.ranks = (
            ring_of(every, reach, copies),
            copies,
            certify_after,
            ranks,
        )
        self.step, self.most, self.in_progress = 0, 1, 0
        self.ring.add(snapshot(0, Health.CANDIDATE, initial=True))

    def commit(self, *, is_saved: bool = False, is_discarded: bool = False) -> None:
        self.step += 1
        ring = self.ring
        for s in ring:
            if s.health is Health.GOOD:
                s.is_settled = True
            elif s.health is Health.CANDIDATE and (self.step - s.step >= self.certify_after or s.initial):
                s.health, s.is_settled = Health.GOOD, self.ranks == 1
        is_due = ring.enabled and (self.step % ring.every_steps == 0 or ring.is_waiting)
        is_wanted = is_due and ring.has_room(self.step)
        if is_wanted or is_saved:
            ring.make_room(self.step, is_forced=is_saved)
            self.most = max(self.most, len(ring) + 1)
            if not is_discarded:
                ring.add(snapshot(self.step, Health.CANDIDATE))

    def good(self) -> list[int]:
        return [s.step for s in self.ring if s.health is Health.GOOD]


limited = st.fixed_dictionaries(
    {
        "every": st.integers(1, 12),
        "reach": st.integers(0, 300),
        "copies": st.integers(2, 9),
        "certify_after": st.integers(1, 30),
        "ranks": st.integers(1, 2),
    }
).map(lambda how: {**how, "reach": how["reach"] + how["every"]})


@given(limited, st.integers(1, 300), st.data())
@settings(max_examples=examples(120), deadline=None)
def test_never_more_copies_than_fit_and_never_without_a_good_one(how, steps, data):
    """Saves, rejections, discarded snapshots and rollbacks come at random."""
    run = LimitedRun(**how)
    if not run.ring.is_limited:
        return
    run.commit()
    assert run.good() == [0]
    for _ in range(steps):
        best, choice = run.good()[-1], data.draw(st.integers(0, 40))
        run.commit(is_saved=choice == 0, is_discarded=choice == 1)
        assert run.good()[-1] >= best
        assert run.most <= how["copies"]
        assert len(run.ring) <= how["copies"]
        candidates = [s for s in run.ring if s.health is Health.CANDIDATE]
        if choice == 2 and candidates:
            run.ring.drop(candidates[0])
        if choice == 3:
            run.step = data.draw(st.sampled_from(run.good()))
            run.ring.drop_after(run.step)


@given(limited)
@settings(max_examples=examples(60), deadline=None)
def test_the_ages_that_are_promised_are_those_of_a_run(how):
    rule = SnapshotRule(how["every"], how["reach"], how["copies"])
    if not rule.is_limited:
        return
    expected = ages(rule, how["certify_after"], ranks=how["ranks"])
    run, newest, oldest = LimitedRun(**how), [], []
    begin = 2 * (how["reach"] + how["certify_after"])
    for _ in range(4 * (how["reach"] + how["certify_after"] + how["every"])):
        run.commit()
        if run.step >= begin:
            newest.append(run.step - run.good()[-1])
            oldest.append(run.step - run.good()[0])
    slack = how["every"] + how["certify_after"]  # the last interval may not be over
    assert expected.newest - slack <= max(newest) <= expected.newest
    assert expected.reach[0] <= min(oldest) and max(oldest) <= expected.reach[1]
    assert min(oldest) <= expected.reach[0] + slack


@pytest.mark.parametrize(("every", "certify_after"), [(10, 10), (10, 3), (4, 10), (10, 25)])
def test_with_room_for_two_certification_sets_the_pace(every, certify_after):
    """One good snapshot, and one that waits for its certification: the next begins when the second is good."""
    run = LimitedRun(every, 1000, 2, certify_after)
    taken = []
    for _ in range(200):
        run.commit()
        newest = run.ring.snapshots[-1].step
        taken += [newest] if newest not in taken else []
        assert len(run.ring) <= 2
    pace = max(every, certify_after)
    assert taken == list(range(0, 201, every))[:1] + [every + n * pace for n in range((200 - every) // pace + 1)]


def test_more_room_reaches_further_back_and_the_newest_stay_at_the_cadence():
    found = [ages(SnapshotRule(10, 1000, copies), 10) for copies in range(2, 11)]
    assert all(each.newest == 19 for each in found)
    assert [each.reach for each in found[:3]] == [(10, 19), (20, 29), (30, 1009)]
    assert all(each.reach[0] >= 100 and each.reach[1] == 1009 for each in found[3:])


# ---- the message


def test_the_message_has_what_fits_what_that_means_and_what_would_give_more():
    rule = SnapshotRule(10, 1000, 3)
    text = describe_room([SnapshotRoom(17 * 10**9, 0, 60 * 10**9)], rule, 10)
    assert text == (
        "a snapshot takes 17.00 GB and 60.00 GB of host memory are allowed: 3 fit, one of them in the making; the newest "
        "good one is at most about 19 steps old, and a rollback in memory reaches 20 to 29 steps back; one further "
        "back needs a checkpoint; set [snapshot] memory_gb = 187, run fewer ranks on a host, or set place = "
        '"device" for all 11 snapshots'
    )


def test_the_message_names_the_rank_with_the_least_room():
    rooms = [SnapshotRoom(10, 5, 1000, "device"), SnapshotRoom(10**9, 10**9, 2 * 10**9, "device")]
    text = describe_room(rooms, SnapshotRule(10, 1000, 1), 10)
    assert text.startswith("rank 1: a snapshot takes 1.00 GB, frozen weights 1.00 GB, and 2.00 GB of device memory are")
    assert "1 fits and 2 are needed, so snapshots are off and nothing can be rolled back in memory" in text
    assert text.endswith('set [snapshot] memory_gb = 3 or place = "host" for 2')


def test_there_is_no_message_if_all_fit():
    assert describe_room([SnapshotRoom(10, 0, 1000)], SnapshotRule(10, 1000, 100), 10) is None


# ---- shares


def test_ranks_share_only_if_not_all_whole_snapshots_fit_and_more_shares_do():
    room = SnapshotRoom(80, 0, 300, share=10)
    assert should_share([room, room], 11)
    assert not should_share([room, room], 3), "all whole ones fit"
    assert not should_share([room, room._replace(share=0)], 11), "a rank that cannot share keeps all of it"
    assert not should_share([room, room._replace(share=80)], 11), "it would gain nothing"
    assert should_share([room._replace(allowed=15)] * 2, 11), "neither is enough, and fewer bytes are missing"


def test_the_message_about_shares_has_what_fits_whole_and_as_shares():
    room = SnapshotRoom(84 * 10**9, 0, 32 * 10**9, share=10 * 10**9).as_share()
    rule = SnapshotRule(10, 1000, room.copies)
    text = describe_room([room], rule, 10)
    assert text.startswith(
        "a snapshot takes 84.00 GB and 32.00 GB of host memory are allowed: 0 fit whole, so each rank keeps a share of "
        "10.00 GB, and a rollback gathers the shares; 3 fit, one of them in the making; "
    )
    assert text.endswith("set [snapshot] memory_gb = 110, or run on more hosts, for all 11 snapshots")
    text = describe_room([room._replace(allowed=12 * 10**9)], rule._replace(copies=1), 10)
    assert (
        "0 fit whole, and if each rank keeps a share of 10.00 GB, 1 fits and 2 are needed, so snapshots are off" in text
    )
    assert text.endswith("set [snapshot] memory_gb = 20, or run on more hosts, for 2")


@given(
    st.dictionaries(st.text(max_size=3), st.integers(0, 1000), max_size=40), st.lists(st.integers(0, 500), min_size=1)
)
def test_spread_is_even_to_the_largest_tensor_and_does_not_depend_on_the_order(sizes, loads):
    chosen = spread(sizes, loads)
    assert chosen == spread(dict(reversed(sizes.items())), loads)
    assert chosen.keys() == sizes.keys()
    ends = [load + sum(sizes[n] for n, rank in chosen.items() if rank == each) for each, load in enumerate(loads)]
    grown = [end for end, load in zip(ends, loads, strict=True) if end > load]
    assert not grown or max(grown) <= min(ends) + max(sizes.values())
