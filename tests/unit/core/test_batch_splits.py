"""Learned splits: by shape, grown back cautiously, saved, and safe against what a file may hold."""

from __future__ import annotations

import pytest

from holdfast.core.decide.batch_splits import ANY_SHAPE, BatchSplits, journaled_splits


def splits(grow_after: int = 4) -> BatchSplits:
    made = BatchSplits()
    made.grow_after = grow_after
    return made


def test_split_holds_for_the_shape_and_every_larger_one():
    learned = splits()
    learned.learn("8x512,8", 2)
    learned.learn("8x2048,8", 8)
    cases = {"8x512,8": 2, "8x511,8": 1, "16x512,16": 2, "8x4096,8": 8, "8x512": 1, "8x512,8x1": 1, "": 1}
    assert {shape: learned.parts_for(shape) for shape in cases} == cases


def test_ranks_take_the_largest_split_whatever_the_shape():
    learned = splits()
    learned.is_for_ranks = True
    learned.learn("8x512", 2)
    learned.learn(ANY_SHAPE, 4)
    assert learned.parts_for("1x1") == learned.parts_for("9x999,3") == 4


def test_trials_wait_twice_as_long_after_each_failure():
    learned, waits = splits(), []
    for _ in range(3):
        learned.learn("8", 2)
        steps = 0
        while learned.parts_for("8") == 2:
            steps += 1
            changed = learned.commit()
        waits.append(steps)
        assert [(c.shape, c.before, c.parts) for c in changed] == [("8", 2, 1)]
    assert waits == [4, 8, 16] and not learned.is_active


def test_steps_of_other_shapes_do_not_count_as_clean():
    learned = splits()
    learned.learn("8", 2)
    for _ in range(50):
        learned.parts_for("4")
        assert learned.commit() == []


def test_zero_never_grows_back():
    learned = splits(0)
    learned.learn("8", 4)
    for _ in range(1000):
        assert learned.parts_for("8") == 4 and learned.commit() == []


def test_state_makes_a_round_trip_and_keeps_what_this_process_knows():
    learned = splits()
    learned.learn("8", 4)
    learned.parts_for("8")
    learned.commit()
    other = splits()
    other.learn("9", 2)
    other.load_state_dict(learned.state_dict())
    assert other.state_dict() == {**learned.state_dict(), "9": {"parts": 2, "wait": 4, "clean_steps": 0}}
    other.learn("8", 16)
    other.load_state_dict(learned.state_dict())
    assert other.parts_for("8") == 16


@pytest.mark.parametrize(
    "state", [None, [], "x", {"8": 3}, {"8": {"parts": -1}}, {"8": {"parts": 10**12}}, {3: {"parts": 2}}, {"8": {}}]
)
def test_forged_state_is_left_out(state):
    learned = splits()
    learned.load_state_dict(state)
    assert not learned.is_active and learned.parts_for("8") == 1


def test_odd_shapes_from_a_file_match_nothing_but_themselves():
    learned = splits()
    learned.load_state_dict({"x": {"parts": 2}, "axb": {"parts": 4}})
    assert learned.parts_for("8x8") == 1 and learned.parts_for("axb") == 4


def test_shapes_are_bounded():
    learned = splits()
    for n in range(1000):
        learned.learn(f"{1000 - n}x3", 2)
    assert len(learned.state_dict()) == 256


def test_journal_has_the_last_split_of_each_shape():
    events = [
        {"event": "action", "action": "split", "shape": "8", "parts": 2},
        {"event": "started_over"},
        {"event": "action", "action": "split", "shape": "8", "parts": 4},
        {"event": "action", "action": "split", "shape": "9", "parts": 8},
        {"event": "action", "action": "split", "shape": "8", "parts": 1},
        {"event": "action", "action": "skip", "shape": "7", "parts": 2},
    ]
    assert journaled_splits(events) == {"8": 1, "9": 8}
    learned = splits()
    learned.adopt(journaled_splits(events))
    assert learned.parts_for("8") == 1 and learned.parts_for("9") == 8
