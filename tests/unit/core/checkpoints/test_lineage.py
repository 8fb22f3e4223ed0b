"""Which saved states a run has come through: branches that end where the next begins, some of them at once."""

from __future__ import annotations

import json
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.checkpoints.lineage import Fork, Lineage
from marks import examples

OFTEN = settings(max_examples=examples(200), deadline=None, derandomize=True)


def test_run_that_never_went_back_is_one_branch_from_step_0():
    lineage = Lineage()
    assert lineage.branch == 0
    assert all(lineage.holds(0, step) for step in (0, 1, 10**12))
    assert not lineage.holds(0, -1)
    assert not lineage.holds(1, 0)


def test_branch_that_was_left_is_held_up_to_the_fork_and_no_further():
    lineage = Lineage().forked(1, 900)
    assert lineage.branch == 1
    assert [step for step in (0, 899, 900, 901, 950) if lineage.holds(0, step)] == [0, 899, 900]
    assert [step for step in (0, 899, 900, 901, 950) if lineage.holds(1, step)] == [900, 901, 950]


def test_same_step_of_two_branches_is_two_states():
    lineage = Lineage().forked(1, 900)
    assert not lineage.holds(0, 950)
    assert lineage.holds(1, 950)


def test_branch_of_no_length_is_held_at_its_one_step():
    lineage = Lineage().forked(1, 900).forked(2, 900)
    assert [(b, s) for b in (0, 1, 2) for s in (899, 900, 901) if lineage.holds(b, s)] == [
        (0, 899), (0, 900), (1, 900), (2, 900), (2, 901),
    ]  # fmt: skip


def test_fork_at_step_0_leaves_only_the_start_of_the_first_branch():
    lineage = Lineage().forked(3, 0)
    assert lineage.holds(0, 0)
    assert not lineage.holds(0, 1)
    assert lineage.holds(3, 0) and lineage.holds(3, 5)


def test_going_back_beyond_a_fork_forgets_the_branch_in_between():
    state = Lineage()  # of the state after step 300, saved on branch 0
    assert state.forked(1, 900).holds(1, 950)
    deeper = state.forked(2, 300)
    assert deeper.forks == (Fork(0, 0), Fork(2, 300))
    assert not deeper.holds(0, 301)
    assert not deeper.holds(1, 950)
    assert deeper.holds(2, 301)


def test_forking_leaves_the_lineage_it_came_from_as_it_was():
    lineage = Lineage()
    lineage.forked(1, 5)
    assert lineage == Lineage((Fork(0, 0),))


def test_lineage_survives_json():
    lineage = Lineage().forked(1, 5).forked(4, 5).forked(7, 123)
    text = json.dumps(msgspec.to_builtins(lineage))
    assert msgspec.convert(json.loads(text), Lineage) == lineage


@pytest.mark.parametrize("depth", [1, 10, 2000])
def test_deep_chains_hold_each_branch_between_its_forks(depth):
    lineage = Lineage()
    for n in range(1, depth + 1):
        lineage = lineage.forked(n, 10 * n)
    for n in {0, depth // 2, depth - 1}:
        assert [s for s in range(10 * n - 1, 10 * n + 12) if lineage.holds(n, s)] == list(range(10 * n, 10 * n + 11))
    assert lineage.holds(depth, 10**9)
    assert not lineage.holds(depth + 1, 10**9)


@OFTEN
@given(seed=st.integers(0, 10**6), lives=st.integers(1, 30))
def test_a_state_is_held_exactly_if_the_run_walked_through_it(seed, lives):
    """A run walks, saves with the lineage it has then, and goes back to any state it ever saved."""
    random = Random(seed)
    # For each state saved: its lineage, and the set of (branch, step) that were walked through to reach it.
    lineage, step, walked = Lineage(), 0, {(0, 0)}
    saved = [(lineage, step, frozenset(walked))]
    for branch in range(1, lives + 1):
        for _ in range(random.randrange(6)):
            step += 1
            walked.add((lineage.branch, step))
            if random.random() < 0.5:
                saved.append((lineage, step, frozenset(walked)))
        for b in range(branch + 1):
            for s in range(step + 8):
                # A branch is open at its end: what comes after is still to be walked on the last one.
                expected = (b, s) in walked or (b == lineage.branch and s > step)
                assert lineage.holds(b, s) == expected
        state, step, came = random.choice(saved)
        lineage, walked = state.forked(branch, step), {*came, (branch, step)}
