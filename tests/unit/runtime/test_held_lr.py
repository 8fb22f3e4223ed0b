"""An LR that is held after a jump: from which step on, by how much, and when the hold ends."""

from __future__ import annotations

import json

import pytest

from holdfast.core.base.types import CutLR, HoldLR
from holdfast.runtime.state.schedule import Interventions

JUMPED = 0.1
HOLD = HoldLR(max_lr=1e-3, ratio=0.01, from_step=300)


def applied(interventions: Interventions, lrs: dict[int, float]) -> dict[int, float]:
    """Return the LR of each update, given the LR that is set at each step."""
    used = {}
    for step, lr in lrs.items():
        used[step] = lr * interventions.lr_factor(lr, step)
        interventions.commit(lr, step)
    return used


def held() -> Interventions:
    interventions = Interventions()
    interventions.apply(HOLD)
    return interventions


def test_lr_before_the_jump_is_as_it_is_set_and_the_jump_is_held_back():
    lrs = {step: 1e-3 if step < 300 else JUMPED for step in range(290, 320)}
    used = applied(held(), lrs)
    assert set(used.values()) == {1e-3, JUMPED * 0.01}
    assert used[299] == 1e-3
    assert used[300] == pytest.approx(1e-3)


def test_hold_ends_when_the_lr_falls_back_in_one_step_and_the_step_itself_is_not_scaled():
    interventions = held()
    lrs = {step: JUMPED if 300 <= step < 350 else 1e-3 for step in range(290, 370)}
    used = applied(interventions, lrs)
    assert all(lr == pytest.approx(1e-3) for lr in used.values())
    assert interventions.hold is None
    assert applied(interventions, {370: JUMPED}) == {370: JUMPED}, "another jump is not this one"


def test_schedule_that_decays_from_its_higher_level_stays_scaled():
    interventions = held()
    lrs = {299 + n: JUMPED * 0.98**n for n in range(1, 400)}
    used = applied(interventions, lrs)
    assert interventions.hold is HOLD
    assert used[698] == pytest.approx(lrs[698] * 0.01)


def test_fall_to_a_level_above_the_one_that_is_held_does_not_end_it():
    interventions = held()
    applied(interventions, {300: JUMPED, 301: JUMPED, 302: JUMPED / 5})
    assert interventions.hold is HOLD


def test_hold_and_cut_are_multiplied():
    interventions = held()
    interventions.apply(CutLR(factor=0.5, ramp_steps=10))
    assert interventions.lr_factor(JUMPED, 300) == 0.005
    assert interventions.lr_factor(1e-3, 299) == 0.5


@pytest.mark.parametrize("at", [295, 300, 301, 330, 349, 350, 351])
def test_state_through_json_text_at_any_step_gives_the_same_lrs(at):
    lrs = {step: JUMPED if 300 <= step < 350 else 1e-3 for step in range(290, 370)}
    interventions, again = held(), Interventions()
    before = applied(interventions, {step: lr for step, lr in lrs.items() if step < at})
    again.load_state_dict(json.loads(json.dumps(interventions.state_dict())))
    after = applied(again, {step: lr for step, lr in lrs.items() if step >= at})
    assert before | after == applied(held(), lrs)
