"""Every leaf is reached from numbers, by the questions themselves."""

from __future__ import annotations

import pytest
from leaf_cases import CASES

from holdfast.diagnosis.tree import walk
from holdfast.diagnosis.tree.load import load_tree


def test_every_leaf_has_a_case():
    assert set(CASES) == set(load_tree().leaf)


@pytest.mark.parametrize("leaf", CASES)
def test_numbers_lead_to_the_leaf(leaf):
    case = CASES[leaf]()
    if case.episode is None:
        (found,) = [w for w in walk.check_rules(load_tree(), case.table) if w.id == leaf]
    else:
        found = walk.walk(load_tree(), case.table, case.episode)
        assert case.episode.kind in found.leaf.kinds
    assert found.id == leaf, [(s.question, s.answer, s.sentence) for s in found.trail]
    assert found.evidence or found.leaf.abstains
    assert 0.0 < found.confidence <= 1.0
    assert found.action and found.confirm and "{" not in found.action + found.confirm
    if found.leaf.abstains:
        assert found.leaf.cause == "not established"
        assert found.unchecked or leaf in ("none_of_these", "slow_open", "hang_open", "oom_open")
