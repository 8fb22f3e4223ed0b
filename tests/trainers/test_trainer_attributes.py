"""Attributes of objects without a state_dict go back with the run, if they are plain; others that change are found."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.trainers.attributes import Attributes, pack, unpack


def owner() -> Any:
    return SimpleNamespace(
        count=0, seen=[], best=torch.tensor(float("inf")), by_name={"a": 1.0}, every=10, other=object()
    )


def test_plain_attributes_are_copied_and_restored():
    thing = owner()
    state = Attributes(thing)
    thing.count, thing.best = 3, torch.tensor(float("nan"))
    thing.seen.append(1.5)
    saved = unpack(pack(state.state_dict()))
    thing.count, thing.best, thing.late = 4, torch.tensor(2.0), "made later"
    thing.seen.append(2.5)
    thing.by_name["a"] = 7.0
    state.load_state_dict(saved)
    assert (thing.count, thing.seen, thing.by_name, thing.every) == (3, [1.5], {"a": 1.0}, 10)
    assert torch.isnan(thing.best) and not hasattr(thing, "late")


def test_a_setting_that_another_process_has_changed_stays_changed():
    before, after = owner(), owner()
    state = Attributes(before)
    before.count = 5
    after.every = 20
    Attributes(after).load_state_dict(state.state_dict())
    assert (after.count, after.every) == (5, 20)


def test_a_long_list_goes_back_to_its_length():
    thing = owner()
    state = Attributes(thing)
    thing.seen.extend(range(300))
    saved = state.copy_state()
    thing.seen.extend(range(50))
    state.load_state_dict(saved)
    assert thing.seen == list(range(300))


def test_a_long_list_of_another_process_is_left_as_it_is():
    before, after = owner(), owner()
    state = Attributes(before)
    before.seen.extend(range(300))
    Attributes(after).load_state_dict(state.state_dict())
    assert after.seen == []


@pytest.mark.parametrize(
    "thing", [SimpleNamespace(count=0), random.Random(0), {object(): 1}], ids=["object", "rng", "dict"]
)
def test_what_is_not_restored_and_changes_is_found_once(thing):
    class Owner:
        def __init__(self) -> None:
            self.thing = thing

    state = Attributes(Owner())
    assert state.changed() == []
    if isinstance(thing, dict):
        thing[object()] = 2
    elif isinstance(thing, random.Random):
        thing.random()
    else:
        thing.count += 1
    assert (state.changed(), state.changed()) == (["thing"], [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_packed_tensors_come_back_bit_for_bit(dtype):
    value = {"a": [torch.tensor([0, 1, 3]).to(dtype), 2], "b": (None, "text")}
    back = unpack(pack(value))
    assert back["a"][0].dtype == dtype and torch.equal(back["a"][0], value["a"][0])
    assert (back["a"][1], back["b"]) == (2, (None, "text"))
