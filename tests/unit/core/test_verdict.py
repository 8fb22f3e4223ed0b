"""The findings of one step, merged into one verdict."""

from __future__ import annotations

import itertools

import pytest
from builders import finding, signal

from holdfast.core.base.types import Flag, Kind, Severity, family
from holdfast.core.decide.verdict import merge


def test_no_finding_is_no_verdict():
    assert merge(signal(5), []) is None


def test_one_finding_is_the_verdict():
    found = finding(Kind.GRAD_SPIKE, Severity.SKIP, step=5, onset=3)
    verdict = merge(signal(5), [found])
    assert (verdict.step, verdict.kind, verdict.severity, verdict.onset) == (5, Kind.GRAD_SPIKE, Severity.SKIP, 3)
    assert verdict.findings == (found,)


def test_worst_finding_leads_in_whatever_order_they_come_and_none_is_lost():
    found = [
        finding(Kind.SCALE_COLLAPSE, Severity.NOTE, step=5, onset=1),
        finding(Kind.GRAD_SPIKE, Severity.SKIP, step=5, onset=2),
        finding(Kind.LOSS_SPIKE, Severity.ROLLBACK, step=5, onset=4),
    ]
    for order in itertools.permutations(found):
        verdict = merge(signal(5), order)
        assert (verdict.kind, verdict.severity, verdict.onset) == (Kind.LOSS_SPIKE, Severity.ROLLBACK, 4)
        assert verdict.findings == order


def test_of_equally_bad_findings_the_first_names_it_and_the_earliest_onset_counts():
    found = [finding(Kind.GRAD_SPIKE, step=5, onset=5), finding(Kind.LOSS_SPIKE, step=5, onset=2)]
    verdict = merge(signal(5), found)
    assert (verdict.kind, verdict.onset) == (Kind.GRAD_SPIKE, 2)


@pytest.mark.parametrize("flag", list(Flag))
def test_step_that_the_gate_flagged_was_vetoed(flag):
    assert merge(signal(5, flags=int(flag)), [finding()]).vetoed
    assert not merge(signal(5, flags=0), [finding()]).vetoed


def test_verdict_is_about_the_step_that_was_settled_and_not_the_one_a_finding_names():
    assert merge(signal(9), [finding(step=5)]).step == 9


def test_kinds_that_share_a_cause_share_a_family_and_any_other_is_its_own():
    shared = {
        Kind.NONFINITE_LOSS: "nonfinite",
        Kind.NONFINITE_GRAD: "nonfinite",
        Kind.NONFINITE_STATE: "state",
        Kind.SCALE_COLLAPSE: "state",
        Kind.LOSS_SPIKE: "spike",
        Kind.GRAD_SPIKE: "spike",
        Kind.DIVERGENCE: "divergence",
        Kind.DESYNC: "corruption",
        Kind.SILENT_CORRUPTION: "corruption",
        Kind.STATE_JUMP: "jump",
        Kind.STATISTICS_JUMP: "statistics",
    }
    assert {kind: family(kind) for kind in Kind} == {kind: shared.get(kind, kind.value) for kind in Kind}
    assert family("loss_spike") == "spike", "as read back from a journal"
    assert family("my_own") == "my_own"
