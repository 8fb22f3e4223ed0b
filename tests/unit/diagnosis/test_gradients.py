"""Gradient episodes while the loss is finite."""

from __future__ import annotations

import math

import numpy as np
import pytest
from synthetic import N, healthy_loss, healthy_norm, put, run, table

from holdfast.diagnosis.find import episodes, gradients
from holdfast.diagnosis.model.table import Event

NAN = math.nan


def found(**columns):
    return [(one.kind, one.first, one.last) for one in gradients.find(run(**columns))]


def times(where, by):
    norm = healthy_norm()
    norm[where] *= by
    return norm


@pytest.mark.parametrize("value", [NAN, math.inf])
def test_a_norm_that_is_not_finite_under_a_finite_loss(value):
    assert found(grad_norm=put(healthy_norm(), 300, value)) == [("grad_nonfinite", 300, 300)]
    assert found(grad_norm=put(healthy_norm(), slice(300, 320), value)) == [("grad_nonfinite", 300, 319)]
    far = put(put(healthy_norm(), 100, value), 300, value)
    assert found(grad_norm=far) == [("grad_nonfinite", 100, 100), ("grad_nonfinite", 300, 300)]


def test_under_nan_losses_the_gradient_is_no_incident_of_its_own():
    bad = slice(300, None)
    assert found(loss=put(healthy_loss(), bad, NAN), grad_norm=put(healthy_norm(), bad, NAN)) == []


def test_the_gradient_just_before_a_nan_loss_belongs_to_it():
    assert (
        found(loss=put(healthy_loss(), slice(301, None), NAN), grad_norm=put(healthy_norm(), slice(300, None), NAN))
        == []
    )


@pytest.mark.parametrize("how", ["column", "event"])
def test_a_loss_scaler_finding_its_level_is_none_and_one_that_does_not_is(how):
    scaler = (
        {"loss_scale": np.full(N, 1024.0)} if how == "column" else {"events": [(5, "overflow", "OVERFLOW! skipping")]}
    )
    assert found(grad_norm=put(healthy_norm(), slice(300, 310), math.inf), **scaler) == []
    assert found(grad_norm=put(healthy_norm(), slice(300, 340), math.inf), **scaler) == [("grad_nonfinite", 300, 339)]


def test_three_norms_of_fifty_times_are_an_explosion():
    (one,) = gradients.find(run(grad_norm=times(slice(300, 303), 50.0)))
    assert (one.kind, one.first, one.last) == ("grad_explosion", 300, 302)
    assert one.evidence["usual"] == pytest.approx(0.3, rel=0.1)
    assert one.evidence["ratio"] == pytest.approx(50.0, rel=0.4)
    assert one.evidence["rows"] == 3


def test_one_norm_of_two_thousand_times_is_one_and_of_a_hundred_is_none():
    assert found(grad_norm=times(300, 2000.0)) == [("grad_explosion", 300, 300)]
    assert found(grad_norm=times(300, 100.0)) == []
    assert found(grad_norm=times(slice(300, 302), 100.0)) == []


def test_several_within_a_few_records_are_one_explosion_and_far_apart_two():
    assert found(grad_norm=times([300, 310, 320], 100.0)) == [("grad_explosion", 300, 320)]
    assert found(grad_norm=times([100, 101, 102, 300, 301, 302], 100.0)) == [
        ("grad_explosion", 100, 102),
        ("grad_explosion", 300, 302),
    ]


def test_an_explosion_that_stays_does_not_become_what_is_usual():
    ((kind, first, last),) = found(grad_norm=times(slice(200, None), 1000.0))
    assert (kind, first) == ("grad_explosion", 200)
    assert last >= 250


@pytest.mark.parametrize(
    "norm",
    [
        healthy_norm(),
        healthy_norm() * np.linspace(1.0, 20.0, N),
        np.exp(np.random.default_rng(3).normal(0.0, 0.8, N)),
        np.zeros(N),
        np.r_[np.full(15, 0.3), np.full(4, 500.0)],
        times(slice(0, 20), 20.0),
        np.full(N, 1e-320),
    ],
    ids=["healthy", "grows slowly", "wild", "zero", "too few", "high at first", "denormal"],
)
def test_no_incident(norm):
    assert gradients.find(table(grad_norm=norm)) == []


def test_rows_without_a_norm_are_passed_over():
    made = run(grad_norm=times(slice(300, 306), 100.0))
    made.present["grad_norm"] = np.arange(N) % 2 == 0
    (one,) = gradients.find(made)
    assert (one.first, one.last) == (300, 304)
    made.present["grad_norm"][:] = False
    assert gradients.find(made) == []
    assert gradients.find(run(grad_norm=None)) == []


OVERFLOWS = {
    "fairseq": "| WARNING: overflow detected, setting loss scale to: {}",
    "apex": "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {}",
    "deepspeed": "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 64, reducing to {}",
}


@pytest.mark.parametrize("message", OVERFLOWS.values(), ids=OVERFLOWS)
def test_a_loss_scale_that_falls_without_end_is_an_incident_and_a_search_for_it_is_none(message):
    def kinds(scales: list[float]) -> list[str]:
        log = run(loss=healthy_loss())
        log.events = [Event(50, "overflow", message.format(scale)) for scale in scales]
        return [episode.kind for episode in episodes.find(log)[0]]

    halves = [0.5**n for n in range(1, 9)]
    assert kinds([4.0, 2.0, 1.0, *halves]) == ["scale_collapse"]
    assert kinds([2.0**n for n in range(32, 3, -1)]) == [], "a scaler begins high"
    assert kinds([0.5, 0.5, 0.25, 0.5, 0.25, 0.25]) == [], "it grows again in between"
    assert kinds([*halves, 4.0]) == [], "the run has recovered"
