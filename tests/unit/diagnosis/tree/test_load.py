"""tree.toml is checked as a whole, and one error lists every mistake."""

from __future__ import annotations

import importlib.resources

import pytest

from holdfast.core.base.errors import ConfigError
from holdfast.diagnosis.tree.load import load_tree, parse_tree

TEXT = (importlib.resources.files("holdfast.diagnosis.tree") / "tree.toml").read_text()


def errors(old: str, new: str, text: str = TEXT) -> list[str]:
    assert old in text
    with pytest.raises(ConfigError) as caught:
        parse_tree(text.replace(old, new, 1))
    return caught.value.errors


def test_the_tree_that_comes_with_it_is_right():
    assert load_tree().version == 1
    assert len(load_tree().leaf) > 60


def test_an_edge_that_leads_nowhere_is_named():
    found = errors('no = "grad_nonfinite"', 'no = "nowhere"')
    assert "node.gradient_exploded: no leads to nothing: 'nowhere'" in found


def test_a_question_without_a_function_is_named_with_those_there_are():
    found = errors("[question.is_bf16]", "[question.is_fp8]")
    assert any(e.startswith("question.is_fp8: no such function; the functions are ") and "is_bf16" in e for e in found)
    assert "node.nan_bf16: no such question: 'is_bf16'" in found


def test_thresholds_must_be_those_the_question_reads():
    found = errors("thresholds = { share = 0.1, in_a_row = 10 }", "thresholds = { shares = 0.1, in_a_row = 10 }")
    assert found == [
        "question.overflows_persist: threshold 'share' is missing",
        "question.overflows_persist: threshold 'shares' is never read",
    ]


def test_a_circle_is_shown():
    found = errors('no = "none_of_these"', 'no = "loss_nonfinite"')
    assert any(e.startswith("the edges form a cycle: ") and "loss_nonfinite" in e for e in found)


def test_a_leaf_nobody_reaches_is_named():
    found = errors('yes = "epoch_turn"', 'yes = "hard_batch"')
    assert found == ["leaf.epoch_turn is never reached"]


def test_every_missing_edge_is_named():
    text = TEXT.replace('no = "nan_zero_gradient", unknown = "nan_zero_gradient"', 'no = "nan_zero_gradient"', 1)
    found = errors('yes = "nan_in_input", ', "", text)
    assert found == [
        "node.loss_nonfinite: Object missing required field `yes`",
        "node.nan_in_input: Object missing required field `unknown`",
    ]


def test_everything_wrong_is_in_one_error():
    text = TEXT.replace('no = "grad_nonfinite"', 'no = "nowhere"', 1).replace(
        "downsampled = 0.85", "downsampled = 1.5", 1
    )
    text = text.replace('confirm = "print(optimizer)"', 'confirm = "print({optimizer})"', 1)
    text = text.replace('kinds = ["hang"]', 'kinds = ["hung"]', 1)
    found = errors("expects = { at_epoch_boundary", "expects = { at_midnight = 'yes', at_epoch_boundary", text)
    assert len(found) >= 5
    assert any("downsampled = 1.5" in e for e in found)
    assert any("allowed in braces: start, end, before" in e for e in found)
    assert any("'hung'" in e for e in found)
    assert any("at_midnight" in e for e in found)


def test_a_leaf_abstains_exactly_when_its_status_is_unknown():
    found = errors("abstains = true\n", "")
    assert found == ["leaf.nan_origin_open: a leaf abstains if and only if its status is unknown"]


def test_what_is_not_toml_is_an_error_of_ours():
    with pytest.raises(ConfigError):
        parse_tree("version = ")
