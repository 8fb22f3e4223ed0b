"""The rule by which `quick_cases` chooses cases for `make test`."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from marks import covering, slow


@pytest.mark.parametrize("sizes", [(2, 3), (5, 2, 4), (2, 2, 2, 2), (7,)])
@pytest.mark.parametrize("strength", [1, 2])
def test_every_combination_occurs_in_the_chosen_cases_and_few_cases_are_chosen(sizes, strength):
    cases = [list(enumerate(case)) for case in product(*map(range, sizes))]
    chosen = covering(cases, strength)
    strength = min(strength, len(sizes))
    covered = {combination for number in chosen for combination in combinations(cases[number], strength)}
    assert covered == {combination for case in cases for combination in combinations(case, strength)}
    fewest = sorted(sizes)[-1] if strength == 1 else sorted(sizes)[-1] * sorted(sizes)[-2]
    assert fewest <= len(chosen) <= 1.5 * fewest
    assert chosen == covering(cases, strength)


def test_values_are_used_about_equally_often():
    cases = [list(enumerate(case)) for case in product(range(6), range(2))]
    chosen = covering(cases, 1)
    assert sorted(cases[number][1][1] for number in chosen) == [0, 0, 0, 1, 1, 1]


def test_slow_marks_each_case():
    cases = slow("a", ("b", 2))
    assert [case.values for case in cases] == [("a",), ("b", 2)]
    assert [mark.name for case in cases for mark in case.marks] == ["slow", "slow"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("one", [1, 2, 3])
@pytest.mark.parametrize("other", [1, 2])
def test_a_case_left_to_test_all_is_marked_slow(request, one, other):
    """Only three of the six cases run in `make test`."""
    cases = [item for item in request.session.items if item.originalname == request.node.originalname]
    assert request.node in cases
    if request.config.option.markexpr == "not slow and not soak":
        assert len(cases) == 3
