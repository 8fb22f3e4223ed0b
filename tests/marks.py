"""Marks for some of a test's cases. See conftest.py for what runs where."""

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import Any

import pytest
from hypothesis import settings


def slow(*cases: Any) -> list[Any]:
    """Return these cases of a parametrized test, left to `make test-all`."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def examples(count: int) -> int:
    """Return how many examples a property test draws: `count` in `make test-all`, a fifth of them in `make test`."""
    return count if settings.default.max_examples > 100 else count // 5


def covering(cases: Sequence[Sequence[Hashable]], strength: int) -> set[int]:
    """Return the numbers of a few cases in which every combination of `strength` values occurs that occurs in any case.

    The rule is greedy: take the case with the most combinations not yet covered, until nothing is left to cover. Of several
    such cases take the one whose values were used least so far, then the first.
    """
    covers = [set(combinations(case, min(strength, len(case)))) for case in cases]
    missing, used = set().union(*covers), Counter[Hashable]()
    chosen: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda n: (len(covers[n] & missing), -sum(used[value] for value in cases[n])))
        chosen.add(best)
        used.update(cases[best])
        missing -= covers[best]
    return chosen
