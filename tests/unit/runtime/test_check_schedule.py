"""The pipeline asks for an integrity check only from `next_check` on. No step that has a check may be passed over."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.base.config import IntegritySection
from holdfast.core.decide.corruption import ReplicaClass
from holdfast.runtime.integrity.state_checks import StateChecks
from two_ranks import TwoRanks


class Copies(TwoRanks):
    """Both hold the same."""

    def classes(self, tensors: Any) -> list[ReplicaClass]:
        return [ReplicaClass(tuple(tensors), ((0, 1),))]


class Pipeline:
    """Calls the checks by the pipeline's rule, and records which steps had one."""

    def __init__(self, replicas: int, window: int) -> None:
        config = IntegritySection(replicas_every=replicas, between_updates_every=window)
        tensors = {"model.weight": torch.ones(2)}
        self.checks = StateChecks(lambda: tensors, config, Copies(), Copies())
        self.checked: list[int] = []
        self.remembered: list[int] = []

    def step(self, number: int, *, is_vetoed: bool = False) -> None:
        due = self.checks.due(number)
        had_after = self.checks._after is not None
        row = None
        if number >= self.checks.next_check:
            row = self.checks.before_update(number)
        assert (row is not None) == (due.replicas or due.window), f"step {number}: {due}, next {self.checks.next_check}"
        if row is not None:
            assert len(row) == due.replicas + due.window
            self.checked.append(number)
        if due.window and had_after:
            self.remembered.append(number)
        if is_vetoed:
            self.checks.forget()
            return
        if number + 1 >= self.checks.next_check:
            self.checks.after_update(number)
        assert (self.checks._after is not None) == self.checks.due(number + 1).window


intervals = st.one_of(st.just(0), st.integers(1, 9))


@given(
    intervals, intervals, st.integers(1, 30), st.lists(st.tuples(st.integers(1, 25), st.integers(0, 25)), max_size=4)
)
def test_no_step_that_has_a_check_is_passed_over(replicas, window, first, stretches):
    """A run resumes at any step, trains for a stretch, tries a step twice, rolls back, and so on."""
    run, number = Pipeline(replicas, window), first
    for length, back in [*stretches, (25, 0)]:
        for _ in range(length):
            run.step(number)
            number += 1
        run.step(number, is_vetoed=True)
        if back:
            number = max(1, number - back)
            run.checks.rolled_back_to(number - 1)


def test_checks_come_in_the_first_two_steps_of_a_process_and_then_every_so_many():
    run = Pipeline(10, 4)
    for number in range(7, 25):
        run.step(number)
    assert run.checked == [7, 8, 10, 12, 16, 20, 24]
    assert run.remembered == [8, 12, 16, 20, 24], "in the first step there is no update to compare with"
    run.checks.rolled_back_to(12)
    run.checked.clear()
    for number in range(13, 21):
        run.step(number)
    assert run.checked == [13, 14, 16, 20]


def test_a_checked_step_that_is_tried_again_is_checked_again():
    run = Pipeline(0, 4)
    for number, is_vetoed in ((1, False), (2, False), (3, False), (4, True), (4, True), (4, False), (5, False)):
        run.step(number, is_vetoed=is_vetoed)
    assert run.checked == [1, 2, 4, 4, 4]
    assert run.remembered == [2, 4], "only the first try follows right after an update"


def test_without_any_check_none_is_ever_due():
    run = Pipeline(0, 0)
    for number in range(1, 30):
        run.step(number)
    assert run.checked == []
    assert run.checks.next_check > 10**9
