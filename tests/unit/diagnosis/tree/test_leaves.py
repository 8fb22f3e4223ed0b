"""Every leaf is reached by a run, and its verdict says what it must."""

from __future__ import annotations

import pytest
from leaf_cases import CASES

from holdfast.diagnosis.diagnose import diagnose
from holdfast.diagnosis.find import episodes
from holdfast.diagnosis.tree import walk
from holdfast.diagnosis.tree.load import load_tree

SIGNS = {"yes": "+", "no": "-", "unknown": "?"}


def test_every_leaf_has_a_case():
    assert set(CASES) == set(load_tree().leaf)


@pytest.mark.parametrize("name", CASES)
def test_run_reaches_leaf(name, monkeypatch):
    tree, case, leaf = load_tree(), CASES[name], load_tree().leaf[name]
    table, episode = case.build()
    if episode is None:
        conclusion = next(rule for rule in walk.check_rules(tree, table) if rule.id == name)
    else:
        conclusion = walk.walk(tree, table, episode)
        trail = " ".join(SIGNS[step.answer] + step.question for step in conclusion.trail)
        rivals = " ".join(rival.leaf for rival in conclusion.rivals)
        assert (conclusion.id, trail, rivals) == (name, case.trail, case.rivals)
    counts = [len(sentences) for sentences in (conclusion.evidence, conclusion.against, conclusion.unchecked)]
    weighed = f"{leaf.status} {conclusion.confidence}: {counts[0]} for, {counts[1]} against, {counts[2]} unchecked"
    is_note = case.verdict.startswith("note ")
    assert weighed == case.verdict.removeprefix("note ")
    assert set(leaf.kinds) == set(case.kinds.split())

    monkeypatch.setattr(episodes, "find", lambda table: ([episode] if episode else [], []))
    report = diagnose(table)
    if is_note:
        shown = next(note for note in report.notes if note.leaf == name)
        cause, _, evidence = shown.text.partition(". ")
        assert report.verdicts == []
    else:
        shown = next(verdict for verdict in report.verdicts if verdict.leaf == name)
        cause, evidence = shown.cause, "; ".join(shown.evidence)
        assert shown.status == leaf.status
    assert (shown.kind, shown.confidence) == (case.kinds.split()[0], conclusion.confidence)
    assert case.cause in cause
    assert case.evidence in evidence
    assert shown.action and shown.confirm and "{" not in shown.action + shown.confirm


@pytest.mark.parametrize("name", [name for name, leaf in load_tree().leaf.items() if leaf.abstains])
def test_leaf_that_abstains_names_no_cause(name):
    assert load_tree().leaf[name].cause == "not established"


def test_level_loss_without_an_episode_is_a_plateau():
    table, _ = CASES["plateau"].build()
    (conclusion,) = walk.check_rules(load_tree(), table)
    assert (conclusion.id, conclusion.confidence) == ("plateau", 0.7)


def test_growing_gap_to_validation_supports_a_worse_evaluation():
    table, _ = CASES["overfitting"].build()
    (conclusion,) = [rule for rule in walk.check_rules(load_tree(), table) if rule.id == "loss_fine_eval_worse"]
    assert (len(conclusion.evidence), conclusion.against, conclusion.confidence) == (2, [], 0.6)
