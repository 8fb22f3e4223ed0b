"""How a walk weighs evidence: for, against, unchecked questions, and limits of the log."""

from __future__ import annotations

import numpy as np
import pytest
from leaf_cases import CASES, jump
from synthetic import N, cosine, episode, healthy_loss, healthy_norm, put, run

from holdfast.diagnosis.model.table import Limit
from holdfast.diagnosis.tree import walk
from holdfast.diagnosis.tree.load import load_tree


def walked(leaf):
    return walk.walk(load_tree(), *CASES[leaf].build())


def test_gradient_that_leads_speaks_for_an_explosion_and_against_a_bad_batch():
    found = walked("gradient_explosion")
    step = next(s for s in found.trail if s.question == "gradient_leads")
    assert step.answer == "yes"
    assert step.numbers["lead"] == 4
    assert step.numbers["growth"] == pytest.approx(145 / 0.24, rel=0.1)
    assert any("for 4 records before the loss jumps" in e for e in found.evidence)


def test_gradient_and_loss_that_jump_together_are_no_explosion():
    made, where = jump(300, 300, 5.0, "spike_recovered", grad_norm=put(healthy_norm(), 300, 30.0))
    assert walk.Interview(load_tree(), made, where).ask("gradient_leads").value == "no"


def test_forward_overflow_is_not_answered_with_loss_scaling():
    leaf = load_tree().leaf["fp16_forward_overflow"]
    assert "bf16" in leaf.action and "does not fix" in leaf.action


def test_inf_gradient_under_a_dynamic_scaler_is_no_incident():
    assert walked("scaler_finds_level").leaf.incident is False


@pytest.mark.parametrize(
    "leaf", ["nan_origin_open", "spike_open", "elevation_open", "silent_open", "grad_nonfinite_open"]
)
def test_unknown_answers_name_no_cause(leaf):
    found = walked(leaf)
    assert found.leaf.cause == "not established"
    assert found.leaf.status == "unknown"
    assert found.unchecked


def test_unknown_answers_lower_the_confidence_in_a_cause():
    whole = walk.walk(load_tree(), *jump(300, 310, 2.0, "spike_recovered", lr=put(cosine(), slice(300, None), 3e-3)))
    made, where = jump(300, N - 1, 1.0, "spike", lr=None)
    assert whole.id == "schedule_jump"
    found = walk.walk(load_tree(), made, where)
    assert found.id == "persistent_elevation"
    factor = load_tree().confidence.unknown ** sum(s.answer == "unknown" for s in found.trail)
    assert factor < 1
    assert found.confidence == pytest.approx(0.5 * 0.9 * factor, abs=1e-3)
    assert any("learning rate" in u for u in found.unchecked)


def test_limits_of_the_log_lower_the_confidence():
    made, where = jump(300, 300, 2.0, "spike_recovered")
    sure = walk.walk(load_tree(), made, where).confidence
    made.limits.append(Limit("averaged", "each value is the mean of 10 steps"))
    assert walk.walk(load_tree(), made, where).confidence == pytest.approx(
        sure * load_tree().limits["averaged"], abs=1e-3
    )


def test_confidence_has_a_lower_bound():
    made, where = jump(300, 300, 2.0, "spike_recovered")
    made.limits += [Limit("few_points", "few records")] * 20
    assert walk.walk(load_tree(), made, where).confidence == 0.05


def test_jump_is_measured_against_a_hundred_records():
    made, where = jump(300, 300, 2.0, "spike_recovered")
    assert "(median of 100 records)" in walk.Interview(load_tree(), made, where).ask("loss_jumped").sentence


def test_a_limit_that_does_not_touch_the_kind_changes_nothing():
    table, episode = CASES["leak"].build()
    sure = walk.walk(load_tree(), table, episode).confidence
    table.limits.append(Limit("no_grad_norm", "no gradient norm"))
    assert walk.walk(load_tree(), table, episode).confidence == sure


def test_evidence_against_a_leaf_lowers_its_confidence():
    norm = put(healthy_norm(), 300, 30.0)
    prints = np.arange(N) * 7919.0 + 2**30
    calm, where = jump(300, 300, 2.0, "spike_recovered", batch_fingerprint=put(prints, 300, prints[280]))
    wild, _ = jump(300, 300, 2.0, "spike_recovered", batch_fingerprint=put(prints, 300, prints[280]), grad_norm=norm)
    a, b = walk.walk(load_tree(), calm, where), walk.walk(load_tree(), wild, where)
    assert a.id == b.id == "loader_repeats"
    assert not a.against
    assert len(b.against) == 1 and "times its mean" in b.against[0]
    assert b.confidence == pytest.approx(a.confidence * load_tree().confidence.against, abs=1e-3)


def test_a_rule_without_its_column_is_listed_only_where_it_matters():
    made, where = jump(300, N - 1, 1.0, "divergence")
    assert any("layers" in u for u in walk.walk(load_tree(), made, where).unchecked)
    made = run(loss=put(run().columns["loss"], 300, float("nan")))
    assert not any(
        "gradient norms of layers" in u for u in walk.walk(load_tree(), made, episode(made, "nan", 300, 300)).unchecked
    )


def test_healthy_run_fires_no_rule():
    assert [w.id for w in walk.check_rules(load_tree(), run())] == []


def test_numbers_of_every_answer_are_on_the_trail():
    for leaf in ("fp32_log_zero", "learning_rate_or_data", "leak"):
        found = walked(leaf)
        assert all(step.sentence for step in found.trail)
        assert any(step.numbers for step in found.trail)


def test_a_run_that_left_its_best_level_long_before_is_an_explosion_not_an_operation():
    loss = healthy_loss()
    loss[200:] += 3.0
    loss[350:] = float("nan")
    made = run(loss=loss, facts={"precision": "fp32"})
    found = walk.walk(load_tree(), made, episode(made, "nan", 350, N - 1))
    assert found.id == "explosion_to_nan"
    assert any("had left its best level" in e for e in found.evidence)


def test_gradients_that_overflow_inside_a_slow_rise_do_not_hide_it():
    loss = healthy_loss()
    loss[200:] += np.linspace(0.0, 0.6, 200)
    norm = healthy_norm() * np.r_[np.ones(200), np.geomspace(1.0, 1e6, 200)]
    made = run(loss=loss, grad_norm=put(norm, slice(390, None), float("inf")))
    assert walk.walk(load_tree(), made, episode(made, "silent_divergence", 210, N - 1)).id == "learning_rate_or_data"
